"""Exceptions: one base, and a class for each exit code of the command line."""


class Error(Exception):
    """What fracbit refuses, or what fails at run time, in the words of the command line."""


class ArgumentError(Error, ValueError):
    """An argument is wrong (the command's exit code 2)."""


class InputError(Error):
    """A model or a file is missing, damaged or does not fit (exit code 3)."""


class BudgetError(Error):
    """The budget is out of reach (exit code 4)."""

"""The package as it is installed: examples of the documentation, types, names."""

import ast
import doctest
import inspect
import re
import tempfile
import unittest
from importlib import metadata, resources
from pathlib import Path

import numpy as np
from common import DEMO, REPOSITORY, STORIES

import fracbit
from fracbit import _fracbit


def public():
    """Every public object of the package and the members of its classes, by name."""
    for name in fracbit.__all__:
        thing = getattr(fracbit, name)
        yield name, thing
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                # Fields of dataclasses have defaults, which are no members to document.
                if not member.startswith("_") and (
                    inspect.isroutine(value) or inspect.isdatadescriptor(value)
                ):
                    yield f"{name}.{member}", value


class Package(unittest.TestCase):
    def test_examples_in_the_documentation(self):
        parser, runner = (
            doctest.DocTestParser(),
            doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS),
        )
        documented = [("fracbit", fracbit), *public()]
        with tempfile.TemporaryDirectory() as home:
            for name, thing in documented:
                names = {
                    "fracbit": fracbit,
                    "np": np,
                    "demo": DEMO,
                    "stories": STORIES,
                    "out": Path(home, "out"),
                    "stats": Path(home, "stats"),
                    "Path": Path,
                }
                runner.run(parser.get_doctest(thing.__doc__ or "", names, name, None, None))
            page = (REPOSITORY / "docs/python.md").read_text()
            names = {"DEMO": DEMO}
            runner.run(parser.get_doctest(page, names, "docs/python.md", None, None))
        self.assertEqual(runner.summarize(verbose=False).failed, 0)
        self.assertGreater(runner.tries, 20)

    def test_everything_public_is_documented(self):
        for name, thing in public():
            self.assertTrue(inspect.getdoc(thing), name)
        page = (REPOSITORY / "docs/python.md").read_text()
        for name in fracbit.__all__:
            self.assertIn(f"`{name}", page)

    def test_types_are_those_of_the_extension(self):
        stub = ast.parse(resources.files("fracbit").joinpath("_fracbit.pyi").read_text())
        self.assertTrue(resources.files("fracbit").joinpath("py.typed").is_file())
        functions = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
        classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
        exported = {name for name, value in vars(_fracbit).items() if not name.startswith("_")}
        self.assertEqual(exported, {*functions, *classes})
        for name, node in functions.items():
            self.same_parameters(node, getattr(_fracbit, name), name)
        for name, node in classes.items():
            real, stubbed = getattr(_fracbit, name), {part.name: part for part in node.body}
            members = {member for member in vars(real) if not member.startswith("_")}
            self.assertEqual(
                members, {member for member in stubbed if not member.startswith("_")}, name
            )
            for member in members:
                value = getattr(real, member)
                if callable(value):
                    self.same_parameters(stubbed[member], value, f"{name}.{member}")

    def same_parameters(self, stub, real, name):
        """The same names, kinds and defaults, in the same order."""
        arguments = stub.args
        plain = [(argument.arg, inspect.Parameter.empty) for argument in arguments.args]
        for at, default in enumerate(reversed(arguments.defaults), 1):
            plain[-at] = (plain[-at][0], ast.literal_eval(default))
        keywords = zip(arguments.kwonlyargs, arguments.kw_defaults)
        keywords = [(argument.arg, ast.literal_eval(default)) for argument, default in keywords]
        if arguments.kwarg:
            plain.append((arguments.kwarg.arg, inspect.Parameter.empty))
        found = inspect.signature(real).parameters.values()
        only = inspect.Parameter.KEYWORD_ONLY
        self.assertEqual([(p.name, p.default) for p in found if p.kind != only], plain, name)
        self.assertEqual([(p.name, p.default) for p in found if p.kind == only], keywords, name)

    def test_generate_has_the_options_of_models(self):
        shared = [
            list(inspect.signature(f).parameters.values())[2:]
            for f in (fracbit.generate, fracbit.Model.generate)
        ]
        ours, theirs = ([(p.name, p.default) for p in parameters] for parameters in shared)
        self.assertEqual(ours, theirs)

    def test_keywords_are_flags(self):
        """Whatever the functions take, the commands know."""
        positional, negated = {"model", "out", "progress"}, {"smoothing", "bands", "prefix_space"}
        for command, function in [
            ("plan", fracbit.plan),
            ("quantize", fracbit.quantize),
            ("eval", fracbit.evaluate),
        ]:
            told = _fracbit.command([command, "--help"])
            for name in set(inspect.signature(function).parameters) - positional:
                flag = "--" + ("no_" if name in negated else "") + name
                known = re.search(rf"(?m)^ +(-\w, )?{flag.replace('_', '-')}\b", told)
                self.assertTrue(known, f"{command} {flag}")

    def test_the_version_is_that_of_the_wheel(self):
        self.assertEqual(metadata.version("fracbit"), fracbit.__version__)


if __name__ == "__main__":
    unittest.main()

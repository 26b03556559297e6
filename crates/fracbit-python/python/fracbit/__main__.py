"""The program `fracbit`, as `python -m fracbit` and as the console script."""

import signal
import sys

from fracbit import _fracbit, _ray


def main() -> int:
    """Runs the program with the arguments of the process; returns its exit code."""
    # Ctrl-C ends the program at once, as it ends the binary; `serve` has a handler of its own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _fracbit.main(["fracbit", *sys.argv[1:]], _ray.Dealer)


if __name__ == "__main__":
    sys.exit(main())

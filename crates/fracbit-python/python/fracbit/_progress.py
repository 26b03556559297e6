"""What the `progress` argument of long calls becomes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

Progress = None | bool | Callable[[int, int, str], Any]
"""None; True for a bar of tqdm; or a function that is called with units done, units in all, and
what is being done. What it raises stops the work and is raised by the call."""

_log = logging.getLogger("fracbit")


class Watcher:
    """Tells a function, and the logger `fracbit` what commands note."""

    def __init__(self, function: Callable[[int, int, str], Any] | None):
        self._function = function

    def note(self, line: str) -> None:
        level = logging.WARNING if line.startswith("warning:") else logging.INFO
        _log.log(level, line)

    def advance(self, done: int, total: int, what: str) -> None:
        if self._function is not None:
            self._function(done, total, what)

    def close(self) -> None:
        pass


class Bar(Watcher):
    """Shows a bar of tqdm for each stage."""

    def __init__(self) -> None:
        super().__init__(None)
        try:
            from tqdm.auto import tqdm
        except ImportError:
            raise ImportError("progress=True needs tqdm: pip install 'fracbit[progress]'") from None
        self._tqdm = tqdm
        self._stage: tuple[str, int] | None = None
        self._bar: Any = None

    def advance(self, done: int, total: int, what: str) -> None:
        if self._stage != (what, total):
            self.close()
            self._stage = (what, total)
            self._bar = self._tqdm(desc=what, total=total, unit_scale=True)
        # tqdm takes steps.
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def watcher(progress: Progress) -> Watcher:
    """The watcher for what a caller gave."""
    if progress is True:
        return Bar()
    if progress is None or progress is False:
        return Watcher(None)
    if not callable(progress):
        raise TypeError(f"progress should be None, True or a function, got {progress!r}")
    return Watcher(progress)

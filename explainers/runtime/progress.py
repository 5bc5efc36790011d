"""Progress of long work: a bar in a terminal; elsewhere, such as in the log of a job, a line every half minute.

Methods with many forward passes say how many they have made, by `advance`, to whoever is `watching`.
"""

import io
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

EVERY = 30.0
"""Time between two lines, in seconds."""


class Lines(tqdm):
    """A `tqdm` that prints a line every half minute: finished and total work, mean rate and remaining time.

    >>> lines = Lines(desc="digits", total=13, unit="batch", initial=2)
    >>> lines.start_t -= 60
    >>> lines.n = 2.6
    >>> lines.set_postfix({"accuracy": "0.9"})
    >>> str(lines)
    'digits: 2.6 of 13 batches (20 %), 100 s/batch, 17:20 left, accuracy=0.9'
    """

    monitor_interval = 0  # no monitor thread, because data loaders fork

    def __init__(self, **options: Any) -> None:
        nowhere = io.StringIO()  # tqdm would write control characters to stderr
        own = {"file": nowhere, "delay": EVERY, "mininterval": EVERY, "maxinterval": math.inf, "miniters": 0}
        super().__init__(**(options | own))

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Print the line. tqdm clears a bar by an empty `msg`, which prints nothing here."""
        if msg is None:
            print(self, file=sys.stderr, flush=True)

    def set_postfix(self, ordered_dict: Any = None, refresh: bool = False, **values: Any) -> None:
        """Show these values at the end of the next line."""
        super().set_postfix(ordered_dict, refresh=False, **values)

    def __str__(self) -> str:
        units = f"{self.unit}{'es' if self.unit.endswith(('ch', 'ss')) else 's'}"
        line = f"{self.desc}: {self.n:.4g} of {self.total} {units} ({100 * self.n / max(self.total, 1):.0f} %)"
        done = self.n - self.initial
        if done > 0:
            each = self.format_dict["elapsed"] / done
            rate = f"{each:.3g} s/{self.unit}" if each > 1 else f"{1 / each:.3g} {units}/s"
            line += f", {rate}, {self.format_interval(max(0, self.total - self.n) * each)} left"
        return f"{line}, {self.postfix}" if self.postfix else line


def progress(name: str, total: int, unit: str, initial: float = 0, shown: bool = True, delay: float = 0) -> tqdm:
    """Make a bar in a terminal, or `Lines` elsewhere.

    Args:
        name: text before the bar.
        total: amount of work, in units.
        unit: name of one unit, such as step.
        initial: amount that earlier runs did, in units; a float if fractions are counted.
        shown: False in all processes but one.
        delay: time before a bar appears, in seconds.
    """
    kind = tqdm if sys.stderr.isatty() else Lines
    scale = isinstance(initial, float)
    options = {"initial": initial, "leave": False, "disable": not shown, "delay": delay, "unit_scale": scale}
    return kind(desc=name, total=total, unit=unit, **options)


_watcher: ContextVar[Callable[[int], object] | None] = ContextVar("watcher", default=None)


def advance(passes: int) -> None:
    """Say that so many images have gone through the model. An error of the watcher stops the computation."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(passes)


def is_watched() -> bool:
    """Whether this thread is `watching`."""
    return _watcher.get() is not None


@contextmanager
def watching(watcher: Callable[[int], object]) -> Iterator[None]:
    """Call a function with each number of passes that this thread makes. Inside another one, the outer one goes on.

    >>> made = []
    >>> with watching(made.append):
    ...     advance(256)
    >>> made
    [256]
    """
    before = _watcher.get()
    _watcher.set(before or watcher)
    try:
        yield
    finally:
        _watcher.set(before)


@contextmanager
def show_passes(name: str, passes: int) -> Iterator[None]:
    """Show after two seconds how many forward passes are made, unless somebody else is `watching`.

    Args:
        name: text before the bar.
        passes: how many are expected.
    """
    with progress(name, passes, "pass", shown=not is_watched(), delay=2) as bar, watching(bar.update):
        yield

"""How far long work is: a bar in a terminal; elsewhere, such as in the log of a job, a line every half minute."""

import sys
import time
from collections.abc import Callable

from tqdm import tqdm

EVERY = 30.0
"""Seconds between two lines."""


class Lines:
    """Prints what is done, the total, the rate and the remaining time, every half minute; the interface of `tqdm`.

    Args:
        name: what stands before the numbers.
        total: amount of work.
        unit: unit of `total`, such as step.
        initial: amount that was done before this run.
        clock: seconds.
    """

    def __init__(
        self, name: str, total: int, unit: str, initial: float = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self.total, self.unit, self.clock = name, total, unit, clock
        self.n = self.initial = initial
        self.start = self.printed = clock()
        self.note = ""

    def update(self, done: float = 1) -> None:
        """Count more work, which may be 0 or a fraction, and print a line if one is due."""
        self.n += done
        now = self.clock()
        if now - self.printed >= EVERY:
            print(self.line(now - self.start), file=sys.stderr, flush=True)
            self.printed = now

    def line(self, seconds: float) -> str:
        """The line after some seconds of work.

        >>> lines = Lines("digits", 13, "batch")
        >>> lines.n = 2.6
        >>> lines.line(seconds=60)
        'digits: 2.6 of 13 batches (20 %), 23.1 s/batch, 04:00 left'
        """
        units = f"{self.unit}{'es' if self.unit.endswith('ch') else 's'}"
        text = f"{self.name}: {self.n:.4g} of {self.total} {units} ({100 * self.n / max(self.total, 1):.0f} %)"
        done = self.n - self.initial
        if done > 0:
            each = seconds / done
            rate = f"{each:.3g} s/{self.unit}" if each > 1 else f"{1 / each:.3g} {units}/s"
            text += f", {rate}, {tqdm.format_interval(max(0, self.total - self.n) * each)} left"
        return text + self.note

    def set_postfix(self, values: dict[str, str]) -> None:
        """Show these values at the end of each line."""
        self.note = "".join(f", {name} {value}" for name, value in values.items())

    def close(self) -> None:
        """Nothing is to be tidied up."""


def progress(
    name: str, total: int, unit: str, initial: float = 0, shown: bool = True, delay: float = 0
) -> tqdm | Lines:
    """A bar in a terminal, `Lines` elsewhere; both count with `update`.

    Args:
        name: what stands before the numbers.
        total: amount of work.
        unit: unit of `total`.
        initial: amount that was done before this run.
        shown: False in all processes but one.
        delay: seconds before a bar appears.
    """
    if shown and not sys.stderr.isatty():
        return Lines(name, total, unit, initial)
    whole = isinstance(initial, int)
    return tqdm(
        desc=name,
        total=total,
        initial=initial,
        unit=unit,
        leave=False,
        disable=not shown,
        delay=delay,
        unit_scale=not whole,
    )

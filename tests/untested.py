"""One line that names the tests that were skipped, and why."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest


def untested(skipped: Iterable[pytest.TestReport | pytest.CollectReport]) -> str:
    """The line, grouped by reasons; empty if nothing was skipped. A file that was skipped as a whole has no number."""
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    whole = set()
    for report in skipped:
        _, _, reason = report.longrepr
        name = Path(report.nodeid.partition("::")[0]).stem
        reasons[reason.removeprefix("Skipped: ")][name] += 1
        if isinstance(report, pytest.CollectReport):
            whole.add(name)
    parts = []
    for reason, counts in reasons.items():
        files = [f"{'all' if name in whole else count} of {name}" for name, count in counts.items()]
        parts.append(f"{', '.join(files)} ({reason})")
    return f"not tested here: {'; '.join(parts)}" if parts else ""

"""The test suite as other processors and other numbers of threads compute it: one line for each, and a log.

    python tests/portable.py                           # all tests, six times
    python tests/portable.py tests/metrics -m "not slow"

`ATEN_CPU_CAPABILITY` chooses among PyTorch's own kernels: those without vectors, those of AVX2, and those of this
machine; MKL and oneDNN, which multiply matrices, have settings of their own. Sums are rounded differently by each, and
by several threads. A configuration that fails does not stop the
others; the exit code is 1 if one has failed. All arguments are those of pytest.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "runs" / "portable"
CAPABILITIES = {
    "default": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "native": {},
}
"""Kernels, and the environment that chooses them."""

THREADS = "1", "4"
# With MKL_DYNAMIC, torch takes no more threads than cores; more threads than cores must not wait busily
ALWAYS = {"MKL_DYNAMIC": "FALSE", "OMP_WAIT_POLICY": "passive"}
COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")


def configurations() -> Iterator[tuple[str, dict[str, str]]]:
    """The name and the environment of each."""
    choosing = {name for chosen in CAPABILITIES.values() for name in chosen}
    inherited = {name: value for name, value in os.environ.items() if name not in choosing}
    for (capability, chosen), threads in product(CAPABILITIES.items(), THREADS):
        yield f"{capability}-{threads}", inherited | chosen | ALWAYS | {"OMP_NUM_THREADS": threads}


def counts(output: str) -> str:
    """What pytest says in its last line, such as "2 failed, 40 passed"; an empty string if it did not get there."""
    summaries = [line for line in output.splitlines() if re.search(r"\bin [\d.]+s\b", line)]
    return ", ".join(f"{number} {what}" for number, what in COUNTS.findall(summaries[-1])) if summaries else ""


def run(command: Sequence[str], environment: Mapping[str, str], log: Path) -> tuple[int, float]:
    """The exit code and the seconds of a command that writes into a log."""
    start = time.monotonic()
    with log.open("w") as file:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    return code, time.monotonic() - start


def main(arguments: Sequence[str], logs: Path = LOGS) -> int:
    """1 if a configuration failed."""
    logs.mkdir(parents=True, exist_ok=True)
    red = []
    for name, environment in configurations():
        log = logs / f"{name}.log"
        code, seconds = run([sys.executable, "-m", "pytest", "-q", *arguments], environment, log)
        told = counts(log.read_text(errors="replace")) or "did not finish"
        capability, threads = name.split("-")
        verdict = "ok  " if code == 0 else "FAIL"
        print(f"{verdict} {capability:7} {threads} threads: {told}, {seconds:.0f} s ({log})", flush=True)
        red += [name] if code else []
    if red:
        print(f"failed: {', '.join(red)}; the logs say which tests")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

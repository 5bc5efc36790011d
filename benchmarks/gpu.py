"""Everything that only a GPU can show, one part after the other: a page of results in Markdown.

    make gpu                                  # writes runs/gpu/README.md
    python benchmarks/gpu.py --only resume    # some parts

A part is a command with a time limit. One that fails or takes too long does not stop the others, and the page has the
end of its output. The page is written anew after each part. The exit code is 1 if a part failed or there is no GPU.
"""

import argparse
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other folders of the project are not installed

from benchmarks.memory import header
from explainers.saved.records import versions

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "runs" / "gpu"
LINES = 40
"""Lines of output that the page shows of a part that failed."""
TESTS = "-m pytest -q -p no:cacheprovider -m gpu tests"
ONE_GPU = "trainer=default trainer.accelerator=gpu trainer.devices=1"


@dataclass(frozen=True)
class Part:
    """A command of Python: what it shows, its arguments, and its time limit in minutes."""

    title: str
    arguments: str
    minutes: float


PARTS = {
    "tests": Part("Tests that need a GPU", f"{TESTS} -k 'not killed'", 20),
    "resume": Part("A killed training ends as one that was not, bit for bit", f"{TESTS} -k killed", 10),
    "memory": Part(
        "Memory of a step, computed and measured",
        "benchmarks/memory.py --measure --only tve_vitb --only anyhead_vitb",
        10,
    ),
    "profile": Part(
        "Where the time of a step of `tve_vitb` goes, with random weights and embedded images",
        f"train.py experiment=tve_vitb debug=profile data=digits target.model.pretrained=false"
        f" explainer.network.mae=null logger=csv {ONE_GPU}",
        20,
    ),
    "throughput": Part("What makes a training step faster", "benchmarks/throughput.py --device cuda --images 64", 30),
    "float32": Part(
        "Cost of an explanation, float32", "benchmarks/explain.py --device cuda --target vit_base --precision fp32", 20
    ),
    "bf16": Part(
        "Cost of an explanation, bf16", "benchmarks/explain.py --device cuda --target vit_base --precision bf16", 20
    ),
}


@dataclass(frozen=True)
class Result:
    """What became of a part: an empty `failure` means that it passed."""

    failure: str
    seconds: float
    output: str


def run(part: Part) -> Result:
    """Run a part to its end, or to its time limit; nothing that it started outlives it."""
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *shlex.split(part.arguments)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, failure = process.communicate(timeout=60 * part.minutes)[0], ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, failure = process.communicate()[0], f"longer than {part.minutes:g} minutes"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    failure = failure or (f"exit code {process.returncode}" if process.returncode else "")
    return Result(failure, time.monotonic() - start, output)


def machine() -> Iterator[str]:
    """Lines of a list: what the numbers were measured on."""
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        yield f"- GPU {i}: {properties.name}, {properties.total_memory / 2**30:.1f} GiB"
    yield f"- Host: {platform.node()}, {os.cpu_count()} CPU cores, Python {platform.python_version()}"
    yield f"- CUDA {torch.version.cuda}, " + ", ".join(
        f"{name} {number}" for name, number in versions().items() if number
    )


def page(results: dict[str, Result]) -> str:
    """The page: the machine, a line for each part, and what each printed."""
    lines = ["# What a GPU shows", "", *machine(), "", header("Part", "Result", "Seconds")]
    lines += [
        f"| {PARTS[name].title} | {result.failure or 'passed'} | {result.seconds:.0f} |"
        for name, result in results.items()
    ]
    for name, result in results.items():
        output = result.output.strip().splitlines()
        shown = output[-LINES:] if result.failure else output
        lines += ["", f"## {PARTS[name].title}", "", f"`python {PARTS[name].arguments}`", "", "```", *shown, "```"]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None, folder: Path = FOLDER) -> int:
    parser = argparse.ArgumentParser(description="Everything that only a GPU can show, on one page.")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="a part, repeatable (all)")
    chosen = parser.parse_args(arguments).only or list(PARTS)
    if not torch.cuda.is_available():
        print("There is no CUDA device here, so nothing was run.")
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Result] = {}
    for name in chosen:
        print(f"{name}: {PARTS[name].title} (at most {PARTS[name].minutes:g} minutes)", flush=True)
        results[name] = run(PARTS[name])
        print(f"  {results[name].failure or 'passed'}, {results[name].seconds:.0f} s", flush=True)
        (folder / "README.md").write_text(page(results), encoding="utf-8")
    failed = [name for name, result in results.items() if result.failure]
    print(f"{folder / 'README.md'}: " + (f"failed: {', '.join(failed)}" if failed else "all parts passed"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

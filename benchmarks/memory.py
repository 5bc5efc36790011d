"""Memory of one GPU for every experiment that trains, computed without a GPU: a Markdown table.

    python benchmarks/memory.py                                      # every experiment, and larger targets; 6 minutes
    python benchmarks/memory.py --only tve_vitb --only "vit_shapley target=vit_base"
    python benchmarks/memory.py --check                              # small steps on the CPU: computed and measured
    python benchmarks/memory.py --measure --only tve_vitb            # on a GPU: computed and measured

`fake_steps.py` and `fake_tensors.py` say what is computed, and what not. Columns are GiB of one device. `Step` and
`Evaluation` are peaks of a training step and of a validation batch, with everything that is in memory then.
Experiments with `cache=sources` read rows; `cache=none` computes them in every step. An experiment fits if both peaks
are at most CARD − RESERVE. If it does not, smaller values of `chunk_size` are tried, and then smaller batches that add
up to the same number of images by `trainer.accumulate_grad_batches`; each value is half of the one before.
"""

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other folders of the project are not installed

from benchmarks.explain import wait
from benchmarks.fake_steps import Account, Steps, account, build, compose_config, make_batch
from benchmarks.fake_tensors import count_bytes
from explainers.running.targets import CONFIGS

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler warns about missing GPUs
GIB = 2**30
CARD = 23.5
"""GiB that PyTorch can use of a GPU of 24 GB, such as an RTX A5000 without ECC: an assumption."""
RESERVE = 1.5
"""GiB for the CUDA context, NCCL, workspaces of kernels, and memory between blocks: an assumption."""
FASTSHAP = "vit_shapley explainers@explainer=fastshap cache=none"
LARGER = (
    FASTSHAP,
    "tve_vitb data.batch_size=32 trainer.accumulate_grad_batches=2",
    *(f"tve_vitb target={target}" for target in ("vit_large", "swin_base", "resnet50", "deit_base")),
    *(f"{name} target=vit_base" for name in ("vit_shapley", FASTSHAP, "surrogate", "linear_head", "self_explaining")),
    "vit_shapley target=vit_base cache=none explainer.network.freeze=false module.loss.coalitions=32",  # as published
    "tve_vit_tiny target=vit_base cache=none",
    "anyhead_vitb target=vit_large",
    *(f"anyhead_tower target={target}" for target in ("clip_vit_b16", "siglip_vit_b16", "tinyclip", "dinov2_vit_s14")),
    "full_finetuning target=vit_large",
)
"""Experiments with other targets than their configs'."""
CHECKS = {
    "tve, light network": "experiment=demo/tve target=tiny cache=none explainer.network.width=96",
    "tve, paper's network": "target=tiny data=digits explainers@explainer=tve_paper_small data.batch_size=16",
    "anyhead": "experiment=demo/anyhead target=tiny cache=none",
    "classifier": "experiment=demo/base target=digits_vit",
}
"""Small steps → their overrides."""


def experiments() -> list[str]:
    """Names of all experiments of train.py."""
    paths = sorted((CONFIGS / "experiment").glob("*.yaml"))
    return [path.stem for path in paths if "# Command: python train.py" in path.read_text(encoding="utf-8")]


def training_overrides(name: str) -> list[str]:
    """The arguments of train.py for a row of the table, such as `tve_vitb target=vit_large`."""
    first, *others = name.split()
    return [f"experiment={first}", *others]


def fits(needed: Account) -> bool:
    """Whether the peak leaves the reserve of the card free."""
    return needed.peak <= (CARD - RESERVE) * GIB


def remedy(overrides: Sequence[str]) -> str:
    """The settings with the largest chunks, or else the largest batch, that make an experiment fit."""
    for choices in smaller(compose_config(*overrides)):
        if choices and fits(account(compose_config(*overrides, *choices[-1]))):
            for settings in choices:
                needed = account(compose_config(*overrides, *settings))
                if fits(needed):
                    return f"{' '.join(settings)}: {needed.peak / GIB:.2f}"
    return "no size does"


def smaller(cfg: Any) -> Iterator[list[list[str]]]:
    """Lists of overrides that change one setting, each to half of the one before."""
    loss = cfg.module.get("loss") or {}
    yield [[f"module.loss.chunk_size={size}"] for size in halves(loss.get("chunk_size", 0)) if size >= 16]
    images = cfg.data.batch_size
    times = cfg.trainer.accumulate_grad_batches
    yield [
        [f"data.batch_size={size}", f"trainer.accumulate_grad_batches={images // size * times}"]
        for size in halves(images)
    ]


def halves(number: int) -> list[int]:
    """Half of a number, half of that, and so on; at least 1."""
    return [number >> i for i in range(1, number.bit_length())]


def row(name: str) -> str:
    """The line of an experiment."""
    cfg = compose_config(*training_overrides(name))
    if not cfg.fit:
        return f"| {name} |{' – |' * 9} trains nothing (fit=false) |"
    needed = account(cfg)
    counts = [needed.frozen, needed.trained, needed.gradients, needed.states, needed.buckets, needed.activations]
    cells = [f"{count / GIB:.3f}" for count in counts] + [
        f"{peak / GIB:.2f}" for peak in (needed.step, needed.evaluation)
    ]
    verdict = "yes" if fits(needed) else f"no; {remedy(training_overrides(name))}"
    return f"| {' | '.join([name, str(needed.images), *cells, verdict])} |"


def header(*titles: str) -> str:
    """The first two lines of a table in Markdown."""
    return f"| {' | '.join(titles)} |\n{'| --- ' * len(titles)}|"


def table(names: Sequence[str]) -> Iterator[str]:
    """The lines of the table, in Markdown."""
    yield header(
        *("Experiment", "Images per GPU", "Frozen weights", "Trained weights", "Gradients", "Optimiser", "DDP buckets"),
        *("Activations", "Step", "Evaluation", f"At most {CARD} − {RESERVE} GiB"),
    )
    for name in names:
        yield row(name)


def peak_memory(call: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, int]:
    """The result of a call, and its peak memory in bytes, without what was allocated before."""
    gc.collect()  # garbage of earlier calls, freed during this call, would lower its peak
    if device.type == "cuda":
        wait(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = call()
        return result, torch.cuda.max_memory_allocated(device) - before
    with profile(profile_memory=True, use_kineto=False) as profiler:
        result = call()
    events: Any = profiler.kineto_results
    in_order = sorted(events.events(), key=lambda event: event.start_ns())
    sizes = torch.tensor([0, *(event.nbytes() for event in in_order if event.name() == "[memory]")])
    return result, int(sizes.cumsum(0).max())


def compare_step(overrides: Sequence[str], device: str) -> tuple[float, float]:
    """GiB of a training step: computed, and measured by a real step on the device."""
    cfg, cuda = compose_config(*overrides), device == "cuda"
    computed = account(cfg, cuda=cuda).step
    module = build(cfg).to(device)
    weights = count_bytes([*module.parameters(), *module.buffers()])

    def step() -> torch.Tensor:  # with all that the step frees
        batch = make_batch(cfg, module, cfg.data.batch_size, device)
        Steps(cfg, module, device, cuda).train(batch)
        return torch.empty(0)

    return computed / GIB, (weights + peak_memory(step, torch.device(device))[1]) / GIB


def comparison(rows: dict[str, Sequence[str]], device: str) -> Iterator[str]:
    """A table of computed and measured memory."""
    yield header(f"Step on {device}", "Computed (MiB)", "Measured (MiB)", "Difference (%)")
    for name, overrides in rows.items():
        computed, measured = compare_step(overrides, device)
        difference = 100 * (computed / measured - 1)
        yield f"| {name} | {1024 * computed:.2f} | {1024 * measured:.2f} | {difference:+.1f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Memory of one GPU for every experiment, computed without a GPU.")
    parser.add_argument(
        "--only", action="append", help="an experiment with other overrides after it, repeatable (all, and LARGER)"
    )
    parser.add_argument("--check", action="store_true", help="small steps on the CPU, computed and measured")
    parser.add_argument("--measure", action="store_true", help="on a GPU: computed and measured")
    options = parser.parse_args(arguments)
    if options.check:
        lines = comparison({name: overrides.split() for name, overrides in CHECKS.items()}, "cpu")
    elif options.measure:
        lines = comparison({name: training_overrides(name) for name in options.only or ["tve_vitb"]}, "cuda")
    else:
        lines = table(options.only or [*experiments(), *LARGER])
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()

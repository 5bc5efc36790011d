"""Time and memory of post-hoc methods, relative to slower ways to the same heatmaps, measured in one run.

    python benchmarks/posthoc.py --threads 1                                  # ViT-Ti/16
    python benchmarks/posthoc.py --threads 1 --precision bf16 --rounds 5 --output posthoc.json
    python benchmarks/posthoc.py --skip masks --skip sweep --images 16

The target has random weights. They change the speed of ViT-CX alone, whose number of masks depends on the image. The
comparisons, each of which `--skip` leaves out:

- `decompx`: one forward and one backward pass for all start layers, beside DecompX as it is defined, with a tensor of
  T × (T + 1) × D that goes forward from every start layer (`forward_decomposition.py`), for the first image alone
- `plus`: the sum over all layers beside the same method of one layer; all run from layer 0 on
- `masks`: masked images in chunks beside one at a time, for the first image alone
- `batch`: all images beside one at a time
- `sweep`: the perturbation sweep of 11 levels, with tokens that leave the sequence beside pixels set to 0
- `globenc`: the norms of one layer from inner products, beside vectors of T × T × D

Both run once in every round; a relative time is the median of the rounds' ratios. Memory is measured in one uncounted
call before the rounds: it is the peak of what PyTorch's allocator holds during the call. Weights and images, allocated
before the call, do not count, nor does memory that oneDNN and MKL allocate themselves. All numbers are per image;
relative time and memory are this project's divided by the other way's. Compare numbers of the same run only.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other folders of the project are not installed

from benchmarks import forward_decomposition
from benchmarks.comparison import Comparison, compare
from benchmarks.explain import choose_device, device_name, finish, parser_of
from benchmarks.kernelshap import SIZES, SIZES_HELP, build, random_images
from explainers import posthoc
from explainers.evaluation.sweep import Sweep
from explainers.masking import PatchGrid, Removal
from explainers.models import TargetModel
from explainers.posthoc.contributions import contribution_norms
from explainers.saved.records import versions
from explainers.shapley.kernel_shap import KernelSHAP
from explainers.transformer.blocks import value_paths
from explainers.transformer.recording import record_pass

GROUPS = ("decompx", "plus", "masks", "batch", "sweep", "globenc")


def comparisons(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, Comparison]]:
    """Pairs of a group and one of its comparisons."""
    target, grid = build(options.target_size, device)
    target.head.weight.mul_(0.1)  # otherwise one class has all the probability, under every mask
    images = random_images(options.images, grid.size, device)
    classes = target(images).argmax(-1)
    groups: dict[str, Callable[[], Iterator[Comparison]]] = {
        "decompx": partial(compare_decompx, target, grid, images, classes),
        "plus": partial(compare_plus, target, grid, images, classes),
        "masks": partial(compare_masks, target, grid, images[:1], classes[:1], options.masks, options.chunk_size),
        "batch": partial(compare_batch, target, grid, images, classes),
        "sweep": partial(compare_sweep, target, grid, images, classes, options.chunk_size),
        "globenc": partial(compare_globenc, target, images),
    }
    for group in GROUPS:
        if group not in options.skip:
            yield from ((group, comparison) for comparison in groups[group]())


def compare_decompx(target: TargetModel, grid: PatchGrid, images: Tensor, classes: Tensor) -> Iterator[Comparison]:
    ours = partial(posthoc.build("DecompX-SkipPLUS", target, grid), images, classes)
    other = partial(forward_decomposition.decompx_skip_plus, target, grid, images[:1], classes[:1])
    yield Comparison(
        "DecompX-SkipPLUS", "forward decomposition", (ours, len(images)), (other, 1), True, 1 / 50, 1 / 100
    )


def compare_plus(target: TargetModel, grid: PatchGrid, images: Tensor, classes: Tensor) -> Iterator[Comparison]:
    for name in ("InputXGradient", "DecompX", "GradCAM", "FullGrad"):
        layer_0, plus = (
            partial(method, images, classes)
            for method in (posthoc.build(name, target, grid, {"layer": 0}), posthoc.build(f"{name}-PLUS", target, grid))
        )
        yield Comparison(f"{name}-PLUS", "layer 0", (plus, len(images)), (layer_0, len(images)), False, 1.3)


def compare_masks(
    target: TargetModel, grid: PatchGrid, images: Tensor, classes: Tensor, masks: int, chunk_size: int
) -> Iterator[Comparison]:
    methods: dict[str, Callable[..., Any]] = {
        "ViT-CX": posthoc.ViTCX,
        "RISE": partial(posthoc.RISE, masks=masks),
        "KernelSHAP": partial(KernelSHAP, budget=masks),
        "Occlusion": posthoc.Occlusion,
    }
    for name, method in methods.items():
        chunked, alone = (partial(method(target, grid, chunk_size=size), images, classes) for size in (chunk_size, 1))
        yield Comparison(name, "one masked image at a time", (chunked, len(images)), (alone, len(images)), time_aim=1)


def compare_batch(target: TargetModel, grid: PatchGrid, images: Tensor, classes: Tensor) -> Iterator[Comparison]:
    def explain_one_by_one(method: Callable[..., Tensor]) -> Tensor:
        return torch.cat([method(images[i : i + 1], classes[i : i + 1]) for i in range(len(images))])

    for name in ("AttentionRollout", "GAE"):
        method = posthoc.build(name, target, grid)
        batch, alone = partial(method, images, classes), partial(explain_one_by_one, method)
        yield Comparison(name, "one image at a time", (batch, len(images)), (alone, len(images)), time_aim=1)


def compare_sweep(
    target: TargetModel, grid: PatchGrid, images: Tensor, classes: Tensor, chunk_size: int
) -> Iterator[Comparison]:
    normalised, heatmaps = target.normalise(images), torch.rand(len(images), *grid.shape, device=images.device)
    index, whole = torch.arange(len(images), device=images.device), target(images)

    def sweep(removal: Removal) -> Tensor:
        chosen = Sweep(target, grid, removal, levels=11, chunk_size=chunk_size)
        ends = torch.stack([whole, chosen.empty(normalised).expand_as(whole)], 1)
        return chosen(normalised, heatmaps, index, classes, classes, ends)

    drop, zero = partial(sweep, "drop"), partial(sweep, "zero")
    yield Comparison("sweep of drop", "sweep of zero", (drop, len(images)), (zero, len(images)), False, 1)


def compare_globenc(target: TargetModel, images: Tensor) -> Iterator[Comparison]:
    with record_pass(target, attention=True) as record:
        target.embed(target.normalise(images))
    numbers = record.attention[-1], value_paths(target, record.values[-1], -1), record.inputs[-1]
    ours, other = (partial(norms, *numbers) for norms in (contribution_norms, forward_decomposition.contribution_norms))
    yield Comparison("GlobEnc's norms", "T × T × D vectors", (ours, len(images)), (other, len(images)), True, 1, 1)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All measured numbers, the settings and the machine, as written by `--output`."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = choose_device(options.device)
    keys = ("threads", "precision", "target_size", "images", "masks", "chunk_size", "rounds", "seconds")
    machine = versions() | {"device": device_name(device)} | {key: vars(options)[key] for key in keys}
    results: dict[str, Any] = {"machine": machine, "groups": {}}
    gc.freeze()  # so that collecting the garbage of each call is quick
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16"):
        for group, comparison in comparisons(options, device):
            numbers = compare(comparison, options.rounds, options.seconds, device)
            results["groups"].setdefault(group, {})[comparison.name] = numbers
    gc.unfreeze()
    return results


def table(results: dict[str, Any]) -> str:
    """A line for each comparison."""

    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.3g}"

    lines = [
        "| This project | Beside | ms/image | Beside | Relative time (smallest, largest) | Aim | MB/image | Beside"
        " | Relative memory | Aim | Largest difference |",
        "| --- " * 11 + "|",
    ]
    for name, row in (item for group in results["groups"].values() for item in group.items()):
        memory = [count / 1e6 for count in row["bytes_per_image"]]
        spread = f"({number(row['spread'][0])}, {number(row['spread'][1])})"
        cells = [
            *(name, row["beside"], *map(number, row["ms_per_image"]), f"{number(row['relative_time'])} {spread}"),
            *(number(row["time_aim"]), *map(number, memory), number(row["relative_memory"])),
            *(number(row["memory_aim"]), number(row["largest_difference"])),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("Time and memory of post-hoc methods, relative to slower ways.")
    parser.add_argument("--target-size", choices=list(SIZES), default="small", help=SIZES_HELP)
    parser.add_argument("--skip", action="append", default=[], choices=GROUPS, help="what not to measure, repeatable")
    parser.add_argument("--images", type=int, default=4, help="images per batch (4)")
    parser.add_argument("--masks", type=int, default=16, help="masks of RISE and coalitions of KernelSHAP (16)")
    parser.add_argument("--chunk-size", type=int, default=64, help="maximum masked images in memory (64)")
    parser.add_argument("--rounds", type=int, default=3, help="least number of counted rounds (3)")
    parser.add_argument("--seconds", type=float, default=3, help="short calls: more rounds, for this time (3)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    options = parser.parse_args(arguments)
    results = measure(options)
    settings = f"{options.threads} threads, {options.precision}, {options.images} images"
    finish(results, settings, table(results), options.output)


if __name__ == "__main__":
    main()

"""Time of the curves of perturbation sweeps, beside Quantus and beside one curve alone, measured in one run.

    python benchmarks/metrics.py --threads 1                      # ViT-Ti/16, 4 × 4 patches of 56 pixels, 17 levels
    python benchmarks/metrics.py --threads 1 --images 2 --patches-per-side 7 --output metrics.json

Both libraries get the same ViT of random weights, images, random heatmaps, mean pixels and threads. What is compared:

- six curves (deletion, insertion, deletion accuracy, AOPC, LOdds, SRG) beside a call of Quantus for each and two for
  SRG; and beside five calls, if AOPC and LOdds are computed from what the call for deletion returns
- deletion beside one call, and SRG, which reads both sides of a sweep, beside two
- all curves beside SRG, and six curves of pixels, of heatmaps scaled up to the image, beside six of patches

The calls are of RegionPerturbation, which removes one patch after the other, the most important first (`morf`) or last
(`lerf`), and returns f(x) − f(x without them). This equals a sweep with a level for each patch: `morf` is its
removed side, `lerf` its preserved side in reverse. f is the target with one of `QUANTITIES` as output.
PixelFlipping, whose steps cut through patches of three channels, and ROAD, which imputes pixels, are not equal to it.

First every call is made for one image, to count forward passes and to check that both libraries compute the same
numbers. Then all calls take turns. Deletion and AOPC need the same call; it is made once in a round, and counted for
both. On CPUs, processor time is measured, which other work on the machine hardly changes. A relative time, of this
project divided by the other, is the median of the rounds' ratios. Compare numbers of the same run only.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other folders of the project are not installed

from benchmarks.explain import Call, choose_device, device_name, finish, gflops, parser_of, seconds
from benchmarks.kernelshap import SIZES, SIZES_HELP, build, random_images
from explainers.evaluation.sweep import Order, Sweep
from explainers.masking import PatchGrid
from explainers.metrics.curves import CURVES, QUANTITIES, Curve, find_needed_sides
from explainers.metrics.perturbation import PerturbationCurves
from explainers.models import TargetModel
from explainers.saved.records import versions
from explainers.share.adapters import to_pixels

PRESET: tuple[Curve, ...] = ("deletion", "insertion", "deletion_accuracy", "aopc", "log_odds", "relevance_gain")
SWEEPS: dict[str, tuple[Sequence[Curve], Order]] = {  # of this project: curves, and what is removed
    "six curves": (PRESET, "patches"),
    "six curves of pixels": (PRESET, "pixels"),
    "deletion": (("deletion",), "patches"),
    "SRG": (("relevance_gain",), "patches"),
    "all curves": (get_args(Curve), "patches"),
}
SIDES = "morf", "lerf"  # Quantus' orders, for the removed and for the preserved side of a sweep
TOLERANCE = 1e-4  # largest difference between both libraries, relative to the largest drop of an output


@dataclass(frozen=True)
class Case:
    """What both libraries measure; a call for the first images takes the first heatmaps and classes."""

    target: TargetModel
    grid: PatchGrid
    heatmaps: Tensor  # (B, rows, columns)
    classes: Tensor  # (B,)
    chunk_size: int  # maximum number of masked images in memory


class Output(nn.Module):
    """The target as Quantus wants a model: normalised images (B, C, H, W) → one of `QUANTITIES` for each class."""

    def __init__(self, target: TargetModel, quantity: str) -> None:
        super().__init__()
        self.target = target
        self.quantity = quantity

    def forward(self, normalised: Tensor) -> Tensor:
        logits = self.target.classify(self.target.embed(normalised))
        if self.quantity == "correct":
            return nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        return {"probability": logits.softmax(-1), "log_probability": logits.log_softmax(-1)}.get(self.quantity, logits)


def sweep(case: Case, curves: Sequence[Curve], order: Order, images: Tensor) -> Tensor:
    """Measure heatmaps as `Evaluation` does; the outputs of the sweep, (B, 6, 2, levels)."""
    target = case.target
    count = len(images)
    levels = case.grid.num_patches + 1
    masked = Sweep(target, case.grid, "zero", levels, order, case.chunk_size, find_needed_sides(curves))
    normalised, classes = target.normalise(images), case.classes[:count]
    whole = target.classify(target.embed(normalised))
    ends = torch.stack([whole, masked.empty(normalised).expand_as(whole)], 1)
    outputs = masked(normalised, case.heatmaps[:count], torch.arange(count).to(classes), classes, classes, ends)
    metric = PerturbationCurves(masked.grid.num_patches, curves, levels).to(images.device)
    metric.update(outputs)
    metric.compute()
    return outputs


def region_perturbation(case: Case, quantity: str, side: str, images: Tensor) -> Tensor:
    """Drops of an output without the first 1, 2, ..., N patches of an order, (B, N), by Quantus."""
    import quantus

    metric = quantus.RegionPerturbation(
        patch_size=case.grid.patch_size,
        order=side,
        regions_evaluation=case.grid.num_patches,
        normalise=False,
        perturb_baseline=0.0,  # after normalisation: the mean pixel
        disable_warnings=True,
    )
    drops = metric(
        Output(case.target, quantity).eval(),
        case.target.normalise(images).cpu().numpy(),
        case.classes[: len(images)].cpu().numpy(),
        to_pixels(case.heatmaps[: len(images)], case.grid.size).cpu().numpy(),
        softmax=False,  # `Output` computes it
        device=str(images.device),
        batch_size=case.chunk_size,
    )
    return torch.stack([torch.as_tensor(each) for each in drops])


def needed(curves: Sequence[Curve]) -> list[tuple[str, str]]:
    """The output and the order of every call of Quantus that the curves are computed from."""
    sides = [(CURVES[name].quantity, CURVES[name].removed, CURVES[name].preserved) for name in curves]
    return [(quantity, SIDES[i]) for quantity, *factors in sides for i in range(2) if factors[i]]


def check_same(case: Case, image: Tensor) -> float:
    """The largest difference between both libraries for an image; above `TOLERANCE`, it raises an ArithmeticError."""
    outputs, differences = sweep(case, PRESET, "patches", image), []
    for quantity, side in dict.fromkeys(needed(PRESET)):
        curve = outputs[:, QUANTITIES.index(quantity), SIDES.index(side)].cpu()
        curve = curve if side == "morf" else curve.flip(-1)  # from the whole image on
        drops = curve[:, :1] - curve[:, 1:]
        difference = (region_perturbation(case, quantity, side, image) - drops).abs().max()
        differences.append((difference / drops.abs().max().clamp(min=1e-30)).item())  # all drops of `correct` may be 0
        if not differences[-1] <= TOLERANCE:
            raise ArithmeticError(f"Quantus differs by {differences[-1]:.2g} in {quantity}, {side}")
    return max(differences)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All measured numbers, the settings and the machine, as written by `--output`."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = choose_device(options.device)
    target, own = build(options.target_size, device)
    target.requires_grad_(False).head.weight.mul_(0.1)  # otherwise one class has all the probability, under every mask
    grid = PatchGrid(own.size, own.size[0] // options.patches_per_side)
    images = random_images(options.images, grid.size, device)
    heatmaps = torch.rand(options.images, *grid.shape, device=device)
    keys = "threads", "target_size", "images", "patches_per_side", "rounds", "chunk_size"
    machine = versions() | {"device": device_name(device)} | {key: vars(options)[key] for key in keys}
    results: dict[str, Any] = {"machine": machine}
    with torch.no_grad():
        case = Case(target, grid, heatmaps, target(images).argmax(-1), options.chunk_size)
        calls: dict[Any, Call] = {name: partial(sweep, case, *given) for name, given in SWEEPS.items()}
        if not options.without_quantus:
            machine["quantus"] = version("quantus")
            results["largest_difference"] = check_same(case, images[:1])
            calls |= {run: partial(region_perturbation, case, *run) for run in needed(PRESET)}
        passes = {name: gflops(call, images[:1]) / gflops(target, images[:1]) for name, call in calls.items()}
        clock = time.perf_counter if device.type == "cuda" else time.process_time  # of all threads
        taken = seconds(calls, images, options.rounds, warm_up=0, clock=clock)
    return results | {"comparisons": compare(taken, passes, options.images)}


def compare(taken: Mapping[Any, list[float]], passes: Mapping[Any, float], images: int) -> list[dict[str, Any]]:
    """The numbers of all comparisons, from the seconds in each round and the forward passes of the calls made."""
    runs = needed(PRESET)
    enough = [run for run in dict.fromkeys(runs) if run[0] != "log_probability"]
    comparisons = []
    for name, beside, others, aim in (
        ("six curves", f"Quantus, {len(runs)} calls", runs, 1 / 10),
        ("six curves", f"Quantus, {len(enough)} calls", enough, None),
        ("deletion", "Quantus, 1 call", needed(["deletion"]), None),
        ("SRG", "Quantus, 2 calls", needed(["relevance_gain"]), None),
        ("all curves", "SRG", ["SRG"], 1.1),
        ("six curves of pixels", "six curves", ["six curves"], None),
    ):
        if not set(others) <= taken.keys():  # without Quantus
            continue
        other = [sum(durations) for durations in zip(*(taken[call] for call in others), strict=True)]
        ratios = [mine / theirs for mine, theirs in zip(taken[name], other, strict=True)]
        numbers: dict[str, Any] = {"name": name, "beside": beside}
        numbers["ms_per_image"] = [1e3 * median(durations) / images for durations in (taken[name], other)]
        numbers["forward_passes"] = [round(passes[name]), round(sum(passes[call] for call in others))]
        numbers |= {"relative_time": median(ratios), "spread": [min(ratios), max(ratios)], "time_aim": aim}
        comparisons.append(numbers)
    return comparisons


def table(results: dict[str, Any]) -> str:
    """A line for each comparison."""
    numbers = "ms/image | Beside | Forward passes/image | Beside | Relative time (smallest, largest) | Aim"
    lines = [f"| This project | Beside | {numbers} |", "| --- " * 8 + "|"]
    for row in results["comparisons"]:
        cells = [row["name"], row["beside"], *(f"{each:.3g}" for each in row["ms_per_image"])]
        spread = ", ".join(f"{each:.3g}" for each in row["spread"])
        cells += [*map(str, row["forward_passes"]), f"{row['relative_time']:.3g} ({spread})"]
        lines.append(f"| {' | '.join(cells)} | {row['time_aim'] or '–'} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("Time of the curves of perturbation sweeps, beside Quantus.")
    parser.add_argument("--target-size", choices=list(SIZES), default="small", help=SIZES_HELP)
    parser.add_argument("--images", type=int, default=4, help="images per batch (4)")
    parser.add_argument("--patches-per-side", type=int, default=4, help="P, for P² patches and P² + 1 levels (4)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (3)")
    # Of 64, the tensors exceed 32 MB, which glibc gives back to the system after every layer
    parser.add_argument("--chunk-size", type=int, default=16, help="maximum masked images in memory (16)")
    parser.add_argument("--without-quantus", action="store_true", help="measure this project alone")
    options = parser.parse_args(arguments)
    if not options.without_quantus and find_spec("quantus") is None:
        parser.error("Quantus is not installed: make peers, or --without-quantus")
    results = measure(options)
    settings = f"{options.threads} threads, {options.images} images, {options.patches_per_side**2} patches"
    difference = f", largest difference {results['largest_difference']:.2g}" if "largest_difference" in results else ""
    finish(results, f"{settings}{difference}", table(results), options.output)


if __name__ == "__main__":
    main()

"""Speed of this project's KernelSHAP and of captum's KernelSHAP, measured in one run.

    python benchmarks/kernelshap.py --threads 1                  # ViT-Ti/16, 7 × 7 patches of 32 pixels, 500 coalitions
    python benchmarks/kernelshap.py --target-size base --images 1 --output kernelshap.json

Both explain the probability of the predicted class of the same model (random weights) for the same images and the same
coalitions of patches, which include all patches and no patch. A hidden patch is 0 after normalisation. captum gets the
coalitions of this project: other random coalitions would change the values far more than another fit does. captum
explains one image at a time, with its default of 1 perturbation per evaluation and with `--perturbations-per-eval`.
Every method runs once in a round, after an uncounted call with few coalitions. Compare numbers of the same run only.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
from captum.attr import KernelShap
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other folders of the project are not installed

from benchmarks.explain import choose_device, device_name, finish, parser_of, wait
from explainers.masking import PatchGrid
from explainers.metrics.agreement import spearman
from explainers.models import TargetModel
from explainers.report.tables import markdown
from explainers.runtime.sampling import stream
from explainers.saved.records import versions
from explainers.shapley.coalition_draws import shapley_coalitions
from explainers.shapley.kernel_shap import KernelSHAP

SEED = 1  # seed of the coalitions
SMALL: dict[str, Any] = {"model_name": "vit_tiny_patch16_224", "patch_size": 8, "depth": 2}
SIZES: dict[str, tuple[PatchGrid, dict[str, Any]]] = {
    "tiny": (PatchGrid(24, 8), SMALL | {"img_size": 24, "embed_dim": 24}),
    "digits": (PatchGrid(48, 8), SMALL | {"img_size": 48, "embed_dim": 64, "num_heads": 2}),
    "small": (PatchGrid(224, 32, differs=True), {"model_name": "vit_tiny_patch16_224"}),
    "base": (PatchGrid(224, 32, differs=True), {"model_name": "vit_base_patch16_224"}),
}
"""`--target-size` → patches to explain, and arguments of timm.create_model; the first size is for tests."""
SIZES_HELP = "a tiny ViT for tests, the digits' ViT size, ViT-Ti/16 or ViT-B/16 (small)"


def build(size: str, device: torch.device) -> tuple[TargetModel, PatchGrid]:
    """A model of 10 classes, with a head of normal weights so that probabilities of images differ, and its patches."""
    grid, arguments = SIZES[size]
    model = timm.create_model(**arguments, pretrained=False, num_classes=10)
    target = TargetModel(model)
    torch.nn.init.normal_(target.head.weight)
    return target.to(device).eval(), grid


def random_images(count: int, size: tuple[int, int], device: torch.device) -> Tensor:
    """Random images with coarse detail: uint8, (count, 3, H, W)."""
    coarse = torch.randint(0, 256, (count, 3, 8, 8), device=device).float()
    return torch.nn.functional.interpolate(coarse, size, mode="bilinear").to(torch.uint8)


def feature_mask(grid: PatchGrid, device: torch.device) -> Tensor:
    """Patch number of every pixel, (1, 1, H, W)."""
    patches = torch.arange(grid.num_patches, device=device).view(1, 1, *grid.shape)
    return patches.repeat_interleave(grid.patch_size, -1).repeat_interleave(grid.patch_size, -2)


def explain_ours(
    target: TargetModel, grid: PatchGrid, chunk_size: int, images: Tensor, classes: Tensor, budget: int
) -> Tensor:
    """Shapley values (B, N) by this project; `budget` coalitions, and in addition all patches and no patch."""
    return KernelSHAP(target, grid, budget, chunk_size=chunk_size, seed=SEED)(images, classes).flatten(1)


def coalitions(grid: PatchGrid, budget: int, device: torch.device) -> Tensor:
    """The coalitions of `KernelSHAP` in captum's form: 1 for a visible patch, 0 for a hidden one, (budget, N)."""
    seed = stream("coalitions", SEED, 0)
    return shapley_coalitions(torch.zeros(1, dtype=torch.long, device=device), grid.num_patches, budget, seed)[0].long()


def explain_captum(
    target: TargetModel, grid: PatchGrid, batch: int, images: Tensor, classes: Tensor, budget: int
) -> Tensor:
    """Shapley values (B, N) by captum for the coalitions of `explain_ours`, `batch` coalitions per forward pass."""
    visible = coalitions(grid, budget, images.device)

    def coalition_by_coalition(original: Tensor, **_: Any) -> Iterator[Tensor]:
        yield torch.ones_like(visible[:1])
        yield torch.zeros_like(visible[:1])
        yield from visible.split(1)

    settings = {
        "feature_mask": feature_mask(grid, images.device),
        "n_samples": budget + 2,
        "perturbations_per_eval": batch,
        "return_input_shape": False,
    }
    shap = KernelShap(target.score_images)
    normalised = target.normalise(images)
    shap.perturb_func = coalition_by_coalition
    values = [shap.attribute(normalised[i : i + 1], 0, int(classes[i]), **settings) for i in range(len(images))]
    return torch.cat(values)


def take_turns(
    calls: Mapping[str, Callable[..., Tensor]], images: Tensor, classes: Tensor, budget: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, Tensor]]:
    """Seconds of every call in each round, and its values; a first call with few coalitions is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    values = {name: call(images, classes, budget=2) for name, call in calls.items()}
    for _ in range(rounds):
        for name, call in calls.items():
            wait(images.device)
            start = time.perf_counter()
            values[name] = call(images, classes, budget=budget)
            wait(images.device)
            taken[name].append(time.perf_counter() - start)
    return taken, values


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All measured numbers, the settings and the machine, as written by `--output`."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = choose_device(options.device)
    target, grid = build(options.target_size, device)
    images = random_images(options.images, grid.size, device)
    calls = {"ours": partial(explain_ours, target, grid, options.chunk_size)}
    for batch in sorted({1, options.perturbations_per_eval}):
        calls[f"captum, {batch} at a time"] = partial(explain_captum, target, grid, batch)
    with torch.no_grad():
        taken, values = take_turns(calls, images, target(images).argmax(-1), options.budget, options.rounds)
    keys = ("threads", "target_size", "budget", "images", "rounds", "chunk_size")
    machine = versions() | {"device": device_name(device)} | {key: vars(options)[key] for key in keys}
    rates = {name: [len(images) / duration for duration in durations] for name, durations in taken.items()}
    return {
        "machine": machine | {"patches": grid.num_patches},
        "methods": {
            name: {
                "images_per_second": median(rates[name]),
                "spread": [min(rates[name]), max(rates[name])],
                "ours_is_faster_by": median(ours / rate for ours, rate in zip(rates["ours"], rates[name], strict=True)),
                "spearman_with_ours": spearman(values[name], values["ours"]).mean().item(),
            }
            for name in calls
        },
    }


def table(results: dict[str, Any]) -> str:
    """A line for each method."""
    return markdown(
        [
            {
                "KernelSHAP": name,
                "Images/s (extremes)": "{:.4f} ({:.4f}, {:.4f})".format(row["images_per_second"], *row["spread"]),
                "ours is faster by": f"{row['ours_is_faster_by']:.2f}",
                "Spearman with ours": f"{row['spearman_with_ours']:.3f}",
            }
            for name, row in results["methods"].items()
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("Speed of this project's KernelSHAP and of captum's.")
    parser.add_argument("--target-size", choices=list(SIZES), default="small", help=SIZES_HELP)
    parser.add_argument("--budget", type=int, default=500, help="coalitions per image (500)")
    parser.add_argument("--images", type=int, default=2, help="number of images (2)")
    parser.add_argument("--rounds", type=int, default=1, help="number of counted rounds (1)")
    parser.add_argument("--chunk-size", type=int, default=64, help="ours: maximum masked images in memory (64)")
    batch = "captum: coalitions per forward pass, measured after 1 (64)"
    parser.add_argument("--perturbations-per-eval", type=int, default=64, help=batch)
    options = parser.parse_args(arguments)
    results = measure(options)
    settings = f"{options.threads} threads, {options.budget} coalitions of {results['machine']['patches']} patches"
    finish(results, f"{settings}, {options.images} images", table(results), options.output)


if __name__ == "__main__":
    main()

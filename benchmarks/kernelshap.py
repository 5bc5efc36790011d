"""Images per second of this project's KernelSHAP and of captum's, in one run.

    python benchmarks/kernelshap.py --threads 1                  # ViT-Ti/16, 7 × 7 patches of 32 pixels, 500 coalitions
    python benchmarks/kernelshap.py --target-size base --images 1 --output kernelshap.json

Both ask the same model, with random weights, about the same coalitions of patches of the same images, and about all
patches and none, and explain the probability of the predicted class. A hidden patch is 0 after normalisation. captum is
given our coalitions, because those that it draws itself differ, and by far more than the fits do. It explains image by
image, once with its default of 1 perturbation an evaluation and once with `--perturbations-per-eval`. Methods take
turns, round by round, after a call with a few coalitions that is not counted. Compare the numbers of one run only.
"""

import argparse
import json
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

sys.path.insert(0, str(Path(__file__).parents[1]))  # the folders beside this one are not installed

from benchmarks.explain import device_name, wait
from explainers.masking import PatchGrid
from explainers.metrics.agreement import spearman
from explainers.runs import versions
from explainers.sampling import shapley_coalitions, stream
from explainers.shapley.kernel_shap import KernelSHAP
from explainers.target import TargetModel

SEED = 1  # of the coalitions
SIZES: dict[str, tuple[PatchGrid, dict[str, Any]]] = {
    "tiny": (
        PatchGrid(24, 8),
        {"model_name": "vit_tiny_patch16_224", "img_size": 24, "patch_size": 8, "embed_dim": 24, "depth": 2},
    ),
    "digits": (
        PatchGrid(48, 8),
        {
            "model_name": "vit_tiny_patch16_224",
            "img_size": 48,
            "patch_size": 8,
            "embed_dim": 64,
            "depth": 2,
            "num_heads": 2,
        },
    ),
    "small": (PatchGrid(224, 32), {"model_name": "vit_tiny_patch16_224"}),
    "base": (PatchGrid(224, 32), {"model_name": "vit_base_patch16_224"}),
}
"""The patches that are explained, and the model, of every `--target-size`; the first is for tests."""


def build(size: str, device: torch.device) -> tuple[TargetModel, PatchGrid]:
    """A model of 10 classes, of which every probability moves with the image: fresh heads give nearly constant ones."""
    grid, arguments = SIZES[size]
    model = timm.create_model(**arguments, pretrained=False, num_classes=10)
    target = TargetModel(model)
    torch.nn.init.normal_(target.head.weight)
    return target.to(device).eval(), grid


def feature_mask(grid: PatchGrid, device: torch.device) -> Tensor:
    """The number of the patch of every pixel, (1, 1, H, W)."""
    patches = torch.arange(grid.num_patches, device=device).view(1, 1, grid.side, grid.side)
    return patches.repeat_interleave(grid.patch_size, -1).repeat_interleave(grid.patch_size, -2)


def explain_ours(
    target: TargetModel, grid: PatchGrid, chunk_size: int, images: Tensor, classes: Tensor, budget: int
) -> Tensor:
    """(B, N), `budget` coalitions besides all patches and none."""
    return KernelSHAP(target, grid, budget, chunk_size=chunk_size, seed=SEED)(images, classes).flatten(1)


def coalitions(grid: PatchGrid, budget: int, device: torch.device) -> Tensor:
    """Those that `KernelSHAP` asks about, as captum has them: 1 for a patch that is visible, else 0, (budget, N)."""
    seed = stream("coalitions", SEED, 0)
    return shapley_coalitions(torch.zeros(1, dtype=torch.long, device=device), grid.num_patches, budget, seed)[0].long()


def explain_captum(
    target: TargetModel, grid: PatchGrid, batch: int, images: Tensor, classes: Tensor, budget: int
) -> Tensor:
    """(B, N), of the coalitions of `explain_ours`, `batch` of them in a forward pass."""
    drawn = coalitions(grid, budget, images.device)

    def given(original: Tensor, **_: Any) -> Iterator[Tensor]:
        yield torch.ones_like(drawn[:1])
        yield torch.zeros_like(drawn[:1])
        yield from drawn.split(1)

    settings = {
        "feature_mask": feature_mask(grid, images.device),
        "n_samples": budget + 2,
        "perturbations_per_eval": batch,
        "return_input_shape": False,
    }
    shap, normalised = KernelShap(target.probabilities), target.normalise(images)
    shap.perturb_func = given
    found = [shap.attribute(normalised[i : i + 1], 0, int(classes[i]), **settings) for i in range(len(images))]
    return torch.cat(found)


def take_turns(
    calls: Mapping[str, Callable[..., Tensor]], images: Tensor, classes: Tensor, budget: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, Tensor]]:
    """The seconds of every call in each round, and what it found; a first call with few coalitions is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    found = {name: call(images, classes, budget=2) for name, call in calls.items()}
    for _ in range(rounds):
        for name, call in calls.items():
            wait(images.device)
            start = time.perf_counter()
            found[name] = call(images, classes, budget=budget)
            wait(images.device)
            taken[name].append(time.perf_counter() - start)
    return taken, found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is written with `--output`."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    cuda = torch.cuda.is_available() if options.device == "auto" else options.device == "cuda"
    device = torch.device("cuda" if cuda else "cpu")
    target, grid = build(options.target_size, device)
    images = torch.randint(0, 256, (options.images, 3, 8, 8), device=device).float()  # with detail at a large scale
    images = torch.nn.functional.interpolate(images, grid.image_size, mode="bilinear").to(torch.uint8)
    calls = {"ours": partial(explain_ours, target, grid, options.chunk_size)}
    for batch in sorted({1, options.perturbations_per_eval}):
        calls[f"captum, {batch} at a time"] = partial(explain_captum, target, grid, batch)
    with torch.no_grad():
        taken, found = take_turns(calls, images, target(images).argmax(-1), options.budget, options.rounds)
    keys = ("threads", "target_size", "budget", "images", "rounds", "chunk_size")
    machine = versions() | {"device": device_name(device)} | {key: vars(options)[key] for key in keys}
    rates = {name: [len(images) / each for each in seconds] for name, seconds in taken.items()}
    return {
        "machine": machine | {"patches": grid.num_patches},
        "methods": {
            name: {
                "images_per_second": median(rates[name]),
                "spread": [min(rates[name]), max(rates[name])],
                "ours_is_faster_by": median(a / b for a, b in zip(rates["ours"], rates[name], strict=True)),
                "spearman_with_ours": spearman(found[name], found["ours"]).mean().item(),
            }
            for name in calls
        },
    }


def markdown(found: dict[str, Any]) -> str:
    lines = ["| KernelSHAP | Images/s (slowest, fastest round) | ours is faster by | Spearman with ours |"]
    lines += ["| --- | --- | --- | --- |"]
    for name, of in found["methods"].items():
        lines.append(
            f"| {name} | {of['images_per_second']:.4f} ({of['spread'][0]:.4f}, {of['spread'][1]:.4f})"
            f" | {of['ours_is_faster_by']:.2f} | {of['spearman_with_ours']:.3f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Images per second of this project's KernelSHAP and of captum's.")
    parser.add_argument(
        "--target-size",
        choices=list(SIZES),
        default="small",
        help="a tiny ViT, that of the digits, ViT-Ti/16, ViT-B/16",
    )
    parser.add_argument("--budget", type=int, default=500, help="coalitions of each image (500)")
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="that are counted (1)")
    parser.add_argument("--chunk-size", type=int, default=64, help="of ours: masked images in memory at a time (64)")
    parser.add_argument("--perturbations-per-eval", type=int, default=64, help="of captum, beside its default, 1 (64)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU (all)")
    parser.add_argument("--output", type=Path, help="a JSON file for the numbers")
    options = parser.parse_args(arguments)
    found = measure(options)
    how = f"{options.threads} threads, {options.budget} coalitions of {found['machine']['patches']} patches"
    print(f"{found['machine']['device']}, {how}, {options.images} images\n\n{markdown(found)}")
    if options.output:
        options.output.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

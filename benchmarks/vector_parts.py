"""What limits an explainability vector: its teacher, or what a transfer keeps of it? Fidelity of both, and accuracy.

    python benchmarks/vector_parts.py --weights vit_tiny_patch16_224.augreg_in1k.safetensors --precision bf16 \
        --source runs/studies_vector_source/model.safetensors --onto runs/cats_vs_dogs_predicting/model.safetensors \
        --data data/cats_vs_dogs

First chance, methods without training that a vector can learn, and KernelSHAP, which ρ compares with. Then, with
--source, the parts: low-rank approximations of every weight matrix, the largest entries alone, the last four blocks
alone, and the vector without its MLPs or its attention; and the whole vector at several λ₂. Images are every second one
of val/, which `halve` uses to choose λ₂. With --restore, the head's projection is fitted to images without labels.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from datamodules.folders import ImageFolders
from explainers import Explainer
from explainers.evaluation.sweep import Sweep
from explainers.masking import PatchGrid
from explainers.metrics.agreement import rank_correlation
from explainers.metrics.means import moments
from explainers.metrics.perturbation import Curve, PerturbationCurves
from explainers.models import TargetModel
from explainers.models.functionals import head_functionals
from explainers.posthoc import build
from explainers.report.tables import markdown
from explainers.saved.weights import read_weights
from explainers.shapley.kernel_shap import KernelSHAP
from explainers.training.state_dicts import State, part
from explainers.vectors import exported_target
from explainers.vectors.lambda_sweep import restorations, restore_projection
from explainers.vectors.model_files import read_head
from explainers.vectors.projections import some_images
from explainers.vectors.self_explaining import SelfExplaining
from explainers.vectors.task_arithmetic import keep_largest, transfer, vector

LEVELS, BATCH, TEMPERATURE, ACCURACY = 11, 50, 2.0, "Accuracy ↑"
CURVES: tuple[Curve, Curve] = ("fidelity_plus", "fidelity_minus")


def low_rank(tau: State, rank: int) -> State:
    """Approximate every weight matrix of a vector by one of a low rank."""

    def approximate(matrix: Tensor) -> Tensor:
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        return (left[:, :rank] * values[:rank]) @ right[:rank]

    return {name: approximate(value) if value.dim() == 2 else value for name, value in tau.items()}


def where(tau: State, kept: Callable[[str], bool]) -> State:
    """Keep the entries with certain names."""
    return {name: value if kept(name) else torch.zeros_like(value) for name, value in tau.items()}


def split_vector(tau: State, ranks: list[int], lambdas: list[float]) -> dict[str, State]:
    """Name → part of the vector."""
    depth = 1 + max(int(name.split(".")[1]) for name in tau if name.startswith("blocks."))
    last = tuple(f"blocks.{number}." for number in range(depth - 4, depth)) + ("norm.",)
    scaled = {f"λ₂ = {size:g}": {name: size * value for name, value in tau.items()} for size in lambdas}
    return {
        **scaled,
        **{f"rank {rank}": low_rank(tau, rank) for rank in ranks},
        "half of the entries": keep_largest(tau, 0.5),
        "a fifth of the entries": keep_largest(tau, 0.2),
        "last four blocks": where(tau, lambda name: name.startswith(last)),
        "without MLPs": where(tau, lambda name: ".mlp." not in name),
        "without attention": where(tau, lambda name: ".attn." not in name),
    }


def teachers(onto: TargetModel, grid: PatchGrid, methods: list[str], budgets: list[int]) -> dict[str, Explainer]:
    """Name → chance, methods without training for a constant length of the embedding, and KernelSHAP."""

    def of_direction(method: Any, images: Tensor, classes: Tensor) -> Tensor:
        embeddings = onto.embed(onto.normalise(images))
        return method.explain(images, head_functionals(onto.head, embeddings, TEMPERATURE, classes))

    return {
        "chance": lambda images, classes: torch.zeros(len(images), *grid.shape),
        **{name: partial(of_direction, build(name, onto, grid)) for name in methods},
        **{f"KernelSHAP, {budget} passes": KernelSHAP(onto, grid, budget, "logit") for budget in budgets},
    }


def read_task(options: argparse.Namespace, size: int) -> tuple[TargetModel, ImageFolders]:
    """The base model and the images of the target task, at a size of images in pixels."""
    overlay = {"file": options.weights}
    model = timm.create_model(options.model, img_size=size, pretrained=True, pretrained_cfg_overlay=overlay)
    base, splits = TargetModel(model).eval(), {"train": "train", "val": "val", "test": "val"}
    data = ImageFolders(options.data, base.transform, splits, 0.875, halve=True, batch_size=BATCH, num_workers=0)
    return base, data


def gather(data: ImageFolders, split: str, limit: int) -> tuple[Tensor, Tensor]:
    """Read at most `limit` images of a split, evenly spaced: uint8 images (B, C, H, W) and labels (B,)."""
    images, labels = zip(*((batch["image"], batch["label"]) for batch in some_images(data, split, limit)), strict=True)
    return torch.cat(images), torch.cat(labels)


@torch.no_grad()
def measure(options: argparse.Namespace) -> list[dict[str, str]]:
    """A row for each teacher, and for each part of the vector of a source."""
    base, data = read_task(options, options.image_size)
    grid, onto = base.grid, exported_target(base, options.onto)
    pixels, labels = gather(data, "val", options.limit)
    few = torch.arange(options.explained) * len(pixels) // options.explained  # images are ordered by class
    reference = KernelSHAP(onto, grid, options.budgets[-1], "logit", seed=2)(pixels[few], labels[few])
    score = partial(scores, onto=onto, images=pixels[few], labels=labels[few], reference=reference)
    known = teachers(onto, grid, options.methods, options.budgets)
    rows = [{"Part": name} | score(explain) for name, explain in known.items()]
    if options.source is None:
        return rows
    start = onto.backbone.state_dict()
    tau = vector(part(read_weights(options.source)[1], "backbone"), base.backbone.state_dict())
    explainer = SelfExplaining(base, grid, alpha=1, weights=options.onto, temperature=TEMPERATURE)
    explainer.target.head.read_as(read_head([options.source], base).describe_reading())
    explainer.eval().requires_grad_(False)  # otherwise autocast keeps the weights of the first part
    states = {"no vector": where(tau, lambda name: False)} | split_vector(tau, options.ranks, options.lambdas)

    def load(name: str) -> TargetModel:
        explainer.target.backbone.load_state_dict(transfer(start, start, states[name]))
        return explainer.target

    projection = explainer.target.head.projection
    fitted = restorations(list(states), load, some_images(data, "train", options.restore)) if options.restore else {}
    for name in states:
        load(name).head.projection = restore_projection(projection, fitted.get(name))
        rows.append({"Part": name} | score(explainer) | {ACCURACY: accuracy(explainer.logits, pixels, labels)})
    return rows


def accuracy(logits: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> str:
    """The accuracy on images."""
    predicted = torch.cat([logits(batch).argmax(-1) for batch in images.split(BATCH)])
    return f"{(predicted == labels).float().mean():.3f}"


def scores(
    explain: Explainer, onto: TargetModel, images: Tensor, labels: Tensor, reference: Tensor | None = None
) -> dict[str, str]:
    """The Fidelity of heatmaps, and their ρ with those of a reference, if any, with standard errors."""
    metric, sweep = PerturbationCurves(onto.grid.num_patches, CURVES, LEVELS), Sweep(onto, onto.grid, levels=LEVELS)
    normalised = onto.normalise(images)
    whole = torch.stack([onto.classify(onto.embed(normalised)), sweep.empty(normalised).expand(len(images), -1)], 1)
    heatmaps = explain(images, labels)
    metric.update(sweep(normalised, heatmaps, torch.arange(len(images)), labels, labels, whole))
    rows = metric.rows()
    columns = [rows, rows[:, :1] - rows[:, 1:]]
    if reference is not None:
        columns.append(rank_correlation(heatmaps.flatten(1), reference.flatten(1))[:, None])
    mean, _, error = moments(torch.cat(columns, 1))
    names = ("Fidelity⁺ ↑", "Fidelity⁻ ↓", "difference ↑", "ρ ↑")[: len(mean)]
    return {name: f"{mean[number]:.3f} ± {error[number]:.3f}" for number, name in enumerate(names)} | {ACCURACY: "–"}


def task_parser(description: str | None, limit: int, lambdas: list[float]) -> argparse.ArgumentParser:
    """The options of the base model, and of the task to which it was fine-tuned."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_tiny_patch16_224.augreg_in21k_ft_in1k", help="name in timm")
    parser.add_argument("--weights", required=True, help="file of the base model's weights")
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--data", required=True, help="folder of the target task, with train/ and val/")
    parser.add_argument("--limit", type=int, default=limit, help="images whose accuracy is measured")
    parser.add_argument("--explained", type=int, default=50, help="images that are explained")
    parser.add_argument("--lambdas", type=float, nargs="*", default=lambdas)
    return parser


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = task_parser(__doc__, 250, [0.5, 0.75, 1.0])
    parser.add_argument("--source", help="the self-explaining base model; without it, teachers alone are measured")
    parser.add_argument("--onto", required=True, help="the target task's model")
    parser.add_argument("--methods", nargs="*", default=["PathFlow", "DirectPaths", "DecompX-PLUS"])
    parser.add_argument("--budgets", type=int, nargs="+", default=[500], help="of KernelSHAP; ρ compares with the last")
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 48])
    parser.add_argument("--restore", type=int, default=500, help="training images, without labels; 0 for none")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16"):
        print(markdown(measure(options)))


if __name__ == "__main__":
    main()

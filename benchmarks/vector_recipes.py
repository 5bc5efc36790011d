"""Does a model that was fine-tuned by another recipe take an explainability vector? Fidelity and accuracy with it.

    python benchmarks/vector_recipes.py --weights vit_tiny_patch16_224.augreg_in1k.safetensors \
        --vector runs/studies_vector_source/model.safetensors --data data/cats_vs_dogs

Each recipe fine-tunes the base model for the task, and `explainers.add_vector` makes the result explain itself, with
training images without labels. Distance is that of its matrices from the base model's, see `vector_files.TUNED`.
Accuracy and Fidelity are measured on every second image of val/, as benchmarks/vector_parts.py does. Fidelity is that
of the fine-tuned model, whose own accuracy is in the rows `chance` and λ₂ = 0, which reads paths without the vector.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.vector_parts import ACCURACY, accuracy, gather, read_task, scores, task_parser
from explainers import add_vector
from explainers.models import TargetModel
from explainers.models.heads import ProjectedHead
from explainers.report.tables import markdown
from explainers.saved.identity import measure_distances, sketch_weights
from explainers.saved.weights import read_header
from explainers.vectors.vector_files import KIND, save_vector

LARGER = "images twice as large"
RECIPES = ("linear head", "LoRA", "cosine head", LARGER)
BATCH, RATE, NEW_RATE = 16, 5e-5, 1e-3  # the second rate is that of heads and of LoRA's matrices, which start anew


class LowRank(nn.Module):
    """LoRA: adds a product of two thin matrices, at first 0, to a frozen weight (rows, columns) (Hu et al., 2022)."""

    def __init__(self, rows: int, columns: int, rank: int = 8) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(rows, rank))
        self.down = nn.Parameter(torch.randn(rank, columns) / columns**0.5)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def fine_tune(base: TargetModel, recipe: str, images: Tensor, labels: Tensor, steps: int) -> TargetModel:
    """Fine-tune a copy of the base model by one of `RECIPES`, on uint8 images (B, C, H, W) with labels (B,)."""
    torch.manual_seed(0)
    classes = int(labels.max()) + 1
    head: nn.Module = nn.Linear(base.embed_dim, classes)
    if recipe == "cosine head":  # its directions learn
        head = ProjectedHead(nn.Parameter(F.normalize(torch.randn(classes, base.embed_dim), dim=-1)), scale=10.0)
    target = TargetModel(base, head).eval()
    blocks = target.backbone.requires_grad_(False).blocks if recipe == "LoRA" else []
    adapted = [layer for block in blocks for layer in (block.attn.qkv, block.attn.proj)]
    for layer in adapted:
        parametrize.register_parametrization(layer, "weight", LowRank(*layer.weight.shape))
    learning = [weight for weight in target.backbone.parameters() if weight.requires_grad]
    new = list(target.head.parameters()) or [target.head.weight]
    rate = NEW_RATE if adapted else RATE
    optimizer = torch.optim.AdamW([{"params": learning, "lr": rate}, {"params": new, "lr": NEW_RATE}])
    for _ in range(steps):
        rows = torch.randint(len(images), (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(target(images[rows]), labels[rows]).backward()
        optimizer.step()
    for layer in adapted:
        parametrize.remove_parametrizations(layer, "weight")  # which adds the product to the weight
    if not list(target.head.parameters()):
        target.head.weight = target.head.weight.detach()
    return target.frozen()


def measure(options: argparse.Namespace, recipe: str, vector: Path) -> list[dict[str, str]]:
    """Rows of a recipe: chance, the paths without the vector, and the vector."""
    larger = recipe == LARGER
    base, data = read_task(options, 2 * options.image_size if larger else options.image_size)
    steps = options.steps // 4 if larger else options.steps
    images, labels = gather(data, "train", steps * BATCH)
    unlabelled = images[torch.arange(options.restore) * len(images) // options.restore]
    tuned = fine_tune(base, recipe, images, labels, steps)
    distance = measure_distances(tuned.backbone, sketch_weights(base.backbone, False), False)["matrices"]
    measured: dict[str, tuple[Any, Any]] = {
        "chance": (lambda images, _: torch.zeros(len(images), *tuned.grid.shape), tuned)
    }
    for lambda_2 in (0, *options.lambdas):
        added = add_vector(tuned, lambda_2, vector, unlabelled).explainer
        measured[f"λ₂ = {lambda_2:g}"] = added, added.logits
    images, labels = gather(data, "val", options.limit)
    few = torch.arange(options.explained) * len(images) // options.explained  # images are ordered by class
    rows = []
    for name, (explain, logits) in measured.items():
        row = {"Recipe": recipe, "Distance": f"{distance:.4f}", "Heatmaps": name}
        with torch.no_grad():
            row |= scores(explain, tuned, images[few], labels[few])
            rows.append(row | {ACCURACY: accuracy(logits, images, labels)})
        print(*rows[-1].values(), file=sys.stderr)  # a row takes a minute
    return rows


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = task_parser(__doc__, 200, [0.5, 1.0])
    parser.add_argument("--vector", required=True, help="file of a vector, or of the self-explaining base model")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--steps", type=int, default=150, help="of 16 images; a quarter of them for larger images")
    parser.add_argument("--restore", type=int, default=200, help="training images, without labels, for add_vector")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        vector = Path(options.vector)
        if read_header(vector).get("class") != KIND:
            vector = save_vector(vector, read_task(options, options.image_size)[0], Path(folder, "vector"), 1.0)
        print(markdown([row for recipe in options.recipes for row in measure(options, recipe, vector)]))


if __name__ == "__main__":
    main()

"""What does a vector add to a self-explaining model that reads its patches from paths too? Three ways, on fully fine-tuned models.

python benchmarks/papers/vector_ways.py --weights vit_tiny....safetensors --data data --models runs --vector shipped --vector FILE

Each model runs/<task>_predicting/model.safetensors takes each vector: with λ₂ = 1, with the λ₂ and with the λ₂ of each block that are best
on 40 validation images. On 100 test images, Fidelity⁺ − Fidelity⁻ of the log-odds' heatmaps, and the paired difference to paths alone, λ₂ = 0.
"""

import argparse
import re
from functools import partial
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

from datamodules.folders import ImageFolders
from explainers.images.transform import ImageTransform
from explainers.masking import PatchGrid
from explainers.metrics.perturbation import PerturbationCurves, importance_order, perturbation_sweep
from explainers.models import TargetModel
from explainers.models.removal import masked_outputs
from explainers.saved.weights import State
from explainers.vectors import SelfExplaining, VectorSources
from explainers.vectors.model_files import exported_target, read_model
from explainers.vectors.task_arithmetic import transfer
from explainers.vectors.vector_files import build_vector

SIZE = 112
GRID = PatchGrid(image_size=SIZE, patch_size=16)
VALUES = (0.0, 0.5, 1.0, 2.0)


def read_base(file: str) -> nn.Module:
    """ViT-Tiny for small images, from a file of weights."""
    settings = {"pretrained": True, "pretrained_cfg_overlay": {"file": file}, "img_size": SIZE}
    return timm.create_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k", **settings)


def read_images(folder: Path, count: int, split: str) -> tuple[Tensor, Tensor]:
    """Evenly spaced images and labels of a half of val/: the validation images, or the test images."""
    crop = {} if folder.name == "cifar10" else {"crop_fraction": 0.875}
    data = ImageFolders(
        str(folder),
        ImageTransform((SIZE, SIZE), interpolation="bicubic", **({"crop_pct": 1.0} if not crop else {})),
        {"train": "train", "val": "val", "test": "val"},
        limit={split: count},
        halve=True,
        **crop,
    )
    rows = [data.dataset(split)[i] for i in range(count)]
    return torch.stack([row["image"] for row in rows]), torch.tensor([row["label"] for row in rows])


@torch.no_grad()
def measure(target: TargetModel, explainer: SelfExplaining, images: Tensor, labels: Tensor) -> Tensor:
    """Fidelity⁺ − Fidelity⁻ of each image."""
    order = importance_order(explainer(images, labels).flatten(1), torch.arange(len(images)))
    normalised = target.normalise(images)
    predict = partial(masked_outputs, target, target.classify, normalised, grid=GRID)
    curves = PerturbationCurves(GRID.num_patches, ["fidelity_plus", "fidelity_minus"], levels=11)
    curves.update(perturbation_sweep(lambda keep: predict(keep=keep), order, labels, levels=11))
    plus, minus = curves.rows().unbind(1)
    return plus - minus


def find_group(name: str) -> str:
    """The block of a weight, or `rest`."""
    block = re.search(r"blocks\.(\d+)\.", name)
    return block[1] if block else "rest"


class Ways:
    """A fine-tuned model, a vector, and what its weights λ₂, one for each block, give.

    Args:
        base: the base model.
        file: the file of the fine-tuned model.
        vector: `shipped`, or the file of a self-explaining model.
    """

    def __init__(self, base: TargetModel, file: Path, vector: str) -> None:
        sources = VectorSources(file=vector) if vector == "shipped" else VectorSources([vector])
        found = build_vector(sources, base, read_model(file, base).backbone)
        self.target = exported_target(base, str(file)).eval()
        self.explainer = SelfExplaining(base, GRID, str(file), temperature=2.0).eval()
        self.explainer.target.head = self.explainer.target.head.read_as(**found.reading)
        self.onto = {name: value.clone() for name, value in self.explainer.target.backbone.state_dict().items()}
        self.tau: State = found.tau
        self.groups = sorted({find_group(name) for name, value in found.tau.items() if value.any()})

    def score(self, lambdas: dict[str, float], images: Tensor, labels: Tensor) -> Tensor:
        """Fidelity⁺ − Fidelity⁻ of each image with λ₂ of each block."""
        tau = {name: lambdas[find_group(name)] * value for name, value in self.tau.items() if value.any()}
        tau = {name: tau.get(name, torch.zeros_like(value)) for name, value in self.tau.items()}
        self.explainer.target.backbone.load_state_dict(transfer(self.onto, self.onto, tau))
        return measure(self.target, self.explainer, images, labels)

    def choose(self, images: Tensor, labels: Tensor, each: bool) -> dict[str, float]:
        """The λ₂ that is best on validation images: one, or one for each block, block after block, from the last."""
        same = [dict.fromkeys(self.groups, value) for value in VALUES]
        best = max(same, key=lambda lambdas: self.score(lambdas, images, labels).mean())
        for group in reversed(self.groups) if each else ():
            best = max(
                (best | {group: value} for value in VALUES),
                key=lambda lambdas: self.score(lambdas, images, labels).mean(),
            )
        return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--models", type=Path, default=Path("runs"))
    parser.add_argument("--vector", action="append", required=True)
    parser.add_argument("--tasks", nargs="+", default=["imagenette", "cats_vs_dogs", "cifar10"])
    given = parser.parse_args()
    base = TargetModel(read_base(given.weights))
    for task in given.tasks:
        val, test = (read_images(given.data / task, *split) for split in ((40, "val"), (100, "test")))
        for vector in given.vector:
            ways = Ways(base, given.models / f"{task}_predicting/model.safetensors", vector)
            paths = ways.score(dict.fromkeys(ways.groups, 0.0), *test)
            print(f"{task}, {vector}: paths {paths.mean():.4f} ± {paths.std() / len(paths) ** 0.5:.4f}", flush=True)
            chosen = {
                "λ₂ = 1": dict.fromkeys(ways.groups, 1.0),
                "one λ₂": ways.choose(*val, each=False),
                "λ₂ of each block": ways.choose(*val, each=True),
            }
            for name, lambdas in chosen.items():
                scores = ways.score(lambdas, *test)
                gain = scores - paths
                error = gain.std() / len(gain) ** 0.5
                print(f"  {name} {lambdas}: {scores.mean():.4f}, minus paths {gain.mean():+.4f} ± {error:.4f}", flush=True)


if __name__ == "__main__":
    main()

"""Do the patches that make an image like another one lie on its object? Measured on images with masks or boxes.

    python benchmarks/likeness.py --model fastvit_t8 --weights fastvit_t8.reparam.fp16.safetensors --reparameterised \
        --gallery data/imagenette/train data/caltech --root data/ecssd --explainer runs/anyhead_fastvit

Each image is explained by its likeness to the nearest image of the gallery, to a random one, and to itself, with
embeddings as they are and relative to the mean of the gallery. The random image is the control: a method whose heatmap
of it is as good marks what is salient, and not what the two images share. For the first images, it is also measured how
the similarity to the nearest image falls while patches are hidden (SRG, as in an evaluation; 0 is chance).
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

import explainers
from datamodules.ilsvrc import imagenet_boxes
from datamodules.masks import masked_images
from explainers import posthoc
from explainers.app.photos import list_photos
from explainers.app.session import Session
from explainers.images.transform import ImageTransform
from explainers.likeness import nearest, similar_to
from explainers.likeness.similarity import subtract_centre
from explainers.metrics.localization import average_precision, hits
from explainers.metrics.perturbation import PerturbationCurves, importance_order, perturbation_sweep
from explainers.models import TargetModel
from explainers.models.removal import masked_outputs

METHODS: dict[str, dict[str, Any]] = {"CAM": {}, "HiResCAM": {}, "GradCAM": {"relu": False}, "StagePaths": {}}
OTHERS = ("nearest", "random", "itself")
BATCH, LEVELS = 20, 11

Scores = dict[tuple[str, str, str], list[Tensor]]
"""Explainer, centre and other image → hit rate and average precision of each batch, (B, 2); `SRG` → gains, (B, 1)."""


def embed_folders(session: Session, folders: Sequence[str]) -> Tensor:
    """The embeddings (M, D) of all images below folders."""
    parts = []
    for _, pixels, _ in session.batches(list_photos(list(folders)), "embedding"):
        with torch.no_grad():
            parts.append(session.target.embed(session.target.normalise(pixels)))
    return torch.cat(parts)


def batches(root: str, transform: ImageTransform, limit: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Images (B, 3, S, S) and the pixels of their objects (B, S, S), by masks or boxes."""
    read: Callable[..., Any] = masked_images if (Path(root) / "masks").is_dir() else imagenet_boxes
    samples = read(root, transform, crop_fraction=0.875, limit=limit)
    for start in range(0, len(samples), BATCH):
        batch = [samples[number] for number in range(start, min(start + BATCH, len(samples)))]
        yield torch.stack([sample["image"] for sample in batch]), torch.stack([sample["truth"] for sample in batch])


def measure(target: TargetModel, methods: dict[str, Any], gallery: Tensor, options: argparse.Namespace) -> Scores:
    """Explain all images by all methods, relative to nothing and to the mean of the gallery."""
    generator = torch.Generator().manual_seed(0)
    scores: Scores = {}
    seen = 0
    for images, truth in batches(options.root, target.transform, options.limit):
        with torch.no_grad():
            own = target.embed(target.normalise(images))
        noise = torch.rand(len(images), *target.grid.shape, generator=generator)
        scores.setdefault(("chance", "", ""), []).append(score_heatmaps(noise, truth))
        drawn = gallery[torch.randint(len(gallery), (len(images),), generator=generator)]
        few = max(min(options.faithful - seen, len(images)), 0)
        seen += len(images)
        for label, centre in (("none", None), ("mean of the gallery", gallery.mean(0))):
            closest = gallery[nearest(gallery, own, 1, centre)[1][:, 0]]
            others = torch.stack([closest, drawn, own], 1)
            for name, method in methods.items():
                heatmaps = similar_to(method, images, others, centre).detach()
                if few and centre is not None:
                    gains = relevance_gains(target, images[:few], heatmaps[:few, 0], closest[:few], centre)
                    scores.setdefault((name, label, "SRG"), []).append(gains)
                for number, other in enumerate(OTHERS):
                    scores.setdefault((name, label, other), []).append(score_heatmaps(heatmaps[:, number], truth))
    return scores


@torch.no_grad()
def relevance_gains(target: TargetModel, images: Tensor, heatmaps: Tensor, others: Tensor, centre: Tensor) -> Tensor:
    """SRG of the similarity of images (B, 3, S, S) to others, embeddings (B, D), under masks: (B, 1)."""
    normalised = target.normalise(images)
    directions = F.normalize(subtract_centre(others, centre), dim=-1)

    def similarities(embeddings: Tensor) -> Tensor:
        return F.normalize(subtract_centre(embeddings, centre), dim=-1) @ directions.mT

    def outputs(keep: Tensor) -> Tensor:
        return masked_outputs(target, similarities, normalised, keep, target.grid)

    numbers = torch.arange(len(images))
    order = importance_order(heatmaps.flatten(1), numbers)
    metric = PerturbationCurves(target.grid.num_patches, ["relevance_gain"], LEVELS)
    metric.update(perturbation_sweep(outputs, order, numbers, LEVELS))
    return metric.rows()


def score_heatmaps(heatmaps: Tensor, truth: Tensor) -> Tensor:
    """Hit rate and average precision of heatmaps (B, P, P): (B, 2)."""
    return torch.stack([hits(heatmaps, truth), average_precision(heatmaps, truth)], 1)


def mean_error(values: Tensor) -> str:
    """Mean and standard error over images, without those that have no object."""
    values = values[~values.isnan()]
    return f"{values.mean():.3f} ± {values.std() / len(values) ** 0.5:.3f}"


def markdown(scores: Scores) -> str:
    """A row for each method and centre, with the paired difference of the nearest and the random image."""
    titles = [f"{metric}, {other}" for metric in ("Hit rate", "AP") for other in (*OTHERS, "nearest − random")]
    lines = [f"| Method | Relative to | {' | '.join(titles)} | SRG |", "| --- " * 11 + "|"]
    for name, label in dict.fromkeys(key[:2] for key in scores):
        found = {other: torch.cat(values) for (*own, other), values in scores.items() if tuple(own) == (name, label)}
        cells = []
        for column in (0, 1):
            cells += [mean_error(found[other][:, column]) if other in found else "" for other in OTHERS]
            cells[-3] = cells[-3] or mean_error(next(iter(found.values()))[:, column])  # chance
            difference = found["nearest"] - found["random"] if "random" in found else None
            cells.append("" if difference is None else mean_error(difference[:, column]))
        gain = mean_error(found["SRG"][:, 0]) if "SRG" in found else ""
        lines.append(f"| {name} | {label} | {' | '.join(cells)} | {gain} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Does likeness lie on the object?")
    parser.add_argument("--model", required=True, help="name of a model of timm, used without its head")
    parser.add_argument("--weights", default="", help="file of its weights (random weights)")
    parser.add_argument("--reparameterised", action="store_true", help="the file is of timm's inference_mode=True")
    parser.add_argument("--gallery", nargs="+", required=True, help="folders of images to be like")
    parser.add_argument("--root", required=True, help="folder of images with masks (ECSSD) or boxes (imagenet_val)")
    parser.add_argument("--explainer", help="folder of an AnyHead that was trained for the model")
    parser.add_argument("--limit", type=int, help="number of images (all)")
    parser.add_argument("--faithful", type=int, default=100, help="number of images that patches are hidden in (100)")
    options = parser.parse_args(arguments)
    inference: dict[str, Any] = {"inference_mode": True} if options.reparameterised else {}
    model = timm.create_model(options.model, num_classes=0, checkpoint_path=options.weights, **inference)
    target = TargetModel(model).float().eval()
    session = Session(target, method=posthoc.CAM(target, target.grid), purpose="likeness")
    methods: dict[str, Any] = {
        name: posthoc.build(name, target, target.grid, settings) for name, settings in METHODS.items()
    }
    if options.explainer:
        methods["AnyHead"] = explainers.load(options.explainer, target=target).eval()
    gallery = embed_folders(session, options.gallery)
    scores = measure(target, methods, gallery, options)
    count = len(torch.cat(scores["chance", "", ""]))
    print(f"{options.model}: {count} images of {Path(options.root).name}, {len(gallery)} images in the gallery\n")
    print(markdown(scores))


if __name__ == "__main__":
    main()

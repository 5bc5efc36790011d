"""What the front door does with models as people hold them, on real weights: fidelity, localization, scores, contrasts.

    python benchmarks/any_model.py fidelity --data ../data --images 50
    python benchmarks/any_model.py sizes --data ../data --images 150         # 224, 384 and 448 pixels, whole photos
    python benchmarks/any_model.py multi_label --data ../data --images 200   # also regression, contrasts

`--data` has `weights/`, `imagenet_val/` (images, `annotations.json`, `classes.json`) and `imagenette/`. Heads are
fitted to frozen embeddings of ViT-Tiny, on other images than those that are measured. Standard errors are over images.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other folders of the project are not installed

import explainers
from explainers import Session
from explainers.metrics.localization import average_precision, hits
from explainers.models import TargetModel, as_target
from explainers.report.tables import markdown

WEIGHTS = {
    "vit_tiny_patch16_224": "vit_tiny_patch16_224.augreg_in1k.safetensors",
    "deit_tiny_patch16_224": "deit_tiny_patch16_224.in1k.fp16.safetensors",
    "tf_efficientnet_lite0": "tf_efficientnet_lite0.in1k.fp16.safetensors",
}
PIXELS = 672
"""Side of the images of truth: a multiple of 14, 24 and 28 patches."""
STEPS = 300
"""Steps of Adam with which a head is fitted to all embeddings at once."""


class Boxed(NamedTuple):
    """An image of ImageNet, its class, and the pixels in the boxes of its object."""

    photo: Image.Image
    label: int
    truth: Tensor  # bool (h, w)


def load_model(data: Path, name: str, head: bool = True) -> Any:
    """Build a model of timm with real weights, with or without its head."""
    model: Any = timm.create_model(name, checkpoint_path=str(data / "weights" / WEIGHTS[name])).eval()
    if not head:
        model.reset_classifier(0)
    return model


def load_boxed(data: Path, count: int) -> list[Boxed]:
    """Load every so many-th image of `imagenet_val`."""
    folder = data / "imagenet_val"
    annotations = json.loads((folder / "annotations.json").read_text(encoding="utf-8"))
    found = []
    for each in annotations[:: max(1, len(annotations) // count)][:count]:
        photo = Image.open(folder / each["file"]).convert("RGB")
        truth = torch.zeros(photo.height, photo.width, dtype=torch.bool)
        for left, top, right, bottom in each["boxes_xyxy"]:
            truth[round(top) : round(bottom), round(left) : round(right)] = True
        found.append(Boxed(photo, each["label"], truth))
    return found


def load_folders(folder: Path, count: int) -> list[tuple[Image.Image, int]]:
    """Load images of class folders, as many of each class, with the numbers of their classes."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    each = -(-count // len(classes))
    files = [(file, label) for label, path in enumerate(classes) for file in sorted(path.iterdir())[:each]]
    return [(Image.open(file).convert("RGB"), label) for file, label in files]


@torch.no_grad()
def embed(target: TargetModel, photos: Sequence[Image.Image]) -> Tensor:
    """Embed what the model sees of photos: (B, D)."""
    seen = [target.transform(photo) for photo in photos]
    return torch.cat([target.embed(target.normalise(part)) for part in torch.stack(seen).split(32)])


def fit(head: Any, embeddings: Tensor, truth: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Fit a head to embeddings, with weight decay."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(head(embeddings), truth).backward()
        optimizer.step()
    return head.eval().requires_grad_(False)


def perceptron(width: int, outputs: int) -> nn.Module:
    """Build a head of two layers."""
    return nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, outputs))


def beside(left: Image.Image, right: Image.Image, share: float = 0.5, size: int = 224) -> Image.Image:
    """Join the middles of two photos to a square; the left one takes a share of its width."""
    joined, cut = Image.new("RGB", (size, size)), round(share * size)
    for photo, at, width in ((left, 0, cut), (right, cut, size - cut)):
        scale = max(width / photo.width, size / photo.height)
        grown = photo.resize((max(round(photo.width * scale), width), max(round(photo.height * scale), size)))
        x, y = (grown.width - width) // 2, (grown.height - size) // 2
        joined.paste(grown.crop((x, y, x + width, y + size)), (at, 0))
    return joined


def mean_and_error(values: Sequence[float]) -> str:
    """Write a mean over images with its standard error."""
    numbers = torch.tensor(values, dtype=torch.float64)
    return f"{numbers.mean():.3f} ± {numbers.std() / len(numbers) ** 0.5:.3f}"


def measure_fidelity(data: Path, count: int) -> list[dict[str, str]]:
    """Fidelity of what `auto` takes, beside RISE with 500 passes and chance."""
    train = load_folders(data / "imagenette" / "train", 1000)
    backbone = load_model(data, "vit_tiny_patch16_224", head=False)
    target = as_target(backbone)
    labels = torch.tensor([label for _, label in train])
    head = fit(perceptron(192, 10), embed(target, [photo for photo, _ in train]), labels, F.cross_entropy)
    photos = [each.photo for each in load_boxed(data, count)]
    unseen = [photo for photo, _ in load_folders(data / "imagenette" / "val", count)]
    held = {
        "DeiT-Tiny": (load_model(data, "deit_tiny_patch16_224"), photos),
        "EfficientNet-Lite0": (load_model(data, "tf_efficientnet_lite0"), photos),
        "ViT-Tiny and an MLP, in nn.Sequential": (nn.Sequential(backbone, head), unseen),
    }
    rows = []
    for name, (model, images) in held.items():
        session = Session(as_target(model))
        compared: dict[str, Any] = {session.method: session.explainer, "RISE-500": {"RISE": {"masks": 500}}}
        found = explainers.evaluate(session.target, compared, images[:count])
        print(name, session.method, found, sep="\n", flush=True)
        rows.append({"Model": name, "auto": session.method, "found": str(found)})
    return rows


def place(heatmap: Tensor, box: Sequence[float], size: tuple[int, int]) -> Tensor:
    """Put a heatmap on the whole photo of (height, width) pixels, squashed to a square; unseen pixels come last."""
    (height, width), (rows, columns), (left, top, right, bottom) = size, heatmap.shape, box
    centres = (torch.arange(PIXELS) + 0.5) / PIXELS
    row, column = (centres * height - top) / (bottom - top), (centres * width - left) / (right - left)
    seen = ((row >= 0) & (row < 1))[:, None] & ((column >= 0) & (column < 1))
    row, column = (row * rows).long().clamp(0, rows - 1), (column * columns).long().clamp(0, columns - 1)
    return torch.where(seen, heatmap[row][:, column], heatmap.min() - 1)


def squash(truth: Tensor) -> Tensor:
    """Resample the pixels of an object to a square."""
    centres = (torch.arange(PIXELS) + 0.5) / PIXELS
    return truth[(centres * truth.shape[0]).long()][:, (centres * truth.shape[1]).long()]


def measure_sizes(data: Path, count: int) -> list[dict[str, str]]:
    """Where are the boxes? In the square that the model sees, and on the whole photo."""
    model, images = load_model(data, "vit_tiny_patch16_224"), load_boxed(data, count)
    settings: dict[str, tuple[Any, bool]] = {
        **{f"{size} × {size}, centre": (size, False) for size in (224, 384, 448)},
        "224 × 224, squashed": (224, True),
        "224 × 304 or 304 × 224, squashed": (None, True),
        "448 × 608 or 608 × 448, squashed": (448, True),
    }
    rows = []
    for name, (size, whole) in settings.items():
        short = size or 224
        for method in ("auto", "AttnLRP-PLUS"):
            numbers: dict[str, list[float]] = {"square": [], "photo": [], "hits": [], "correct": []}
            shapes = [(short, short)] if "or" not in name else [(short, short * 19 // 14), (short * 19 // 14, short)]
            sessions = [Session(as_target(model, image_size=shape), method) for shape in shapes]
            for photo, label, truth in images:
                session = sessions[-1 if photo.height > photo.width else 0]
                if whole:
                    session.transform = replace(session.transform, resize="squash", crop_pct=1.0)
                (found,) = session.explain(photo, label)
                left, top, right, bottom = found.box or (0.0, 0.0, *photo.size)
                crop = truth[max(round(top), 0) : round(bottom), max(round(left), 0) : round(right)]
                on_photo = place(found.heatmap, (left, top, right, bottom), (photo.height, photo.width))
                in_square = place(found.heatmap, (0, 0, *crop.shape[::-1]), (crop.shape[0], crop.shape[1]))
                for key, heatmap, pixels in (("square", in_square, crop), ("photo", on_photo, truth)):
                    numbers[key].append(average_precision(heatmap[None], squash(pixels)[None]).item())
                numbers["hits"].append(hits(on_photo[None], squash(truth)[None]).item())
                numbers["correct"].append(float(found.scores.argmax() == label))
            rows.append(
                {
                    "Input": name,
                    "Method": sessions[0].method,
                    "Patches": " × ".join(map(str, sessions[0].target.grid.shape)),
                    "Accuracy": f"{sum(numbers['correct']) / len(images):.3f}",
                    "AP in the square": mean_and_error([x for x in numbers["square"] if x == x]),
                    "AP on the photo": mean_and_error(numbers["photo"]),
                    "Pointing game on the photo": mean_and_error(numbers["hits"]),
                }
            )
            print(rows[-1], flush=True)
    return rows


class Joined(NamedTuple):
    """Two images side by side, their classes, and the share of the left one."""

    image: Image.Image
    left: int
    right: int
    share: float


def join_pairs(images: Sequence[tuple[Image.Image, int]], count: int, seed: int, shares: bool = False) -> list[Joined]:
    """Join random pairs of images of two classes."""
    draw, found = random.Random(seed), list[Joined]()
    while len(found) < count:
        (left, first), (right, second) = draw.sample(list(images), 2)
        share = draw.uniform(0.2, 0.8) if shares else 0.5
        if first != second:
            found.append(Joined(beside(left, right, share), first, second, share))
    return found


def on_own_half(heatmap: Tensor, left: bool) -> list[float]:
    """Whether the highest patch lies on the own half, and the share of the positive scores there."""
    own = heatmap[:, : heatmap.shape[1] // 2] if left else heatmap[:, heatmap.shape[1] // 2 :]
    return [float(own.max() == heatmap.max()), (own.clamp(min=0).sum() / heatmap.clamp(min=0).sum()).item()]


def measure_multi_label(data: Path, count: int) -> list[dict[str, str]]:
    """Two classes in one image, side by side: is each found, and on its own half?"""
    backbone = load_model(data, "vit_tiny_patch16_224", head=False)
    train = join_pairs(load_folders(data / "imagenette" / "train", 2000), 2000, 0)
    truth = torch.zeros(len(train), 10)
    for row, pair in zip(truth, train, strict=True):
        row[[pair.left, pair.right]] = 1.0
    seen = embed(as_target(backbone), [pair.image for pair in train])
    head = fit(nn.Linear(192, 10), seen, truth, F.binary_cross_entropy_with_logits)
    target = as_target(nn.Sequential(backbone, head), score="sigmoid")
    pairs, rows = join_pairs(load_folders(data / "imagenette" / "val", 1000), count, 1), []
    for method in ("auto", "GAE", "Chance"):
        session, both, found = Session(target, method), [], []
        for pair in pairs:
            (explanation,) = session.explain(pair.image, pair.left)
            both.append(float((explanation.scores[[pair.left, pair.right]] > 0.5).all()))
            found.append(on_own_half(explanation.heatmap, left=True))
            found.append(on_own_half(explanation.of(pair.right).heatmap, left=False))
        peak, share = zip(*found, strict=True)
        rows.append(
            {"Method": session.method, "Both classes found": f"{sum(both) / count:.3f}"}
            | {"Peak on its own half": mean_and_error(peak), "Evidence on its own half": mean_and_error(share)}
        )
        print(rows[-1], flush=True)
    return rows


def measure_regression(data: Path, count: int) -> list[dict[str, str]]:
    """How much of an image is of the first class (a fish)? What raises the value must be the fish."""
    backbone = load_model(data, "vit_tiny_patch16_224", head=False)

    def draw(split: str, number: int, seed: int) -> tuple[list[Joined], Tensor]:
        images = load_folders(data / "imagenette" / split, 1000)
        pairs = [pair for pair in join_pairs(images, 6 * number, seed, shares=True) if 0 in (pair.left, pair.right)]
        shares = [100 * (pair.share if pair.left == 0 else 1 - pair.share) for pair in pairs]
        return pairs[:number], torch.tensor(shares[:number])[:, None]

    train, shares = draw("train", 1000, 0)
    seen = embed(as_target(backbone), [pair.image for pair in train])
    head = fit(perceptron(192, 1), seen, shares / 100, F.mse_loss)
    for weight in head[-1].parameters():
        weight.data *= 100
    target = as_target(nn.Sequential(backbone, head), score="value")
    pairs, shares = draw("val", count, 1)
    values, rows = target.head(embed(target, [pair.image for pair in pairs])), []
    error = (values - shares).square().mean() / shares.var()
    print(f"R² on {len(pairs)} unseen images: {1 - error:.3f}; values from {values.min():.1f} to {values.max():.1f}")
    for method in ("auto", "Saliency"):
        session, fish = Session(target, method), []
        for pair in pairs:
            (explanation,) = session.explain(pair.image)
            cut = round(pair.share * explanation.heatmap.shape[1])
            parts = explanation.heatmap[:, :cut].mean().item(), explanation.heatmap[:, cut:].mean().item()
            fish.append(float(parts[0] > parts[1]) if pair.left == 0 else float(parts[1] > parts[0]))
        evaluated = explainers.evaluate(
            target, {session.method: session.explainer}, [pair.image for pair in pairs[:40]]
        )
        rows.append({"Method": session.method, "Higher on the fish than beside it": mean_and_error(fish)})
        print(rows[-1], evaluated, sep="\n", flush=True)
    return rows


def measure_contrasts(data: Path, count: int) -> list[dict[str, str]]:
    """Two images of ImageNet side by side: the class of one alone, and rather than that of the other."""
    images = [(each.photo, each.label) for each in load_boxed(data, 500)]
    pairs, rows = join_pairs(images, count, 2), []
    for method in ("auto", "GAE", "Occlusion"):
        session = Session(as_target(load_model(data, "vit_tiny_patch16_224")), method)
        alone, contrasted, lowest = [], [], []
        for pair in pairs[: count if method != "Occlusion" else count // 4]:
            (explanation,) = session.explain(pair.image, pair.left)
            contrast = explanation.of(pair.left, against=pair.right).heatmap
            alone.append(on_own_half(explanation.heatmap, left=True))
            contrasted.append(on_own_half(contrast, left=True))
            lowest.append(on_own_half(-contrast, left=False)[0])
        row = {"Method": session.method}
        for name, numbers in (("class", alone), ("class rather than other", contrasted)):
            peak, share = zip(*numbers, strict=True)
            row |= {
                f"Peak of {name} on its half": mean_and_error(peak),
                f"Evidence of {name} there": mean_and_error(share),
            }
        rows.append(row | {"Lowest patch on the other half": mean_and_error(lowest)})
        print(rows[-1], flush=True)
    return rows


MEASURES = {
    "fidelity": measure_fidelity,
    "sizes": measure_sizes,
    "multi_label": measure_multi_label,
    "regression": measure_regression,
    "contrasts": measure_contrasts,
}


def main() -> None:
    """Measure what the command names, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=100)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = MEASURES[options.measure](options.data, options.images)
    print(markdown(rows))


if __name__ == "__main__":
    main()

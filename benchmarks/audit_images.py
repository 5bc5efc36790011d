"""Cats and dogs with planted faults, and what frozen backbones make of them, computed once and stored.

Every photo is made in two variants of each fault, such as on a church and on a petrol station, so that how often a
variant agrees with the class is a choice of rows, and neither images nor vectors are computed again.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.any_model import load_model
from benchmarks.audit_faults import FAULTS, Faulty, crop_square, paste_on
from explainers import Session
from explainers.models import TargetModel, as_target

PLACES = {"church": "n03028079", "petrol": "n03425413"}
VARIANTS = {"background": ("church", "petrol"), **{name: (name, "pasted") for name in FAULTS}}
"""Fault → the variant of cats that agrees with their class, and the one of dogs."""
BACKBONES = {
    "ViT-Tiny": ("vit_tiny_patch16_224", "AnyHead"),
    "DeiT-Tiny": ("deit_tiny_patch16_224", "PathFlow"),
    "EfficientNet-Lite0": ("tf_efficientnet_lite0", "CAM"),
}
SIZE, PATCH = 224, 16
POOL, TEST = 700, 300
"""Photos of `train` for heads and audits, and of `val` to test; the class of photo i of K classes is i modulo K."""


def list_photos(folder: Path, pool: int = POOL, test: int = TEST) -> list[Path]:
    """List photos of class folders, a class after the other by turns: those for heads and audits, then the test."""
    chosen: list[Path] = []
    for split, count in (("train", pool), ("val", test)):
        classes = [sorted(path.iterdir()) for path in sorted((folder / split).iterdir())]
        chosen += [each for turn in zip(*classes, strict=False) for each in turn][:count]
    return chosen


def vary(photo: Image.Image, variant: str, number: int, places: Sequence[Sequence[Path]]) -> Faulty:
    """Make a variant of a square photo; what is drawn depends on the number of the photo alone.

    Args:
        photo: the photo.
        variant: `clean`; one of `PLACES`, on which it is pasted; `pasted`: on one of them, whatever its class; or one
            of `FAULTS`, after that: a head that sees the whole pet does not need the fault.
        number: of the photo.
        places: photos of each of `PLACES`.
    """
    generator = random.Random(number)
    kind = generator.randrange(len(places))
    if variant == "clean":
        return photo, np.zeros((photo.height, photo.width), bool)
    backgrounds = places[list(PLACES).index(variant) if variant in PLACES else kind]
    with Image.open(backgrounds[generator.randrange(len(backgrounds))]) as background:
        pasted, mask = paste_on(photo, background, generator)
    if variant in FAULTS:
        return FAULTS[variant](pasted, generator)
    return pasted, mask if variant in PLACES else np.zeros_like(mask)


def make_variant(data: Path, variant: str) -> dict[str, Tensor]:
    """Make a variant of all photos: uint8 images (M, 3, H, W), and how much of every patch is the fault (M, N)."""
    images, shares, side = [], [], SIZE // PATCH
    for number, file in enumerate(list_photos(data / ("imagenette" if variant == "imagenette" else "cats_vs_dogs"))):
        folder = data / "imagenette" / ("train" if number < POOL else "val")
        places = [sorted((folder / place).iterdir()) for place in PLACES.values()]
        with Image.open(file) as photo:
            square = crop_square(photo, SIZE)
        varied, mask = vary(square, "clean" if variant == "imagenette" else variant, number, places)
        images.append(torch.from_numpy(np.array(varied)).movedim(-1, 0))
        shares.append(torch.from_numpy(mask.reshape(side, PATCH, side, PATCH).mean((1, 3)).reshape(-1)).float())
    return {"images": torch.stack(images).contiguous(), "shares": torch.stack(shares)}


def build(data: Path, backbone: str) -> tuple[TargetModel, Any]:
    """Load a frozen backbone without its head, and the explainer that has vectors for it."""
    name, method = BACKBONES[backbone]
    session = Session(as_target(load_model(data, name, head=False)), method, purpose="likeness")
    return session.target, session.explainer


@torch.no_grad()
def compute_vectors(target: TargetModel, explainer: Any, images: Tensor, pool: int) -> dict[str, Tensor]:
    """Compute float16 embeddings (M, D), and of the pool the vectors (M', N, D) and activations of patches (M', N', D).

    It computes with bf16, as evaluations do where the hardware can.
    """
    found: dict[str, list[Tensor]] = {"embeddings": [], "vectors": [], "activations": []}
    last = target.backbone.norm if hasattr(target.backbone, "norm") else target.backbone.bn2
    hook = last.register_forward_hook(lambda _, __, output: found["activations"].append(output.half()))
    with torch.autocast("cpu", torch.bfloat16):
        for batch in images[:pool].split(20):
            vectors, embeddings = explainer.decompose(batch)
            found["vectors"].append(vectors.half())
            found["embeddings"].append(embeddings.half())
        hook.remove()
        for batch in images[pool:].split(20):
            found["embeddings"].append(target.embed(target.normalise(batch)).half())
    stored = {name: torch.cat(values) for name, values in found.items()}
    maps = stored["activations"]
    stored["activations"] = maps[:, 1:].contiguous() if maps.dim() == 3 else maps.flatten(2).mT.contiguous()
    return stored


def load_variant(data: Path, store: Path, variant: str, backbone: str) -> dict[str, Tensor]:
    """Load a variant's images and what a backbone makes of them; what is not in the store is computed first."""
    store.mkdir(parents=True, exist_ok=True)
    made, computed = store / f"{variant}.safetensors", store / f"{variant} {backbone}.safetensors"
    if not made.exists():
        save_file(make_variant(data, variant), made)
    found = load_file(made)
    if not computed.exists():
        save_file(compute_vectors(*build(data, backbone), found["images"], POOL), computed)
    return found | load_file(computed)

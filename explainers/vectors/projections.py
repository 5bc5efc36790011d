"""Three ways to compute the projection W of a fixed head without training.

`simplex`, `prototypes` and `text_embeddings` return W, (K, D). `simplex_of`, `prototypes_of` and `text_of` call them
with what a model and a datamodule hold.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, default_collate

from explainers.errors import InputError, check_positive
from explainers.target import TargetModel


def simplex(num_classes: int, width: int, seed: int = 0) -> Tensor:
    """K unit vectors (K, D), any two at the same angle, the largest possible one: its cosine is −1/(K − 1).

    >>> weight = simplex(num_classes=3, width=4)
    >>> (weight @ weight.mT).round(decimals=4).tolist()
    [[1.0, -0.5, -0.5], [-0.5, 1.0, -0.5], [-0.5, -0.5, 1.0]]

    Args:
        num_classes: K.
        width: D, the width of the embeddings.
        seed: seed of the random rotation of the vectors.

    Raises:
        InputError: if K < 2, or if K > D, because the random rotation starts from K orthonormal vectors.
    """
    if not 2 <= num_classes <= width:
        raise InputError(f"expected 2 to {width} classes, because embeddings have width {width}, got {num_classes}")
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(width, num_classes, generator=generator)).Q  # (D, K), orthonormal
    return F.normalize((torch.eye(num_classes) - 1 / num_classes) @ directions.mT, dim=-1)


def prototypes(embeddings: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Unit vectors (K, D) from the average of the class means to the mean embedding of each class.

    The class means below are (2, 0) and (6, 0), and their average is (4, 0):

    >>> embeddings = torch.tensor([[1.0, 0.0], [3.0, 0.0], [6.0, 0.0]])
    >>> prototypes(embeddings, labels=torch.tensor([0, 0, 1]), num_classes=2).tolist()
    [[-1.0, 0.0], [1.0, 0.0]]

    Args:
        embeddings: embeddings of images, (B, D).
        labels: classes of the images, (B,).
        num_classes: K.

    Raises:
        InputError: for a class without images, or a label that is not below K.
    """
    counts = labels.bincount(minlength=num_classes)
    if len(counts) > num_classes or not counts.all():
        raise InputError(
            f"expected images of each of {num_classes} classes, got {counts.tolist()} images of them: take more images,"
            " or simplex_of, which needs none"
        )
    means = embeddings.new_zeros(num_classes, embeddings.shape[1]).index_add_(0, labels, embeddings) / counts[:, None]
    return F.normalize(means - means.mean(0), dim=-1)


def text_embeddings(model: str, pretrained: str, classes: Sequence[str], templates: Sequence[str]) -> Tensor:
    """The direction of CLIP's text embedding of each class, averaged over templates: unit vectors (K, D').

    Args:
        model: open_clip's name of an architecture.
        pretrained: open_clip's name of its weights.
        classes: names of the classes.
        templates: prompts, with `{}` where the name of the class belongs.

    Raises:
        InputError: if open_clip is not installed, or there are no templates.
    """
    if not templates:
        raise InputError("expected at least one template, such as 'a photo of a {}', got none")
    try:
        import open_clip
    except ImportError as error:
        raise InputError("text heads need open_clip: pip install transferable-explainers[clip]") from error
    clip: Any = open_clip.create_model(model, pretrained=pretrained or None).eval()
    tokenise = open_clip.get_tokenizer(model)
    means = []
    for name in classes:
        prompts = [template.format(name) for template in templates]
        with torch.no_grad():
            embeddings = clip.encode_text(tokenise(prompts))
        means.append(F.normalize(embeddings, dim=-1).mean(0))
    return F.normalize(torch.stack(means), dim=-1)


ProjectionBuilder = Callable[[TargetModel, Any], Tensor]
"""Computes W from a base model and the datamodule of its classes."""


def simplex_of(target: TargetModel, data: Any, seed: int = 0) -> Tensor:
    """Compute `simplex` for the classes of a datamodule and the width of a model's embeddings.

    Args:
        target: the base model.
        data: the datamodule.
        seed: see `simplex`.
    """
    return simplex(len(data.classes), target.embed_dim, seed)


@torch.no_grad()
def prototypes_of(target: TargetModel, data: Any, limit: int = 1000, batch_size: int = 32) -> Tensor:
    """Compute `prototypes` from a model's embeddings of training images, evenly spaced in the data set.

    Args:
        target: the base model.
        data: the datamodule.
        limit: maximum number of images.
        batch_size: images per batch.

    Raises:
        InputError: if no image can be read, or a class has no image.
    """
    check_positive(limit=limit, batch_size=batch_size)
    dataset = data.dataset("train")
    count = min(limit, len(dataset))
    images = Subset(dataset, [i * len(dataset) // count for i in range(count)])
    loader = DataLoader(images, batch_size, num_workers=data.num_workers, collate_fn=_without_corrupt)
    embedded = [(_embed(target, batch["image"]), batch["label"]) for batch in loader if batch is not None]
    if not embedded:
        raise InputError(f"expected readable training images for prototypes, got {count} that are all corrupt")
    embeddings, labels = (torch.cat(tensors) for tensors in zip(*embedded, strict=True))
    return prototypes(embeddings, labels, len(data.classes))


def _without_corrupt(samples: list[dict[str, Any] | None]) -> dict[str, Tensor] | None:
    """Stack the samples to a batch without corrupt ones, which are `None`; `None` if all are corrupt."""
    readable = [sample for sample in samples if sample is not None]
    return default_collate(readable) if readable else None


def _embed(target: TargetModel, images: Tensor) -> Tensor:
    """Embed uint8 images (B, C, H, W) on the model's device: float32 (B, D), on the CPU."""
    return target.embed(target.normalise(images.to(target.mean.device))).float().cpu()


def text_of(
    target: TargetModel,
    data: Any,
    model: str,
    pretrained: str,
    templates: Sequence[str],
    names: Sequence[str] | None = None,
) -> Tensor:
    """Compute `text_embeddings` for the classes of a datamodule.

    Args:
        target: the base model, which is not read.
        data: the datamodule.
        model: see `text_embeddings`.
        pretrained: see `text_embeddings`.
        templates: see `text_embeddings`.
        names: names to put into the prompts, in the order of the labels; `None` for the datamodule's class names.

    Raises:
        InputError: if the number of names is not the number of classes.
    """
    if names is not None and len(names) != len(data.classes):
        raise InputError(f"expected names of the {len(data.classes)} classes {data.classes}, got {len(names)}")
    return text_embeddings(model, pretrained, names or data.classes, templates)

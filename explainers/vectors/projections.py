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
    """K unit vectors (K, D) with the same, largest possible angle between any two: cosine −1/(K − 1).

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
        raise InputError(f"expected 2 classes to {width}, the width of the embeddings, got {num_classes}")
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(width, num_classes, generator=generator)).Q  # (D, K), orthonormal
    return F.normalize((torch.eye(num_classes) - 1 / num_classes) @ directions.mT, dim=-1)


def prototypes(embeddings: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Unit vectors (K, D) from the average of the class means to the mean embedding of each class.

    >>> embeddings, labels = torch.tensor([[1.0, 0.0], [3.0, 0.0], [6.0, 0.0]]), torch.tensor([0, 0, 1])
    >>> prototypes(embeddings, labels, num_classes=2).tolist()  # from (4, 0) to (2, 0) and to (6, 0)
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
            f"expected images of each of {num_classes} classes, got {counts.tolist()} of them: take more images,"
            " or simplex_of, which needs none"
        )
    means = embeddings.new_zeros(num_classes, embeddings.shape[1]).index_add_(0, labels, embeddings) / counts[:, None]
    return F.normalize(means - means.mean(0), dim=-1)


def text_embeddings(model: str, pretrained: str, classes: Sequence[str], templates: Sequence[str]) -> Tensor:
    """CLIP's mean text embedding of each class over all templates, as unit vectors (K, D').

    Args:
        model: open_clip's name of an architecture.
        pretrained: open_clip's name of its weights.
        classes: names of the classes.
        templates: prompts with `{}` in place of the name.

    Raises:
        InputError: if open_clip is not installed, or there are no templates.
    """
    if not templates:
        raise InputError("expected templates, one prompt or more with {} in place of the class, got none")
    try:
        import open_clip
    except ImportError as error:
        raise InputError("text heads need open_clip: pip install transferable-explainers[clip]") from error
    clip: Any = open_clip.create_model(model, pretrained=pretrained or None).eval()
    tokenise = open_clip.get_tokenizer(model)
    with torch.no_grad():
        prompts = [F.normalize(clip.encode_text(tokenise([t.format(c) for t in templates])), dim=-1) for c in classes]
    return F.normalize(torch.stack([embeddings.mean(0) for embeddings in prompts]), dim=-1)


ProjectionBuilder = Callable[[TargetModel, Any], Tensor]
"""Computes W from a base model and the datamodule of its classes."""


def simplex_of(target: TargetModel, data: Any, seed: int = 0) -> Tensor:
    """`simplex` for the classes of a datamodule."""
    return simplex(len(data.classes), target.embed_dim, seed)


@torch.no_grad()
def prototypes_of(target: TargetModel, data: Any, limit: int = 1000, batch_size: int = 32) -> Tensor:
    """`prototypes` of at most `limit` training images, evenly spaced in the data set."""
    check_positive(limit=limit, batch_size=batch_size)
    dataset = data.dataset("train")
    count = min(limit, len(dataset))
    images = Subset(dataset, [i * len(dataset) // count for i in range(count)])
    embeddings, labels = [], []
    for batch in DataLoader(images, batch_size, num_workers=data.num_workers, collate_fn=_readable):
        if batch is not None:
            embeddings.append(target.embed(target.normalise(batch["image"].to(target.mean.device))).float().cpu())
            labels.append(batch["label"])
    if not embeddings:
        raise InputError(f"expected readable training images for prototypes, got {count} that are all corrupt")
    return prototypes(torch.cat(embeddings), torch.cat(labels), len(data.classes))


def _readable(samples: list[dict[str, Any] | None]) -> dict[str, Tensor] | None:
    """The batch without corrupt images, which are `None`; `None` if all are corrupt."""
    readable = [sample for sample in samples if sample is not None]
    return default_collate(readable) if readable else None


def text_of(
    target: TargetModel,
    data: Any,
    model: str,
    pretrained: str,
    templates: Sequence[str],
    names: Sequence[str] | None = None,
) -> Tensor:
    """`text_embeddings` of the class `names`; `None` takes the names of the datamodule's classes."""
    if names is not None and len(names) != len(data.classes):
        raise InputError(f"expected names of the {len(data.classes)} classes {data.classes}, got {len(names)}")
    return text_embeddings(model, pretrained, names or data.classes, templates)

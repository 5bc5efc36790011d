"""Three ways to compute the projection W of a fixed head without training: a simplex, prototypes, and texts.

`simplex` and `prototypes` return W, (K, D). `simplex_of`, `prototypes_of` and `text_of` compute it for a model and the
classes of a datamodule.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, default_collate

from explainers.errors import InputError, check_positive
from explainers.images.loading import deliver_batches
from explainers.models import TargetModel
from explainers.models.names import readable_names
from explainers.text.encoders import TEMPLATES, open_clip_encoder, text_embeddings
from explainers.text.towers import text_tower
from explainers.vectors.fixed_head import fix_projected_head


def simplex(num_classes: int, width: int, seed: int = 0) -> Tensor:
    """K unit vectors (K, D), any two at the same angle, the largest possible one: its cosine is −1/(K − 1).

    >>> weight = simplex(num_classes=3, width=4)
    >>> (weight @ weight.mT).round(decimals=4).tolist()
    [[1.0, -0.5, -0.5], [-0.5, 1.0, -0.5], [-0.5, -0.5, 1.0]]

    They are rotated at random, by `seed`.

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


ProjectionBuilder = Callable[[TargetModel, Any], Tensor]
"""Computes W from a base model and the datamodule of its classes."""


def simplex_of(target: TargetModel, data: Any, seed: int = 0) -> Tensor:
    """Compute `simplex` for the classes of a datamodule and the width of the base model's embeddings."""
    return simplex(len(data.classes), target.embed_dim, seed)


def prototypes_of(target: TargetModel, data: Any, limit: int = 1000, batch_size: int = 32) -> Tensor:
    """Compute `prototypes` from the base model's embeddings of at most `limit` training images of a datamodule."""
    embeddings, labels = embedded_images(target, data, "train", limit, batch_size)
    return prototypes(embeddings, labels, len(data.classes))


@torch.no_grad()
def embedded_images(
    target: TargetModel, data: Any, split: str, limit: int, batch_size: int = 32
) -> tuple[Tensor, Tensor]:
    """Embed `some_images`: embeddings (B, D) and labels (B,), on the CPU."""
    embedded = []
    for batch in some_images(data, split, limit, batch_size):
        images = target.normalise(batch["image"].to(target.mean.device))
        embedded.append((target.embed(images).float().cpu(), batch["label"]))
    embeddings, labels = (torch.cat(tensors) for tensors in zip(*embedded, strict=True))
    return embeddings, labels


def some_images(data: Any, split: str, limit: int, batch_size: int = 32) -> Iterator[dict[str, Tensor]]:
    """Batches of readable images of a split of a datamodule, at most `limit` ones, evenly spaced in the data set.

    Raises:
        InputError: if no image can be read, or only whole batches, as by FFCV.
    """
    check_positive(limit=limit, batch_size=batch_size)
    if not hasattr(data, "dataset"):
        raise InputError(
            f"expected data that reads single images, got {type(data).__name__}: take a folder of images, such as"
            " data=imagenet_folder"
        )
    dataset = data.dataset(split)
    count = min(limit, len(dataset))
    images = Subset(dataset, [i * len(dataset) // count for i in range(count)])
    own_numbers = torch.Generator()  # so that the global ones stay as they were
    loader = DataLoader(
        images, batch_size, num_workers=data.num_workers, collate_fn=_without_corrupt, generator=own_numbers
    )
    readable = 0
    for batch in deliver_batches(loader, data.num_workers):
        if batch is not None:
            readable += len(batch["image"])
            yield batch
    if not readable:
        raise InputError(f"expected readable {split} images for the head, got {count} that are all corrupt")


def _without_corrupt(samples: list[dict[str, Any] | None]) -> dict[str, Tensor] | None:
    """Stack the samples to a batch without corrupt ones, which are `None`; `None` if all are corrupt."""
    readable = [sample for sample in samples if sample is not None]
    return default_collate(readable) if readable else None


def text_of(
    target: TargetModel,
    data: Any,
    model: str | None = None,
    pretrained: str | None = None,
    templates: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    images: int = 200,
) -> Tensor:
    """Compute text embeddings W of the classes of a datamodule, (K, D'), and print how many images these classify well.

    Args:
        target: the base model, the image tower.
        data: the datamodule.
        model: this and `pretrained`: see `text_tower`.
        templates: see `text_embeddings`; `None` for those of the datamodule, or `TEMPLATES` if it has none.
        names: names to put into the prompts, in the order of the labels; `None` for `readable_names` of the classes.
        images: maximum number of validation images for the printed accuracy; 0 for none.

    Raises:
        InputError: if image and text tower are not of one model, or the number of names is not the number of classes.
    """
    if not data.classes or (names is not None and len(names) != len(data.classes)):
        raise InputError(
            f"expected names of the {len(data.classes)} classes {data.classes}, got {len(names or ())}: set"
            " names=, or take images with classes"
        )
    tower = text_tower(target, model, pretrained)
    prompts = (getattr(data, "templates", ()) or TEMPLATES) if templates is None else templates
    weight = text_embeddings(open_clip_encoder(*tower), names or readable_names(data.classes), prompts)
    if images:
        print_accuracy(target, data, weight, images)
    return weight


@rank_zero_only
def print_accuracy(target: TargetModel, data: Any, weight: Tensor, limit: int) -> None:
    """Print the accuracy of a text head on validation images; warn if it is not two standard errors above chance."""
    if not hasattr(data, "dataset"):
        return print(f"text head: accuracy not measured, because {type(data).__name__} reads no single images")
    embeddings, labels = embedded_images(target, data, "val", limit)
    head = fix_projected_head(target, weight.to(target.mean.device)).cpu()
    accuracy = (head(embeddings).argmax(-1) == labels).float().mean().item()
    chance = 1 / len(weight)
    percent = f"{100 * accuracy:.3g} %"
    print(f"text head: {percent} on {len(labels)} validation images (chance {100 * chance:.2g} %)")
    if accuracy < chance + 2 * (chance * (1 - chance) / len(labels)) ** 0.5:
        warnings.warn(
            f"the accuracy of the text head, {percent}, is not clearly above chance: are image and text tower of one"
            " model, with its weights, and do the prompts fit the images?",
            stacklevel=2,
        )

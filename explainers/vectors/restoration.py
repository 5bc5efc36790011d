"""Keeps predictions where a vector is added: a linear map restores the embeddings, fitted without labels."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.vectors.projections import some_images

RIDGE = 1.0  # strength of the ridge regression, relative to the mean variance of the embeddings
Point = TypeVar("Point")


def restoration(changed: Tensor, unchanged: Tensor, ridge: float = RIDGE) -> Tensor:
    """Compute the map R, (D, D), with the least Σ |R e − ê|² + k |R − I|², by ridge regression towards the identity.

    k is `ridge` times Σ |e − mean e|² / D. A fixed head whose projection is multiplied by R computes logits from
    restored embeddings.

    >>> unchanged = torch.tensor([[4.0, 0.0], [0.0, 4.0], [-4.0, -4.0]])
    >>> (restoration(2 * unchanged, unchanged, ridge=0.0) + 0).tolist()
    [[0.5, 0.0], [0.0, 0.5]]

    Args:
        changed: e, the embeddings of images by the model with the vector, (B, D).
        unchanged: ê, their embeddings by the model without it, (B, D).
        ridge: strength, relative to the mean variance of e.
    """
    e = changed.double()
    strength = ridge * (e - e.mean(0)).square().sum() / e.shape[1]
    identity = torch.eye(e.shape[1], dtype=e.dtype, device=e.device)
    change = torch.linalg.solve(e.mT @ e + strength * identity, e.mT @ (unchanged.double() - e)).mT
    return (identity + change).to(changed.dtype)


def restored(projection: Tensor | None, restoration: Tensor | None) -> Tensor | None:
    """The projection P of a fixed head, `None` for none, for embeddings that are restored first: P R."""
    if restoration is None:
        return projection
    return restoration if projection is None else projection @ restoration


@torch.no_grad()
def restorations(
    points: Sequence[Point], load: Callable[[Point], TargetModel], data: Any, count: int
) -> dict[Point, Tensor]:
    """Fit a `restoration` for every point of a sweep but the first, the unchanged model.

    Args:
        points: the points.
        load: loads the weights of a point into a model, and returns it.
        data: a datamodule; its training images are used without their labels.
        count: maximum number of images.

    Returns:
        Point → R, on the device of the model.

    Raises:
        InputError: without a datamodule.
    """
    if data is None:
        raise InputError("expected a datamodule with training images for restore, got dataloaders: set restore=0")
    embeddings: list[list[Tensor]] = [[] for _ in points]
    for batch in some_images(data, "train", count):
        for point, of_point in zip(points, embeddings, strict=True):
            target = load(point)
            of_point.append(target.embed(target.normalise(batch["image"].to(target.mean.device))).float())
    unchanged, *changed = (torch.cat(of_point) for of_point in embeddings)
    return {point: restoration(each, unchanged) for point, each in zip(points[1:], changed, strict=True)}

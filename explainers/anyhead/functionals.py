"""Random linear functionals v of the embedding, to learn from."""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import REPEATED, checks_choices
from explainers.sampling import uniform

Functional = Literal["predicted", "other", "difference", "mixture", "isotropic"]
Functionals = Annotated[Sequence[Functional], REPEATED]  # every entry is a draw of its own
LIKELY = 20
"""Number of most probable classes after the predicted one, of which `other` is drawn."""


@checks_choices
def random_functionals(kinds: Functionals, rows: Tensor, logits: Tensor, index: Tensor, seed: int) -> Tensor:
    """Draw functionals of every image, which depend on its index and its predictions alone.

    Args:
        kinds: the kind of each of V functionals. `predicted`: W_y of the predicted class, relative to the mean of all
            rows W̄. `other`: W_k of another likely class, relative to W̄. `difference`: W_i − W_j of two random classes.
            `mixture`: a sum of all W_k − W̄ with normal weights, so that its covariance is that of the rows.
            `isotropic`: normal entries.
        rows: W, (K, D).
        logits: (B, K).
        index: index of each image in the data set, (B,).
        seed: a different one for every epoch, see `sampling.stream`.

    Returns:
        v of unit length, (B, V, D).
    """
    classes, width = rows.shape
    centred = rows - rows.mean(0)
    ranked = logits.argsort(-1, descending=True)
    functionals = []
    for position, kind in enumerate(kinds):
        draws = uniform(
            (index[:, None] * len(kinds) + position) * max(classes, width)
            + torch.arange(max(classes, width), device=index.device),
            seed,
        )
        if kind == "predicted":
            functional = centred[ranked[:, 0]]
        elif kind == "other":
            place = 1 + draws[:, :1] * min(LIKELY, classes - 1)
            functional = centred[ranked.gather(1, place.long())[:, 0]]
        elif kind == "difference":
            first, second = draws[:, :classes].argsort(-1)[:, :2].unbind(1)
            functional = rows[first] - rows[second]
        elif kind == "mixture":
            functional = normal(draws[:, :classes]) @ centred
        else:
            functional = normal(draws[:, :width])
        functionals.append(functional)
    return F.normalize(torch.stack(functionals, 1).float(), dim=-1)


def likely_classes(logits: Tensor, index: Tensor, count: int, seed: int) -> Tensor:
    """Draw classes of every image: the predicted one, and for every fourth draw one of the `LIKELY` next ones.

    Args:
        logits: (B, K), K at least 2.
        index: index of each image in the data set, (B,).
        count: number of classes for each image.
        seed: see `random_functionals`.

    Returns:
        (B, count).

    >>> likely_classes(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([7]), count=4, seed=0).shape
    torch.Size([1, 4])
    """
    places = torch.arange(count, device=index.device)
    draws = uniform(index[:, None] * count + places, seed)
    others = 1 + (draws * min(LIKELY, logits.shape[-1] - 1)).long()
    ranks = torch.where(places % 4 == 3, others, 0)
    return logits.argsort(-1, descending=True).gather(1, ranks)


def normal(draws: Tensor) -> Tensor:
    """Turn numbers that are uniform in [0, 1) into standard normal ones, float32.

    >>> normal(torch.tensor([0.5, 0.84134475], dtype=torch.double)).round(decimals=3).tolist()
    [0.0, 1.0]
    """
    return torch.special.ndtri(draws.clamp(min=2**-33)).float()

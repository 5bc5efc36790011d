"""Linear functionals v of the embedding: those of the classes of a head, and random ones to learn from."""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explainers.errors import REPEATED, InputError, checks_choices
from explainers.sampling import uniform

Functional = Literal["predicted", "other", "difference", "mixture", "isotropic"]
Functionals = Annotated[Sequence[Functional], REPEATED]  # every entry is a draw of its own
LIKELY = 20
"""Number of most probable classes after the predicted one, of which `other` is drawn."""


def class_rows(head: Callable[[Tensor], Tensor], embed_dim: int, like: Tensor, directions: bool = False) -> Tensor:
    """Compute the functional W_y of every class of a linear head, without its bias.

    Args:
        head: embeddings (..., D) → logits (..., K).
        embed_dim: D.
        like: a tensor on the device of the head.
        directions: also take a head that divides embeddings by their length, such as CLIP's or one of prototypes. Its
            classes are then functionals up to a factor of each image, which a loss that ignores lengths can learn.

    Returns:
        W, (K, D).

    Raises:
        InputError: if the head is not linear.

    >>> class_rows(torch.nn.Linear(3, 2), 3, torch.zeros(1)).shape
    torch.Size([2, 3])
    """
    if isinstance(head, nn.Linear):
        return head.weight.detach()
    if directions and getattr(head, "normalise", False):
        return head.directions()  # type: ignore[attr-defined]
    with torch.no_grad(), torch.autocast(like.device.type, enabled=False):
        points = torch.eye(embed_dim, device=like.device)
        mixed = torch.arange(embed_dim, device=like.device) % 4 - 1.5  # of both signs, and exact in low precision
        bias, *rows, of_mixed = head(torch.cat([0 * points[:1], points, mixed[None]])).float()
        columns = torch.stack(rows) - bias
        if not torch.allclose(mixed @ columns, of_mixed - bias, rtol=1e-3, atol=1e-3 * columns.abs().max().item()):
            raise InputError(
                "expected a linear head, whose classes are linear functionals of the embedding, got one of another"
                " kind: fit a linear one with `python train.py experiment=linear_head`"
            )
    return columns.mT


def score_functionals(
    rows: Tensor, logits: Tensor, temperature: float | None = None, classes: Tensor | None = None
) -> Tensor:
    """Compute the gradient of the score z_y − t log Σ_{k ≠ y} exp(z_k / t) at the embedding, for logits z = W e + b.

    The gradient is W_y − Σ_k q_k W_k, where q is the softmax of z / t over all classes but y. Because y is left out,
    the gradient does not vanish where the model is certain of y.

    Args:
        rows: W, (K, D).
        logits: z, (B, K).
        temperature: t. 1: the score is the log-odds of the class. Infinity: its logit relative to the mean of the
            others. `None`, or a single class: its logit, W_y.
        classes: (B,); `None` for all classes.

    Returns:
        v, (B, D), or (B, K, D) for all classes; float32.

    >>> score_functionals(torch.eye(3), torch.zeros(1, 3), temperature=1.0, classes=torch.tensor([1])).tolist()
    [[-0.5, 1.0, -0.5]]
    """
    rows = rows.float()
    logits = logits.float()
    wanted = rows.expand(len(logits), -1, -1) if classes is None else rows[classes]
    if temperature is None or len(rows) == 1:
        return wanted
    with torch.autocast(rows.device.type, enabled=False):
        if classes is not None:
            return wanted - _alternatives(rows, logits / temperature, classes)
        p = (logits / temperature).softmax(-1)[..., None]  # (B, K, 1)
        others = (p.mT @ rows - p * rows) / (1 - p).clamp(min=1e-9)  # exact enough for all but the predicted class
        top = logits.argmax(-1)
        others[torch.arange(len(others)), top] = _alternatives(rows, logits / temperature, top)
    return wanted - others


def _alternatives(rows: Tensor, logits: Tensor, classes: Tensor) -> Tensor:
    """The mean row of all classes but one for each image, with softmax weights: (B, D)."""
    return logits.scatter(1, classes[:, None], -torch.inf).softmax(-1) @ rows


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


def normal(draws: Tensor) -> Tensor:
    """Turn numbers that are uniform in [0, 1) into standard normal ones, float32.

    >>> normal(torch.tensor([0.5, 0.84134475], dtype=torch.double)).round(decimals=3).tolist()
    [0.0, 1.0]
    """
    return torch.special.ndtri(draws.clamp(min=2**-33)).float()

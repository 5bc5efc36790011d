"""Linear functionals v of the embedding that explain the classes of a head, or a cosine similarity."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explainers.errors import InputError, checks_choices
from explainers.models.heads import ConstantLengths, ProjectedHead
from explainers.models.scores import Score

Length = Literal["constant", "variable"]
"""Whether a cosine is explained for a constant length of the embedding, or also by what changes the length."""


def class_rows(head: Callable[[Tensor], Tensor], embed_dim: int, like: Tensor, directions: bool = False) -> Tensor:
    """Compute the functional W_y of every class of a linear head, without its bias.

    Args:
        head: embeddings (..., D) → logits (..., K); an InputError unless it is linear.
        embed_dim: D.
        like: a tensor on the device of the head.
        directions: also take a head that divides embeddings by their length, such as CLIP's or one of prototypes. Its
            classes are then functionals up to a factor of each image, which a loss that ignores lengths can learn.

    Returns:
        W, (K, D).

    >>> class_rows(torch.nn.Linear(3, 2), 3, torch.zeros(1)).shape
    torch.Size([2, 3])
    """
    if isinstance(head, nn.Linear):
        return head.weight.detach()
    if directions and isinstance(head, ProjectedHead) and head.normalise:
        return head.directions()
    with torch.no_grad(), torch.autocast(like.device.type, enabled=False):
        points = torch.eye(embed_dim, device=like.device, dtype=torch.float32)
        mixed = torch.arange(embed_dim).to(points) % 4 - 1.5  # of both signs, and exact in low precision
        bias, *rows, of_mixed = head(torch.cat([0 * points[:1], points, mixed[None]])).float()
        columns = torch.stack(rows) - bias
        largest = columns.abs().max().item()  # NaN of a head that divides by the length of the embedding 0
        if not (largest < torch.inf and torch.allclose(mixed @ columns, of_mixed - bias, 1e-3, 1e-3 * largest)):
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
            return wanted - _mean_alternatives(rows, logits / temperature, classes)
        p = (logits / temperature).softmax(-1)[..., None]  # (B, K, 1)
        others = (p.mT @ rows - p * rows) / (1 - p).clamp(min=1e-9)  # exact enough for all but the predicted class
        top = logits.argmax(-1)
        others[torch.arange(len(others)), top] = _mean_alternatives(rows, logits / temperature, top)
    return wanted - others


def choose_temperature(score: Score, temperature: float | None) -> float | None:
    """The temperature for `score_functionals` of a model's classes, which compete in a `softmax` alone.

    >>> choose_temperature("softmax", 2.0), choose_temperature("sigmoid", 2.0)
    (2.0, None)
    """
    return temperature if score == "softmax" else None


def head_functionals(
    head: Callable[[Tensor], Tensor],
    embeddings: Tensor,
    temperature: float | None = None,
    classes: Tensor | None = None,
) -> Tensor:
    """Compute the functional v that explains the score of a class of a head at embeddings e, (B, D).

    The other arguments and the result are those of `score_functionals`. The score of a cosine head, such as CLIP's, is
    explained for a constant length |P e|. It then has the factor scale / |P e| of the image, see `cosine_functionals`.
    For any other head, v is the gradient of the score at the embedding, for `ConstantLengths`.

    >>> head_functionals(torch.nn.Linear(3, 2), torch.zeros(4, 3)).shape
    torch.Size([4, 2, 3])
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        embeddings = embeddings.float()
        if not (isinstance(head, ProjectedHead) and head.normalise):
            try:
                rows = class_rows(head, embeddings.shape[-1], embeddings)
            except InputError:
                return _score_gradients(head, embeddings, temperature, classes)
            return score_functionals(rows, head(embeddings), temperature, classes)
        directions = head.scale * score_functionals(head.weight, head(embeddings), temperature, classes)
        if classes is None:
            return cosine_functionals(embeddings, directions, head.projection)
        return cosine_functionals(embeddings, directions[:, None], head.projection)[:, 0]


def _score_gradients(
    head: Callable[[Tensor], Tensor], embeddings: Tensor, temperature: float | None, classes: Tensor | None
) -> Tensor:
    """Compute `head_functionals` of any head by autograd: v = Σ_k (∂score / ∂z_k) (∂z_k / ∂e)."""
    with torch.inference_mode(False), torch.enable_grad():
        points = embeddings.detach().clone().requires_grad_()
        with ConstantLengths():
            logits = head(points)
        units = torch.eye(logits.shape[-1]).to(logits)
        known = None if classes is None else classes.clone()  # inference tensors have no gradient
        weights = score_functionals(units, logits.detach(), temperature, known)  # (B, K) or (B, K, K)
        columns = weights[:, None] if weights.dim() == 2 else weights
        gradients = [torch.autograd.grad(logits, points, each, retain_graph=True)[0] for each in columns.unbind(1)]
    return torch.stack(gradients, 1) if classes is None else gradients[0]


def _mean_alternatives(rows: Tensor, logits: Tensor, classes: Tensor) -> Tensor:
    """The mean row of all classes but one for each image, with softmax weights: (B, D)."""
    return logits.scatter(1, classes[:, None], -torch.inf).softmax(-1) @ rows


@checks_choices
def cosine_functionals(
    embeddings: Tensor, directions: Tensor, projection: Tensor | None = None, length: Length = "constant"
) -> Tensor:
    """Compute functionals v that explain t · P e / |P e|, the cosine of an embedding e with a unit vector t.

    For a constant length |P e|, the cosine is linear: v = Pᵀ t / |P e|, and v · e is the cosine itself. With `variable`
    length, v is its gradient Pᵀ (t − cos · P e / |P e|) / |P e|, its first-order part, for which v · e is 0.

    Args:
        embeddings: e, (B, D).
        directions: t, (V, D') for all images, or (B, V, D'); sums and differences of unit vectors explain sums and
            differences of cosines.
        projection: P, (D', D), such as CLIP's visual projection; `None` for none, and then D' = D.
        length: see `Length`.

    Returns:
        v, (B, V, D), float32.

    >>> cosine_functionals(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 1.0]])).tolist()
    [[[0.0, 0.2...]]]
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        projected = embeddings.float() if projection is None else F.linear(embeddings.float(), projection.float())
        directions = directions.float().expand(len(projected), -1, -1)
        size = projected.norm(dim=-1).clamp(min=1e-12)[:, None, None]
        if length == "variable":
            unit = projected[:, None] / size
            directions = directions - (directions * unit).sum(-1, keepdim=True) * unit
        return (directions if projection is None else directions @ projection.float()) / size

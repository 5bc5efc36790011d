"""What the predictions of a self-explaining model are compared with while its patches learn."""

from typing import Literal

from torch import Tensor

Predictions = Literal["labels", "teacher", "embedding"]
"""`labels`: the cross entropy with the labels. `teacher`: the divergence from the teacher's predictions,
KL(teacher ‖ model). `embedding`: the `relative_error` of the teacher's embedding, which holds the predictions of every
head, and not only those of the teacher's."""


def relative_error(embeddings: Tensor, wanted: Tensor) -> Tensor:
    """Σ |e − ê|² / Σ |ê − mean ê|² over the images of a batch: 1 if all embeddings are the mean of the wanted ones ê.

    >>> relative_error(torch.tensor([[1.0], [1.0]]), torch.tensor([[0.0], [2.0]])).item()
    1.0

    Args:
        embeddings: e, (B, D).
        wanted: ê, (B, D).
    """
    variation = (wanted - wanted.mean(0)).square().sum()
    return (embeddings - wanted).square().sum() / variation.clamp(min=1e-8)

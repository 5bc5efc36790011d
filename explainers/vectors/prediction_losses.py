"""What the predictions of a self-explaining model are compared with while its patches learn."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError, checks_choices
from explainers.metrics.optional import Metric

Predictions = Literal["labels", "teacher", "embedding"]
"""`labels`: the cross entropy with the labels. `teacher`: the divergence from the teacher's predictions,
KL(teacher ‖ model). `embedding`: the `relative_error` of the teacher's embedding, which holds the predictions of every
head, and not only those of the teacher's."""


@checks_choices
def prediction_loss(
    predictions: Predictions, logits: Tensor, wanted: Tensor, embeddings: Tensor, rows: dict[str, Tensor]
) -> Tensor:
    """Compute L_predict.

    Args:
        predictions: what is compared.
        logits: logits of the model, (B, K).
        wanted: probabilities to predict, (B, K); 0 and 1 for labels, whose divergence is the cross entropy.
        embeddings: embeddings of the model, (B, D).
        rows: holds the embeddings of the teacher, `embedding` (B, D), if they are compared.
    """
    if predictions == "embedding":
        return relative_error(embeddings.float(), rows["embedding"].float())
    return F.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean")


def relative_error(embeddings: Tensor, wanted: Tensor) -> Tensor:
    """Σ |e − ê|² / Σ |ê − mean ê|² over the images of a batch: 1 if all embeddings are the mean of the wanted ones ê.

    >>> import torch
    >>> relative_error(torch.tensor([[1.0], [1.0]]), torch.tensor([[0.0], [2.0]])).item()
    1.0

    Args:
        embeddings: e, (B, D).
        wanted: ê, (B, D).

    Raises:
        InputError: for a single image, which does not vary.
    """
    if len(wanted) < 2:
        raise InputError(
            "module.predictions=embedding: expected batches of 2 images or more, because errors are divided by their"
            f" variation, got {len(wanted)}: raise data.batch_size"
        )
    variation = (wanted - wanted.mean(0)).square().sum()
    return (embeddings - wanted).square().sum() / variation.clamp(min=1e-8)


class EmbeddingError(Metric):
    """The `relative_error` of all images of all processes, however they are divided into batches.

    >>> metric = EmbeddingError(width=1)
    >>> for wanted in (0.0, 2.0):
    ...     metric.update(torch.tensor([[1.0]]), torch.tensor([[wanted]]))
    >>> metric.compute().item()
    1.0

    Args:
        width: D, width of the embeddings.
    """

    full_state_update = False
    errors: Tensor
    squares: Tensor
    total: Tensor
    images: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        for name, size in (("errors", ()), ("squares", ()), ("total", (width,)), ("images", ())):
            self.add_state(name, torch.zeros(size, dtype=torch.double), dist_reduce_fx="sum")

    def update(self, embeddings: Tensor, wanted: Tensor) -> None:
        """Add images, with the arguments of `relative_error`."""
        wanted = wanted.double()
        self.errors += (embeddings.double() - wanted).square().sum()
        self.squares += wanted.square().sum()
        self.total += wanted.sum(0)
        self.images += len(wanted)

    def compute(self) -> Tensor:
        variation = self.squares - self.total.square().sum() / self.images
        return (self.errors / variation.clamp(min=1e-8)).float()

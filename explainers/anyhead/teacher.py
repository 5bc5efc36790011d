"""What AnyHead needs of a teacher."""

from typing import Protocol

from torch import Tensor

from explainers.training.sources import Source


class Teacher(Source, Protocol):
    """A source that also computes the error of predicted vectors."""

    ratios: int
    """Number of ratios that `loss` is the mean of."""

    def loss(self, vectors: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """The error of predicted vectors c_z (B, N, D)."""
        ...

    def loss_sums(self, vectors: Tensor, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor | int]:
        """Numerators and denominators of `loss`, (ratios,) each or numbers; those of several batches are added."""
        ...

    def unit(self, rows: dict[str, Tensor]) -> Tensor:
        """The standard deviation of the entries of c_z that an untrained network should predict."""
        ...

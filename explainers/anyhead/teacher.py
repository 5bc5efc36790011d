"""What AnyHead needs of a teacher."""

from typing import Protocol

from torch import Tensor

from explainers.training.sources import Source


class Teacher(Source, Protocol):
    """A source that also computes the error of predicted vectors."""

    def loss(self, vectors: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """The error of predicted vectors c_z (B, N, D)."""
        ...

    def unit(self, rows: dict[str, Tensor]) -> Tensor:
        """The standard deviation of the entries of c_z that an untrained network should predict."""
        ...

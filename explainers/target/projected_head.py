"""Heads that compare embeddings with fixed directions, such as text embeddings, by their product or their cosine."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explainers.errors import check_positive


class ProjectedHead(nn.Module):
    """Multiplies embeddings by a fixed projection W.

    >>> head = ProjectedHead(torch.eye(2), scale=10.0)
    >>> head(torch.tensor([[0.0, 4.0]])).tolist()  # the logits of one image
    [[0.0, 10.0]]

    Args:
        weight: W, (K, D'). D' is the width of the embeddings after `projection`.
        projection: linear map before W, (D', D), such as CLIP's visual projection; `None` for none, and then D' = D.
        normalise: divide every embedding, after `projection`, by its length.
        scale: factor of the logits, such as CLIP's logit scale; above 0.
        bias: added to the logits, (K,), such as the bias of a model's own head; `None` for none.
    """

    weight: Tensor
    projection: Tensor | None
    bias: Tensor | None
    scale: Tensor
    class_names: tuple[str, ...] = ()
    """Names of the classes, in the order of the logits; empty if they are not known."""

    def __init__(
        self,
        weight: Tensor,
        projection: Tensor | None = None,
        normalise: bool = True,
        scale: float = 1.0,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        check_positive(scale=scale)
        self.register_buffer("weight", weight)
        self.register_buffer("projection", projection)
        self.register_buffer("bias", bias)
        self.register_buffer("scale", torch.tensor(float(scale)))
        self.normalise = normalise

    @property
    def in_features(self) -> int:
        """D, the width of the embeddings."""
        return (self.weight if self.projection is None else self.projection).shape[1]

    @property
    def out_features(self) -> int:
        """K, the number of classes."""
        return len(self.weight)

    def extra_repr(self) -> str:
        """The option that the state dict does not hold."""
        return f"normalise={self.normalise}"

    def forward(self, embeddings: Tensor) -> Tensor:
        """Compute logits (..., K) from embeddings of images (..., D)."""
        logits = self.scale * F.linear(self.project(embeddings, self.normalise), self.weight)
        return logits if self.bias is None else logits + self.bias

    def directions(self) -> Tensor:
        """The functionals of the classes, (K, D), without the division by the length of the embedding."""
        return self.weight if self.projection is None else self.weight @ self.projection

    def project(self, embeddings: Tensor, normalise: bool) -> Tensor:
        """Embeddings (..., D) after the projection, (..., D'), divided by their length if `normalise`."""
        if self.projection is not None:
            embeddings = F.linear(embeddings, self.projection)
        return F.normalize(embeddings, dim=-1) if normalise else embeddings

"""Explains texts: where in an image is what a text describes?"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from explainers.errors import check_positive, checks_choices
from explainers.models.functionals import Length
from explainers.models.inputs import check_explains_functionals, validate_classes
from explainers.text.heads import TextHead, Texts


class TextExplainer(nn.Module):
    """Explains texts in place of classes: class y is the y-th text.

    For other arguments see `TextHead.functionals`.

    Args:
        explainer: an explainer of functionals, such as AnyHead, or a method that reads the inside of a transformer.
        head: what turns texts into functionals of the embedding.
        texts: V texts, or their embeddings, (V, D').

    Raises:
        InputError: for an explainer that explains classes alone, such as RISE.
    """

    @checks_choices
    def __init__(
        self,
        explainer: Any,
        head: TextHead,
        texts: Texts,
        against: Texts | None = None,
        temperature: float = math.inf,
        length: Length = "constant",
    ) -> None:
        super().__init__()
        check_positive(temperature=temperature)
        check_explains_functionals(explainer)
        self.explainer = explainer
        self.target = explainer.target
        self.grid = explainer.grid
        self.head = head
        self.texts = head.embed(texts)
        self.against = against
        self.temperature = temperature
        self.length = length
        self.forward_passes = getattr(explainer, "forward_passes", 1)
        self.signed = getattr(explainer, "signed", None)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Explain one text (B,), by its number, in each uint8 image (B, C, H, W): heatmaps (B, rows, columns)."""
        wanted = validate_classes(classes, images, len(self.texts))

        def select(embeddings: Tensor) -> Tensor:
            return self._functionals(embeddings)[torch.arange(len(wanted)), wanted][:, None]

        return self.explainer.explain(images, select)[:, 0]

    def explain_all(self, images: Tensor) -> Tensor:
        """Explain all V texts in images (B, C, H, W), in one pass of the model: heatmaps (B, V, rows, columns)."""
        return self.explainer.explain(images, self._functionals)

    def scores(self, images: Tensor) -> Tensor:
        """Score uint8 images (B, C, H, W) by all texts: (B, V)."""
        self.grid.check(images)
        return self.head(self.target.embed(self.target.normalise(images)), self.texts)

    def prepare(self, images: Tensor) -> Callable[[Tensor], Tensor]:
        """Explain all texts at once, see `PreparedExplainer`."""
        heatmaps = self.explain_all(images)
        return lambda classes: heatmaps[torch.arange(len(heatmaps)), classes]

    def _functionals(self, embeddings: Tensor) -> Tensor:
        return self.head.functionals(embeddings.detach(), self.texts, self.against, self.temperature, self.length)

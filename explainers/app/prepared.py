"""What is made ready before heatmaps are computed: the model, and batches of images on its device."""

import copy
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from explainers import Explainer, PreparedExplainer, VectorExplainer
from explainers.errors import InputError
from explainers.models import TargetModel, as_target
from explainers.text import TextHead
from explainers.text.explaining import check_explains_functionals


class PreparedClasses:
    """Images of which classes are explained.

    An explainer that prepares, such as AnyHead, needs one pass for all classes; others need one for each.

    Args:
        explainer: an explainer of the target.
        target: the model.
        images: uint8, (B, 3, S, S).
    """

    def __init__(self, explainer: Explainer, target: TargetModel, images: Tensor) -> None:
        self.explainer = explainer
        self.target = target
        self.images = images

    def scores(self) -> Tensor:
        """The probabilities of all classes, (B, K)."""
        return self.target(self.images).float().softmax(-1).cpu()

    @cached_property
    def _explain(self) -> Callable[[Tensor], Tensor]:
        if isinstance(self.explainer, PreparedExplainer):
            return self.explainer.prepare(self.images)
        return partial(self.explainer, self.images)

    def heatmaps(self, classes: Sequence[int]) -> Tensor:
        """Explain one class in each image: (B, P, P), on the CPU."""
        heatmaps = self._explain(torch.tensor(classes, device=self.images.device))
        if heatmaps.shape[:1] != self.images.shape[:1] or heatmaps.dim() != 3:
            name = getattr(self.explainer, "__name__", type(self.explainer).__name__)
            raise InputError(
                f"expected heatmaps (B, P, P) of {len(self.images)} images from {name}, got {list(heatmaps.shape)}"
            )
        return heatmaps.float().cpu()


class PreparedTexts:
    """Images of which texts are scored and explained.

    An explainer with vectors, such as AnyHead, needs one pass for all texts; others need one for each.

    Args:
        explainer: an explainer of functionals.
        head: what turns texts into functionals.
        images: uint8, (B, 3, S, S).
        against: other texts, see `TextHead.functionals`.

    Raises:
        InputError: for an explainer that explains classes alone, such as RISE.
    """

    @torch.no_grad()
    def __init__(
        self, explainer: Explainer, head: TextHead, images: Tensor, against: Sequence[str] | None = None
    ) -> None:
        self.explainer: Any = explainer  # one of functionals, with the target and grid that it explains
        self.head = head
        self.images = images
        self.against = against
        self.vectors: Tensor | None = None
        if isinstance(explainer, VectorExplainer) and not getattr(explainer, "refine", 0):
            self.vectors, embeddings = explainer.decompose(images)
        else:
            check_explains_functionals(explainer)
            target = getattr(explainer, "target")  # noqa: B009
            embeddings = target.embed(target.normalise(images))
        self.embeddings = embeddings.float()

    def relative_to(self, against: Sequence[str] | None) -> "PreparedTexts":
        """The same images, whose texts are told apart from others; it shares what was computed."""
        twin = copy.copy(self)
        twin.against = against
        return twin

    @torch.no_grad()
    def scores(self, texts: Sequence[str]) -> Tensor:
        """Score the images by texts: (B, V)."""
        return self.head(self.embeddings, texts).float().cpu()

    @torch.no_grad()
    def heatmaps(self, texts: Sequence[str]) -> Tensor:
        """Explain one text in each image: (B, P, P), on the CPU."""
        different = list(dict.fromkeys(texts))
        wanted = torch.tensor([different.index(text) for text in texts])

        def functionals(embeddings: Tensor) -> Tensor:
            of_all = self.head.functionals(embeddings.detach(), different, self.against)
            return of_all[torch.arange(len(of_all)), wanted.to(of_all.device)][:, None]

        if self.vectors is None:
            return self.explainer.explain(self.images, functionals)[:, 0].float().cpu()
        scores = functionals(self.embeddings) @ self.vectors.float().mT
        return scores[:, 0].unflatten(-1, (self.explainer.grid.side, -1)).cpu()


def prepare_model(
    model: str | nn.Module, weights: str | Path | None = None, device: str | torch.device | None = None
) -> TargetModel:
    """Build the model to explain, with the arguments of `Session`; the caller's stays as it is.

    Returns:
        The model, in eval mode, whose weights need no gradients. A `TargetModel` shares its weights with the caller's.

    Raises:
        InputError: for a model of grey images, and a device that this machine does not have.
    """
    target = as_target(model, weights)
    target = share_weights(target) if target is model else target
    if device is None and isinstance(model, str) and torch.cuda.is_available():
        device = "cuda"
    convolutions = (layer for layer in target.backbone.modules() if isinstance(layer, torch.nn.Conv2d))
    channels = next((layer.in_channels for layer in convolutions), 3)
    if channels % 3:  # some models divide images into blocks of pixels first
        raise InputError(f"expected a model of images of 3 channels, got {target.name} of {channels}")
    if device is not None:
        try:
            target = target.to(device)
        except (RuntimeError, AssertionError) as error:  # an unknown device, or none of its kind
            reason = str(error).partition("\n")[0][:80]
            raise InputError(f"expected a device such as cpu or cuda, got {device}: {reason}") from error
    return target.eval().requires_grad_(False)


def share_weights(target: TargetModel) -> TargetModel:
    """A model with modules of its own, whose mode and hooks can change, and with the tensors of another one.

    Weights that were made inside `torch.inference_mode`, which autograd refuses, are copied.
    """
    if any(weight.is_inference() for weight in [*target.parameters(), *target.buffers()]):
        return target.copied()
    shared: dict[int, Any] = {id(weight): nn.Parameter(weight.detach(), False) for weight in target.parameters()}
    shared |= {id(buffer): buffer.detach() for buffer in target.buffers()}
    return copy.deepcopy(target, shared)

"""Explainers as other libraries call them: captum's attribution methods, and the `explain_func` of Quantus.

Both give models normalised float images. They become uint8 again, which is exact for images that came from uint8; other
images, such as those with added noise, are rounded to the nearest of 256 values of a pixel.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from captum.attr import Attribution
from torch import Tensor

from explainers.models import TargetModel

Inputs = TypeVar("Inputs", Tensor, tuple[Tensor])


class CaptumAttribution(Attribution):
    """An explainer as one of captum's attribution methods, for captum's metrics.

    Its `forward_func` computes the target's logits of normalised images.

    Args:
        explainer: learned or post-hoc; its attribute `target` is the model that it explains.
    """

    def __init__(self, explainer: Any) -> None:
        self.explainer = explainer
        self.model: TargetModel = explainer.target
        super().__init__(self.logits)

    def logits(self, inputs: Tensor) -> Tensor:
        """Classify normalised images (B, C, H, W) → logits (B, K)."""
        return self.model.classify(self.model.embed(inputs))

    def attribute(self, inputs: Inputs, target: int | Tensor | None = None) -> Inputs:
        """Explain one class of each image.

        Args:
            inputs: images, normalised with mean and std of the model that is explained, (B, C, H, W). As in captum, a
                tuple of one such tensor gives a tuple.
            target: the class to explain in all images, or in each, (B,); `None` for those that the model predicts.

        Returns:
            Attributions of the shape of `inputs`: the score of a patch, divided evenly among its pixels and channels.
        """
        if isinstance(inputs, tuple):
            (images,) = inputs
            return (self.attribute(images, target),)
        images = to_uint8(inputs, self.model)
        if target is None:
            target = self.model(images).argmax(-1)
        classes = torch.as_tensor(target, device=inputs.device).expand(len(inputs))
        scores = to_pixels(self.explainer(images, classes), inputs.shape[-2:]) / inputs.shape[1]
        # Repeated, because captum views it, which no expanded tensor allows
        return scores.repeat(1, inputs.shape[1], 1, 1).to(inputs.dtype)


def quantus_explain(explainer: Any) -> Callable[..., np.ndarray]:
    """Make the `explain_func` that Quantus calls for attributions.

    Args:
        explainer: see `CaptumAttribution`.

    Returns:
        A function of a model, normalised images (B, C, H, W) and classes (B,), which are NumPy arrays: attributions
        (B, 1, H, W), the score of a patch divided evenly among its pixels. It explains the explainer's own target, and
        not the model that it is given; so a metric that changes the weights of the model says nothing of it.
    """
    own: TargetModel = explainer.target

    @torch.no_grad()
    def explain(model: Any, inputs: np.ndarray, targets: np.ndarray, **settings: Any) -> np.ndarray:
        images = to_uint8(torch.as_tensor(inputs, device=own.mean.device), own)
        heatmaps = explainer(images, torch.as_tensor(targets, device=images.device).long())
        return to_pixels(heatmaps, images.shape[-2:]).float().cpu().numpy()

    return explain


def to_uint8(normalised: Tensor, target: TargetModel) -> Tensor:
    """Turn images (B, C, H, W) that were normalised for `target` back into uint8 images."""
    pixels = (normalised.detach() * target.std + target.mean) * 255
    return pixels.round().clamp(0, 255).to(torch.uint8)


def to_pixels(heatmaps: Tensor, size: Sequence[int]) -> Tensor:
    """Divide the score of every patch evenly among its pixels, so that sums stay: (B, rows, columns) → (B, 1, H, W).

    >>> to_pixels(torch.tensor([[[8.0]]]), size=(2, 2)).tolist()
    [[[[2.0, 2.0], [2.0, 2.0]]]]
    """
    patch = size[0] // heatmaps.shape[1]
    return heatmaps.repeat_interleave(patch, -1).repeat_interleave(patch, -2)[:, None] / patch**2

"""Learned and post-hoc explainers of vision models.

Letters used for tensor shapes in every file of this project:

    B images   C channels   H, W pixels   P patches per side   N = P·P patches   Z sampled patches per image
    D embedding width   K classes   M masks per image   L levels of sparsity

`images` are uint8, (B, C, H, W): every model normalises them for itself. `keep` is boolean, (B, M, N), and True means
that the patch stays visible. Patches are numbered row by row.
"""

from typing import Protocol, runtime_checkable

from torch import Tensor


class Explainer(Protocol):
    """What every explainer is, learned or not: a function from images and classes to heatmaps.

    Every explainer is built from the model that it explains, as the keyword argument `target`. What else is known of an
    explainer it says by optional attributes:

    - `forward_passes`: of the target for each image; 1 where the attribute is missing.
    - `ignores_classes`: True where the heatmaps do not depend on `classes`, as of an explainer that chooses the class.
    - `timed`: False where calling it says nothing about its speed, because its heatmaps come from a cache.
    """

    def __call__(self, images: Tensor, classes: Tensor) -> Tensor:
        """Explain `classes` (B,) in `images`, uint8 (B, C, H, W), with heatmaps (B, P, P): higher is more important."""
        ...


@runtime_checkable
class SelfExplainer(Protocol):
    """An explainer that is a classifier itself, so that it has an accuracy."""

    def logits(self, images: Tensor) -> Tensor:
        """uint8 images (B, C, H, W) → logits (B, K)."""
        ...

"""Learned and post-hoc explainers of vision models.

Letters used for tensor shapes in every file of this project:

    B images   C channels   H, W pixels   P patches per side   N = P·P patches   Z sampled patches per image
    D embedding width   K classes   M masks per image   L levels of sparsity

`images` are uint8, (B, C, H, W): every model normalises them for itself. `keep` is boolean, (B, M, N), and True means
that the patch stays visible. Patches are numbered row by row.
"""

from typing import Protocol

from torch import Tensor


class Explainer(Protocol):
    """What every explainer is, learned or not: a function from images and classes to heatmaps."""

    def __call__(self, images: Tensor, classes: Tensor) -> Tensor:
        """Explain `classes` (B,) in `images`, uint8 (B, C, H, W), with heatmaps (B, P, P): higher is more important."""
        ...

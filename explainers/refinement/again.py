"""Explaining again as patches leave: any explainer, asked again about the rest of each image."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from explainers.errors import InputError, check_integers, check_range, checks_choices
from explainers.masking import PatchGrid, Removal, level_sizes, mask_pixels
from explainers.models import TargetModel
from explainers.models.inputs import WHITE, check_explains_functionals, check_functionals
from explainers.refinement.prior import check_explainer, check_prior, find_target
from explainers.runtime.modes import ordinary_tensors

SHARE = 2 / 3
"""Share of the low order: 13 passes then gain Fidelity⁻ at no loss of Fidelity⁺, see docs/how_to/refine.md."""


@ordinary_tensors()
@checks_choices
def explain_again(
    explainer: Any,
    images: Tensor,
    classes: Tensor | None = None,
    low: int = 7,
    high: int = 7,
    removal: Removal = "zero",
    *,
    functionals: Tensor | None = None,
    share: float = SHARE,
    target: TargetModel | None = None,
    grid: PatchGrid | None = None,
) -> Tensor:
    """Explain images again and again while patches leave, and rank the patches by when they leave.

    The low order removes the least important 1/J of the patches, explains the rest, removes the least important 1/J
    of it, and so on, in J = `low` explanations. The high order removes the most important first, in J = `high`. The
    heatmap is share · r_low + (1 − share) · r_high, where r is 1/N for the least important patch of an order, ..., and
    1 for the most important. Fidelity⁻ prefers the low order, Fidelity⁺ the high one (LeRF and MoRF of TRACE, Wang &
    Wang, 2024).

    Both orders begin with the explanation of the whole image: there are `low` + `high` − 1 explanations of each image.
    An order of 1 explanation ranks the patches as the explainer does.

    Args:
        explainer: explains classes, or functionals if they are given.
        images: uint8 or uint16, (B, C, H, W). Masked images are uint16, so that mean pixels are exact to 2⁻¹⁷ of white.
        classes: the class to explain in each image, (B,); `None` for those predicted, in one pass more.
        low: number of explanations of the low order, from 1 to N.
        high: number of explanations of the high order, from 1 to N.
        removal: what replaces patches, `zero` or `black`.
        functionals: v · G(x) to explain instead of a class, one v for each image, (B, D).
        share: share of the low order, from 0 to 1.
        target: the model to explain; by default the explainer's.
        grid: the patches; by default those of the explainer, or of the model.

    Returns:
        Heatmaps, (B, rows, columns).

    Raises:
        InputError: for numbers that make no sense, removal `drop`, or an explainer that does not fit.
    """
    target = find_target(explainer, target).in_eval_mode()
    patches: PatchGrid = getattr(explainer, "grid", target.grid) if grid is None else grid
    target.check_grid(patches)
    check_integers(low=low, high=high)
    check_range(1, patches.num_patches, low=low, high=high)
    check_range(0, 1, share=share)
    check_seen(removal)
    shape = len(images), *patches.shape
    explain_images = _bind(explainer, images, target, classes, functionals)

    def explain(seen: Tensor) -> Tensor:
        return check_prior(explain_images(seen), shape, "heatmaps").flatten(1)

    def explain_rest(keep: Tensor) -> Tensor:
        return explain(hide_patches(images, keep, target, patches, removal))

    first = explain(images)
    lowest = 1 + removal_order(explain_rest, first, low)
    highest = patches.num_patches - removal_order(lambda keep: -explain_rest(keep), -first, high)
    ranks = share * lowest + (1 - share) * highest
    return (ranks / patches.num_patches).unflatten(1, patches.shape)


def removal_order(explain: Callable[[Tensor], Tensor], first: Tensor, steps: int) -> Tensor:
    """Remove the patches of lowest scores in equal steps; each but the first step has new scores of the rest.

    Args:
        explain: function from visible patches, boolean (B, N) → scores of the patches (B, N).
        first: the scores while all patches are visible, (B, N).
        steps: number of steps J; ⌊j·N / J⌋ patches have left after step j.

    Returns:
        How many patches left before each patch, (B, N). Of equal scores of a step, the lower patch number leaves first.

    >>> removal_order(lambda keep: torch.tensor([[9, 9, 2, 1]]), torch.tensor([[1, 2, 3, 4]]), steps=2)
    tensor([[0, 1, 3, 2]])
    """
    keep = torch.ones_like(first, dtype=torch.bool)
    places = torch.zeros_like(first, dtype=torch.long)
    scores = first.float()
    for start, end in pairwise(level_sizes(first.shape[1], steps + 1).tolist()):
        scores = explain(keep).float() if start else scores
        leaving = scores.masked_fill(~keep, torch.inf).argsort(dim=1, stable=True)[:, : end - start]
        places.scatter_(1, leaving, torch.arange(start, end, device=first.device).expand_as(leaving))
        keep = keep.scatter(1, leaving, False)
    return places


@checks_choices
def hide_patches(images: Tensor, keep: Tensor, target: TargetModel, grid: PatchGrid, removal: Removal) -> Tensor:
    """Hide patches of uint8 or uint16 images (B, C, H, W) except those of `keep`, boolean (B, N): uint16 images.

    Visible pixels stay what they are, because 65535 is 257 · 255.
    """
    white = WHITE[torch.uint16]
    pixels = images.int() * (white // WHITE[images.dtype])
    fill = (white * target.mean).round().int() if removal == "zero" else 0
    return mask_pixels(pixels, keep, grid, fill).to(torch.uint16)


class Again:
    """An explainer that explains again in a number of passes, see `explain_again` and `split_passes`.

    Args:
        explainer: explains classes, or functionals.
        target: the model to explain.
        grid: the patches.
        passes: number of explanations of each image, see `check_explanations`.
        removal: what replaces patches, `zero` or `black`.
    """

    signed = False

    @checks_choices
    def __init__(
        self, explainer: Any, target: TargetModel, grid: PatchGrid, passes: int, removal: Removal = "zero"
    ) -> None:
        self.explainer = explainer
        self.target = target
        self.grid = grid
        self.passes = passes
        self.removal = removal
        self.forward_passes = passes * getattr(explainer, "forward_passes", 1)

    def __call__(self, images: Tensor, classes: Tensor) -> Tensor:
        """Explain one class (B,) of each image (B, C, H, W): heatmaps (B, rows, columns)."""
        return self._again(images, classes)

    def explain(self, images: Tensor, functionals: Tensor) -> Tensor:
        """Explain functionals (B, D), or (B, V, D), each along its own path: (B, rows, columns), (B, V, ...)."""
        if functionals.dim() == 2:
            return self._again(images, functionals=functionals)
        repeated = images.repeat_interleave(functionals.shape[1], 0)
        return self._again(repeated, functionals=functionals.flatten(0, 1)).unflatten(0, functionals.shape[:2])

    def _again(self, images: Tensor, classes: Tensor | None = None, functionals: Tensor | None = None) -> Tensor:
        settings: dict[str, Any] = {"functionals": functionals, "target": self.target, "grid": self.grid}
        return explain_again(self.explainer, images, classes, *split_passes(self.passes), self.removal, **settings)


def split_passes(passes: int) -> tuple[int, int]:
    """The explanations of the low and of the high order, which share the first: half each, the odd one to the low.

    >>> split_passes(13), split_passes(2), split_passes(4)
    ((7, 7), (2, 1), (3, 2))
    """
    return passes // 2 + 1, (passes + 1) // 2


@checks_choices
def check_seen(removal: Removal) -> None:
    """Raise an InputError for a removal that leaves no whole image to explain."""
    if removal not in ("zero", "black"):
        raise InputError(
            f"expected removal=zero or black, because explainers take whole images, got removal={removal}: take the"
            " order of removal=zero, or refine with fit=ranking"
        )


def _bind(
    explainer: Any, images: Tensor, target: TargetModel, classes: Tensor | None, functionals: Tensor | None
) -> Callable[[Tensor], Any]:
    """The explainer as a function of images alone, of classes or functionals that are those of the whole images."""
    check_explainer(explainer)
    if functionals is None:
        chosen = target(images).argmax(-1) if classes is None else classes
        return lambda seen: explainer(seen, chosen)
    if classes is not None:
        raise InputError("expected classes or functionals, got both: leave out one of them")
    check_functionals(functionals, images, target.embed_dim)
    check_explains_functionals(explainer)
    return lambda seen: explainer.explain(seen, functionals)

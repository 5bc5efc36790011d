"""What is measured of explainers of one target, on the same images, classes and perturbations, and how."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from explainers.errors import InputError, check_choices, check_positive, check_range
from explainers.masking import PatchGrid, Removal, level_sizes
from explainers.metrics.agreement import Agreement
from explainers.metrics.curves import Curve
from explainers.metrics.localization import Localized

ProbeName = Literal["saco", "max_sensitivity", "randomisation", "road", "average_drop", "average_increase", "arcc"]
"""Name of a probe, see `probes.PROBES`."""

Order = Literal["patches", "pixels", "saliency"]
"""What is removed in the order of a heatmap. For `pixels`, it is scaled up to the image by bilinear interpolation;
`saliency` is the order of a method's own saliency map of pixels, or that of `pixels` for a method without one."""


@dataclass(frozen=True)
class Evaluation:
    """What is measured of every explainer, and how.

    With several removals, the numbers of the first are named after their curves; those of the others are suffixed with
    the removal, such as `fidelity_plus_black`.

    Args:
        grid: the patches that are explained and removed.
        curves: names of `CURVES`, all computed from one sweep; an empty list leaves the sweep out.
        levels: number of sparsities on the curves, including 0 and `until`; at least 2.
        until: the largest sparsity on the curves, see `PerturbationCurves`.
        removals: what replaces removed patches, see `Removal`; one sweep for each.
        order: remove `patches`, `pixels`, or pixels in the order of `saliency` maps, see `Order`.
        empty: whether the areas include the level at which nothing is visible, see `PerturbationCurves`.
        probes: checks that need further passes, see `PROBES`; they use the first removal, of patches.
        localization: metrics of the objects' locations, see `LOCALIZATIONS`; left out where the data set has none.
        classes: explain the `predicted` class of each image, or its `label`.
        reference: name of the explainer that the others are compared with; `None` compares with none.
        agreement: metrics of the comparison; `e_rmse` requires that all explainers have the same units.
        k: K of `iou`, which is IoU@K; at most the number of patches.
        chunk_size: maximum number of masked images in memory.
    """

    grid: PatchGrid = PatchGrid()
    curves: Sequence[Curve] = ("fidelity_plus", "fidelity_minus", "relevance_gain")
    levels: int = 21
    until: float = 1.0
    removals: Sequence[Removal] = ("zero",)
    order: Order = "patches"
    empty: bool = True
    probes: Sequence[ProbeName] = ()
    localization: Sequence[Localized] = ("pointing_game",)
    classes: Literal["predicted", "label"] = "predicted"
    reference: str | None = None
    agreement: Sequence[Agreement] = ("rank_correlation",)
    k: int = 10
    chunk_size: int = 256

    def __post_init__(self) -> None:
        check_choices(vars(self), get_type_hints(Evaluation))
        level_sizes(self.grid.num_patches, self.levels, self.until)  # checks both
        check_positive(chunk_size=self.chunk_size)
        if "iou" in self.agreement:
            check_range(1, self.grid.num_patches, k=self.k)
        if not self.removals:
            raise InputError("expected removals, one or more, such as [zero, black], got none")

    @property
    def removed(self) -> PatchGrid:
        """The grid of what is removed: patches, or pixels."""
        return self.grid if self.order == "patches" else PatchGrid(self.grid.size, patch_size=1)

    def identity(self) -> dict[str, Any]:
        """The settings that numbers of one name depend on; results are comparable only if all of these are equal."""
        compared: dict[str, Any] = {} if self.reference is None else {"reference": self.reference}
        return {
            "image_size": list(self.grid.size),
            "patches": list(self.grid.shape),
            "removals": list(self.removals),
            "order": self.order,
            "levels": self.levels,
            "until": self.until,
            "empty": self.empty,
            "probes": list(self.probes),
            "classes": self.classes,
            **compared,
        }

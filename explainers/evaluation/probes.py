"""Probes of explainers: further masked images, noise in the image, faded images, and a target with random weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from explainers.errors import InputError
from explainers.masking import PatchGrid, Removal
from explainers.metrics.confidence import ARCC, ROAD, AverageDrop, AverageIncrease, fade, road_masks, unit_masks
from explainers.metrics.saco import SaCo, group_saliences, salience_groups
from explainers.metrics.sanity import MaxSensitivity, Randomisation, max_sensitivity, random_weights, replace_weights
from explainers.models import TargetModel
from explainers.models.removal import check_removal, masked_scores
from explainers.models.scores import check_probabilities

ProbeName = Literal["saco", "max_sensitivity", "randomisation", "road", "average_drop", "average_increase", "arcc"]

GROUPS, DRAWS = 10, 4
"""Groups of SaCo; noisy images of max-sensitivity."""


@dataclass(frozen=True)
class Given:
    """A batch with the heatmaps of one explainer; what several probes need of it is computed once.

    Args:
        target: the model that is explained.
        grid: the patches of the heatmaps.
        removal: what replaces the patches that `saco` removes.
        chunk_size: maximum number of masked images in memory.
        batch: the `image`s and their `index`, as in `Measurement.update`; the images `normalised` for the target, the
            explained `classes` and their `scores`.
        heatmaps: (B, rows, columns).
        explain: function of uint8 images and classes → heatmaps; `None` for an explainer that reads a cache, which
            holds neither noisy or faded images nor heatmaps of random weights.
    """

    target: TargetModel
    grid: PatchGrid
    removal: Removal
    chunk_size: int
    batch: Mapping[str, Tensor]
    heatmaps: Tensor
    explain: Callable[[Tensor, Tensor], Tensor] | None

    def __getitem__(self, key: str) -> Tensor:
        return self.batch[key]

    def masked_scores(self, keep: Tensor, removal: Removal) -> Tensor:
        """Scores of the classes, such as their probabilities, under masks (B, M, N): (B, M)."""
        given = self["normalised"], self["classes"], keep, self.grid, removal, self.chunk_size
        return masked_scores(self.target, *given)

    @cached_property
    def masks(self) -> Tensor:
        """The heatmaps at the pixels, from 0 to 1, (B, H, W)."""
        return unit_masks(self.heatmaps, self.grid.size)

    @cached_property
    def faded(self) -> Tensor:
        """Scores of the images times their masks, (B,)."""
        scores = self.target.score_images(self["normalised"] * self.masks[:, None])
        return scores.take_along_dim(self["classes"][:, None], 1)[:, 0]

    @cached_property
    def imputed(self) -> Tensor:
        """Scores under the masks of ROAD, (B, 18)."""
        return self.masked_scores(road_masks(self.heatmaps.flatten(1), self["index"]), "noisy_linear")


class Probe:
    """Base class of probes: computes what its metric is updated with.

    `passes` names the masked images of each image and explainer; probes with a name in common share them.
    `explanations` counts further explanations of each image by each explainer. A target that does not fit is refused.
    """

    name: ProbeName
    metric: Any
    passes: Mapping[str, int] = MappingProxyType({})
    explanations = 0

    def __init__(self, target: TargetModel, grid: PatchGrid, removal: Removal) -> None:
        pass

    def __call__(self, given: Given) -> tuple[Tensor, ...] | None:
        """The arguments of `metric.update`; `None` if the explainer cannot be measured."""
        raise NotImplementedError


class SaCoProbe(Probe):
    """Removes groups of patches."""

    name, metric = "saco", SaCo
    passes = MappingProxyType({"groups": GROUPS})

    def __init__(self, target: TargetModel, grid: PatchGrid, removal: Removal) -> None:
        check_removal(target, removal)
        if grid.num_patches < GROUPS:
            raise InputError(
                f"probes=saco needs {GROUPS} patches or more, got {grid.num_patches}: leave it out, or take a"
                " smaller grid.patch_size"
            )

    def __call__(self, given: Given) -> tuple[Tensor, ...]:
        scores = given.heatmaps.flatten(1)
        keep = salience_groups(scores, given["index"], GROUPS)
        drops = given["scores"][:, None] - given.masked_scores(keep, given.removal)
        return drops, group_saliences(scores, keep)


class MaxSensitivityProbe(Probe):
    """Explains noisy images."""

    name, metric, explanations = "max_sensitivity", MaxSensitivity, DRAWS

    def __call__(self, given: Given) -> tuple[Tensor, ...] | None:
        if given.explain is None:
            return None
        noisy = given["image"], given["classes"], given["index"], given.heatmaps, DRAWS
        return (max_sensitivity(given.explain, *noisy),)


class RandomisationProbe(Probe):
    """Explains the target with random weights."""

    name, metric, explanations = "randomisation", Randomisation, 1

    def __init__(self, target: TargetModel, grid: PatchGrid, removal: Removal) -> None:
        if target.training:  # then explainers have copies, see `TargetModel.in_eval_mode`
            raise InputError("probes=randomisation needs the target that explainers read: call target.eval() first")
        self.weights = random_weights(target)

    def __call__(self, given: Given) -> tuple[Tensor, ...] | None:
        if given.explain is None:
            return None
        with replace_weights(given.target, self.weights):
            return given.heatmaps, given.explain(given["image"], given["classes"])


class ROADProbe(Probe):
    """Imputes patches."""

    name, metric = "road", ROAD
    passes = MappingProxyType({"imputed": 18})

    def __call__(self, given: Given) -> tuple[Tensor, ...]:
        return (given.imputed,)


class ConfidenceProbe(Probe):
    """Base class of probes that compare probabilities."""

    def __init__(self, target: TargetModel, grid: PatchGrid, removal: Removal) -> None:
        check_probabilities(target, f"probes={self.name}", "leave it out, or take road")


class AverageDropProbe(ConfidenceProbe):
    """Multiplies images with their heatmaps."""

    name: ProbeName = "average_drop"
    metric: Any = AverageDrop
    passes = MappingProxyType({"faded": 1})

    def __call__(self, given: Given) -> tuple[Tensor, ...]:
        return given["scores"], given.faded


class AverageIncreaseProbe(AverageDropProbe):
    """Multiplies images with their heatmaps."""

    name, metric = "average_increase", AverageIncrease


class ARCCProbe(ConfidenceProbe):
    """Imputes patches, and explains images that their heatmaps fade."""

    name, metric, explanations = "arcc", ARCC, 1
    passes = ROADProbe.passes

    def __call__(self, given: Given) -> tuple[Tensor, ...] | None:
        if given.explain is None:
            return None
        faded = fade(given["image"], given.masks, given.target.mean)
        again = given.explain(faded, given["classes"])
        return given.masks, unit_masks(again, given.grid.size), given.imputed


PROBES: dict[ProbeName, type[Probe]] = {
    probe.name: probe
    for probe in (
        *(SaCoProbe, MaxSensitivityProbe, RandomisationProbe, ROADProbe),
        *(AverageDropProbe, AverageIncreaseProbe, ARCCProbe),
    )
}

"""Probes of explainers: further masked images, noise in the image, faded images, and a target with random weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from torch import Tensor

from explainers.errors import InputError
from explainers.evaluation.evaluation import Evaluation, ProbeName
from explainers.masking import Removal
from explainers.metrics.confidence import arcc, average_drop, fade, road, road_masks, unit_masks
from explainers.metrics.saco import group_saliences, saco, salience_groups
from explainers.metrics.sanity import max_sensitivity, random_weights, randomisation, replace_weights
from explainers.models import TargetModel
from explainers.models.removal import check_removal, masked_scores
from explainers.models.scores import check_probabilities

GROUPS, DRAWS = 10, 4
"""Groups of SaCo; noisy images of max-sensitivity."""


@dataclass(frozen=True)
class Given:
    """A batch with the heatmaps of one explainer; what several probes need of it is computed once.

    Args:
        target: the model that is explained.
        settings: grid, removals and chunk size.
        batch: the `image`s and their `index`, as in `Measurement.update`; the images `normalised` for the target, the
            explained `classes` and their `scores`.
        heatmaps: (B, rows, columns).
        explain: function of uint8 images and classes → heatmaps; `None` for an explainer that reads a cache, which
            holds neither noisy or faded images nor heatmaps of random weights.
    """

    target: TargetModel
    settings: Evaluation
    batch: Mapping[str, Tensor]
    heatmaps: Tensor
    explain: Callable[[Tensor, Tensor], Tensor] | None

    def __getitem__(self, key: str) -> Tensor:
        return self.batch[key]

    def masked_scores(self, keep: Tensor, removal: Removal) -> Tensor:
        """Scores of the classes, such as their probabilities, under masks (B, M, N): (B, M)."""
        masks = keep, self.settings.grid, removal, self.settings.chunk_size
        return masked_scores(self.target, self["normalised"], self["classes"], *masks)

    @cached_property
    def masks(self) -> Tensor:
        """The heatmaps at the pixels, from 0 to 1, (B, H, W)."""
        return unit_masks(self.heatmaps, self.settings.grid.size)

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
    """Base class of probes: computes one number of each image, whose mean over images has the title `column`.

    `passes` names the masked images of each image and explainer; probes with a name in common share them.
    `explanations` counts further explanations of each image by each explainer. A target that does not fit is refused.
    """

    column: str
    passes: Mapping[str, int] = MappingProxyType({})
    explanations = 0

    def __init__(self, target: TargetModel, settings: Evaluation) -> None:
        pass

    def __call__(self, given: Given) -> Tensor | None:
        """The numbers, (B,), NaN for an image without one; `None` if the explainer cannot be measured."""
        raise NotImplementedError


class SaCo(Probe):
    """Whether groups of patches matter in proportion to their salience, see `saco`."""

    column, passes = "SaCo ↑", MappingProxyType({"groups": GROUPS})

    def __init__(self, target: TargetModel, settings: Evaluation) -> None:
        check_removal(target, settings.removals[0])
        if settings.grid.num_patches < GROUPS:
            raise InputError(
                f"probes=saco needs {GROUPS} patches or more, got {settings.grid.num_patches}: leave it out, or take a"
                " smaller grid.patch_size"
            )

    def __call__(self, given: Given) -> Tensor:
        scores = given.heatmaps.flatten(1)
        keep = salience_groups(scores, given["index"], GROUPS)
        drops = given["scores"][:, None] - given.masked_scores(keep, given.settings.removals[0])
        return saco(drops, group_saliences(scores, keep))


class MaxSensitivity(Probe):
    """The largest change of a heatmap under noise in the image, see `max_sensitivity`."""

    column, explanations = "Max-sensitivity ↓", DRAWS

    def __call__(self, given: Given) -> Tensor | None:
        if given.explain is None:
            return None
        noisy = given["image"], given["classes"], given["index"], given.heatmaps, DRAWS
        return max_sensitivity(given.explain, *noisy)


class Randomisation(Probe):
    """The rank correlation with heatmaps of a target with random weights, see `randomisation`."""

    column, explanations = "ρ after randomisation ↓", 1

    def __init__(self, target: TargetModel, settings: Evaluation) -> None:
        if target.training:  # then explainers have copies, see `TargetModel.in_eval_mode`
            raise InputError("probes=randomisation needs the target that explainers read: call target.eval() first")
        self.weights = random_weights(target)

    def __call__(self, given: Given) -> Tensor | None:
        if given.explain is None:
            return None
        with replace_weights(given.target, self.weights):
            return randomisation(given.heatmaps, given.explain(given["image"], given["classes"]))


class ROAD(Probe):
    """How much more the least important patches can be imputed than the most important ones, see `road`."""

    column, passes = "ROAD ↑", MappingProxyType({"imputed": 18})

    def __call__(self, given: Given) -> Tensor:
        return road(given.imputed)


class AverageDrop(Probe):
    """The share of the confidence that an image loses when its heatmap masks it, see `average_drop`."""

    column, passes = "Average drop ↓", MappingProxyType({"faded": 1})

    def __init__(self, target: TargetModel, settings: Evaluation) -> None:
        check_probabilities(target, "probes=average_drop", "leave it out, or take road")

    def __call__(self, given: Given) -> Tensor:
        return average_drop(given["scores"], given.faded)


class AverageIncrease(Probe):
    """Whether the confidence rises when its heatmap masks the image (Grad-CAM++, Section 5.1.2)."""

    column, passes = "Average increase ↑", AverageDrop.passes

    def __init__(self, target: TargetModel, settings: Evaluation) -> None:
        check_probabilities(target, "probes=average_increase", "leave it out, or take road")

    def __call__(self, given: Given) -> Tensor:
        return (given.faded > given["scores"]).double()


class ARCC(Probe):
    """Coherency, complexity and ROAD in one number, see `arcc`."""

    column, passes, explanations = "ARCC ↑", ROAD.passes, 1

    def __init__(self, target: TargetModel, settings: Evaluation) -> None:
        check_probabilities(target, "probes=arcc", "leave it out, or take road")

    def __call__(self, given: Given) -> Tensor | None:
        if given.explain is None:
            return None
        faded = fade(given["image"], given.masks, given.target.mean)
        again = given.explain(faded, given["classes"])
        return arcc(given.masks, unit_masks(again, given.settings.grid.size), given.imputed)


PROBES: dict[ProbeName, type[Probe]] = {
    "saco": SaCo,
    "max_sensitivity": MaxSensitivity,
    "randomisation": Randomisation,
    "road": ROAD,
    "average_drop": AverageDrop,
    "average_increase": AverageIncrease,
    "arcc": ARCC,
}

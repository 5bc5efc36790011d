"""Checks of explainers that need forward passes besides those of the perturbation sweep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from explainers import Explainer
from explainers.errors import check_range, checks_choices
from explainers.evaluation.sweep import Sweep
from explainers.metrics.additivity import Infidelity, SensitivityN, sized_coalitions, subset_sizes
from explainers.metrics.saco import SaCo, group_saliences, salience_groups
from explainers.metrics.sanity import MaxSensitivity, Randomisation, max_sensitivity, random_weights, replaced

Probe = Literal["saco", "sensitivity_n", "infidelity", "max_sensitivity", "randomisation"]

GROUPS, SUBSETS, DRAWS = 10, 20, 4
"""Groups of SaCo; removed subsets of each of five sizes; noisy images of max-sensitivity."""

PROBES: dict[str, Any] = {
    "saco": SaCo,
    "sensitivity_n": SensitivityN,
    "infidelity": Infidelity,
    "max_sensitivity": MaxSensitivity,
    "randomisation": Randomisation,
}
"""Name → metric, whose `column` is the title of its column."""


@dataclass(frozen=True)
class ExplainedBatch:
    """Images whose classes are explained.

    Args:
        images: uint8, (B, C, H, W).
        normalised: the same for the target, (B, C, H, W).
        index: index of each image in the data set, (B,).
        classes: the explained classes, (B,).
        probabilities: their probabilities, (B,).
    """

    images: Tensor
    normalised: Tensor
    index: Tensor
    classes: Tensor
    probabilities: Tensor


class Probes:
    """Measures explainers by further masked images, by noise in the image, and by a target with random weights.

    Args:
        names: what to measure.
        sweep: a sweep of patches, which masks the images.
    """

    @checks_choices
    def __init__(self, names: Sequence[Probe], sweep: Sweep) -> None:
        self.names = tuple(names)
        self.sweep = sweep
        self.shares = bool({"sensitivity_n", "infidelity"} & set(names))
        if names:
            check_range(GROUPS, patches=sweep.grid.num_patches)
        self.weights = random_weights(sweep.target) if "randomisation" in names else {}

    @property
    def forward_passes(self) -> tuple[int, int]:
        """Masked images for each image: shared by all explainers, and for each explainer."""
        return 5 * SUBSETS * self.shares, GROUPS * ("saco" in self.names)

    @property
    def explanations(self) -> int:
        """Number of further explanations of each image by each explainer."""
        return DRAWS * ("max_sensitivity" in self.names) + ("randomisation" in self.names)

    def subsets(self, given: ExplainedBatch) -> tuple[Tensor, Tensor] | None:
        """Random subsets of patches, which all explainers share, and the drops that their removal causes.

        Returns:
            The visible patches, boolean (B, M, N), and the drops, (B, M); `None` if no measurement needs them.
        """
        if not self.shares:
            return None
        num_patches = self.sweep.grid.num_patches
        keep = sized_coalitions(given.index, num_patches, subset_sizes(num_patches), SUBSETS)
        return keep, self._drops(given, keep)

    def update(
        self,
        metrics: Mapping[str, Any],
        explainer: Explainer,
        heatmaps: Tensor,
        given: ExplainedBatch,
        subsets: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Update the metrics of one explainer.

        Explainers that read a cache are left out of `max_sensitivity` and `randomisation`: the cache holds neither
        noisy images nor heatmaps of random weights.
        """
        scores = heatmaps.flatten(1)
        cached = not getattr(explainer, "timed", True)
        if "saco" in self.names:
            keep = salience_groups(scores, given.index, GROUPS)
            metrics["saco"].update(self._drops(given, keep), group_saliences(scores, keep))
        if subsets is not None:
            for name in {"sensitivity_n", "infidelity"} & set(self.names):
                metrics[name].update(heatmaps, *subsets)
        if "max_sensitivity" in self.names and not cached:
            changes = max_sensitivity(explainer, given.images, given.classes, given.index, heatmaps, DRAWS)
            metrics["max_sensitivity"].update(changes)
        if "randomisation" in self.names and not cached:
            with replaced(self.sweep.target, self.weights):
                metrics["randomisation"].update(heatmaps, explainer(given.images, given.classes))

    def _drops(self, given: ExplainedBatch, keep: Tensor) -> Tensor:
        """Drops of the probability of the class under masks (B, M, N): (B, M)."""
        with torch.no_grad():
            probabilities = self.sweep.logits(given.normalised, keep).softmax(-1)  # (B, M, K)
        classes = given.classes[:, None, None].expand(-1, keep.shape[1], 1)
        return given.probabilities[:, None] - probabilities.gather(-1, classes).squeeze(-1)

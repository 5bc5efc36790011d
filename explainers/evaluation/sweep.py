"""What is done to images and target to measure explainers: the perturbation sweep, and probes with further passes."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from explainers import Details, Explainer
from explainers.errors import InputError, check_positive, check_range, checks_choices
from explainers.evaluation.passes import fit_heatmaps
from explainers.masking import PatchGrid, Removal
from explainers.metrics.confidence import (
    ARCC,
    ROAD,
    AverageDrop,
    AverageIncrease,
    Confidence,
    fade,
    road_masks,
    unit_masks,
)
from explainers.metrics.perturbation import importance_order, inner_levels, perturbation_sweep
from explainers.metrics.saco import SaCo, group_saliences, salience_groups
from explainers.metrics.sanity import MaxSensitivity, Randomisation, max_sensitivity, random_weights, replace_weights
from explainers.models import TargetModel
from explainers.models.removal import check_removal, masked_outputs, masked_scores
from explainers.models.scores import check_probabilities

Order = Literal["patches", "pixels", "saliency"]
"""What is removed in the order of a heatmap. For `pixels`, it is scaled up to the image by bilinear interpolation;
`saliency` is the order of a method's own saliency map of pixels, or that of `pixels` for a method without one."""


@checks_choices
def rank_patches(explanation: Details, order: Order) -> Tensor:
    """The map that is ranked and compared with objects: for `saliency` (B, H, W), if any, or (B, rows, columns)."""
    return explanation.heatmaps if order != "saliency" or explanation.pixels is None else explanation.pixels


def bilinear(heatmaps: Tensor, size: tuple[int, int]) -> Tensor:
    """Scale heatmaps (B, rows, columns) up to pixels (B, H, W), `size`, by bilinear interpolation.

    Pixels between patches of equal scores get exactly this score, so they stay ties and are removed in random order.
    The rounded weights of `F.interpolate` would order them.

    >>> bilinear(torch.tensor([[[0.0, 8.0], [0.0, 8.0]]]), size=(4, 4))[0, :2].tolist()
    [[0.0, 2.0, 6.0, 8.0], [0.0, 2.0, 6.0, 8.0]]
    """
    for dim, pixels in enumerate(size, 1):
        side = heatmaps.shape[dim]
        position = ((torch.arange(pixels, dtype=torch.double) + 0.5) * side / pixels - 0.5).clamp(0, side - 1)
        low = position.long()
        weight = (position - low).to(heatmaps).view(-1, 1) if dim == 1 else (position - low).to(heatmaps)
        low, high = (each.to(heatmaps.device) for each in (low, (low + 1).clamp(max=side - 1)))
        heatmaps = heatmaps.index_select(dim, low).lerp(heatmaps.index_select(dim, high), weight)
    return heatmaps


class Sweep:
    """Removes the patches or pixels of images in the order of heatmaps, and records the outputs of the target.

    Args:
        target: the model to perturb.
        grid: the patches that heatmaps are of.
        removal: what replaces removed patches, see `Removal`.
        levels: number of sparsities, including 0 and `until`; at least 2.
        order: remove patches, or pixels, see `Order`.
        chunk_size: maximum number of masked images in memory.
        sides: whether to compute the removed and the preserved side, see `find_needed_sides`.
        until: the largest sparsity, at most 1.

    Raises:
        InputError: if the target does not support this removal, or the removal is of patches only.
    """

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        removal: Removal = "zero",
        levels: int = 21,
        order: Order = "patches",
        chunk_size: int = 256,
        sides: tuple[bool, bool] = (True, True),
        until: float = 1.0,
    ) -> None:
        check_removal(target, removal)
        check_range(2, levels=levels)
        check_positive(chunk_size=chunk_size)
        if removal == "drop" and order != "patches":
            raise InputError(f"expected order=patches with removal drop, got {order}: a dropped token is a whole patch")
        self.target = target
        self.removal = removal
        self.levels = levels
        self.order = order
        self.chunk_size = chunk_size
        self.grid = grid if order == "patches" else PatchGrid(grid.size, patch_size=1)
        self.patches = grid
        self.sides = sides
        self.until = until

    @property
    def forward_passes(self) -> int:
        """Masked forward passes for each image and explainer."""
        return sum(self.sides) * inner_levels(self.levels, self.until)

    def logits(self, normalised: Tensor, keep: Tensor) -> Tensor:
        """Logits of normalised images (B, C, H, W) under masks (B, M, N) of patches, or of this sweep's pixels."""
        grid = self.grid if keep.shape[-1] == self.grid.num_patches else self.patches
        return masked_outputs(self.target, self.target.classify, normalised, keep, grid, self.removal, self.chunk_size)

    def empty(self, normalised: Tensor) -> Tensor:
        """Logits of an image without any patch, (1, K), which are the same for all images."""
        hidden = torch.zeros(1, 1, self.patches.num_patches, dtype=torch.bool, device=normalised.device)
        return self.logits(normalised[:1], hidden)[0]

    def __call__(
        self, normalised: Tensor, heatmaps: Tensor, index: Tensor, classes: Tensor, labels: Tensor, whole: Tensor
    ) -> Tensor:
        """The `perturbation_sweep` of images.

        Args:
            normalised: images, (B, C, H, W).
            heatmaps: what is `rank_patches`; of equal scores, see `importance_order`.
            index: index of each image in the data set, (B,).
            classes: the explained class of each image, (B,).
            labels: the label of each image, (B,), −1 if it is unknown.
            whole: logits of the images and of an empty one, (B, 2, K).
        """
        scores = heatmaps.float()
        if self.order != "patches" and scores.shape[1:] != self.grid.size:
            scores = bilinear(scores, self.grid.size)
        order = importance_order(scores.flatten(1), index)
        settings = self.levels, labels, whole, self.sides, self.until, self.target.score
        return perturbation_sweep(lambda keep: self.logits(normalised, keep), order, classes, *settings)


Probe = Literal["saco", "max_sensitivity", "randomisation", Confidence]

GROUPS, DRAWS = 10, 4
"""Groups of SaCo; noisy images of max-sensitivity."""

PROBES: dict[str, Any] = {
    "saco": SaCo,
    "max_sensitivity": MaxSensitivity,
    "randomisation": Randomisation,
    "road": ROAD,
    "average_drop": AverageDrop,
    "average_increase": AverageIncrease,
    "arcc": ARCC,
}
"""Name → metric, whose `column` is the title of its column."""


class Probes:
    """Measures explainers by further masked images, by noise in the image, and by a target with random weights.

    A batch is `given` as in `Measurement.update`, and has the images `normalised` for the target, the explained
    `classes` and their `scores`.

    Args:
        names: what to measure.
        sweep: a sweep of patches, which masks the images.
    """

    @checks_choices
    def __init__(self, names: Sequence[Probe], sweep: Sweep) -> None:
        self.names = tuple(names)
        self.sweep = sweep
        self.imputes = bool({"road", "arcc"} & set(names))
        self.fades = [name for name in self.names if name in ("average_drop", "average_increase")]
        for name in (*self.fades, *{"arcc"} & set(names)):
            check_probabilities(sweep.target, f"probes={name}", "leave it out, or take road")
        if "saco" in names and sweep.grid.num_patches < GROUPS:
            raise InputError(
                f"probes=saco needs {GROUPS} patches or more, got {sweep.grid.num_patches}: leave it out, or take a"
                " smaller grid.patch_size"
            )
        self.weights = random_weights(sweep.target) if "randomisation" in names else {}

    @property
    def forward_passes(self) -> int:
        """Masked images for each image and explainer."""
        return GROUPS * ("saco" in self.names) + 18 * self.imputes + bool(self.fades)

    @property
    def explanations(self) -> int:
        """Number of further explanations of each image by each explainer."""
        return DRAWS * ("max_sensitivity" in self.names) + sum(name in self.names for name in ("randomisation", "arcc"))

    def update(
        self,
        metrics: Mapping[str, Any],
        explainer: Explainer,
        heatmaps: Tensor,
        given: Mapping[str, Tensor],
    ) -> None:
        """Update the metrics of one explainer.

        Explainers that read a cache are left out of `max_sensitivity`, `randomisation` and `arcc`: the cache holds
        neither noisy or faded images nor heatmaps of random weights.
        """

        def again(images: Tensor, classes: Tensor) -> Tensor:
            return fit_heatmaps(explainer(images, classes), images, self.sweep.patches, "an explainer")

        scores = heatmaps.flatten(1)
        cached = not getattr(explainer, "timed", True)
        if "saco" in self.names:
            keep = salience_groups(scores, given["index"], GROUPS)
            metrics["saco"].update(self._drops(given, keep), group_saliences(scores, keep))
        if "max_sensitivity" in self.names and not cached:
            changes = max_sensitivity(again, given["image"], given["classes"], given["index"], heatmaps, DRAWS)
            metrics["max_sensitivity"].update(changes)
        if "randomisation" in self.names and not cached:
            with replace_weights(self.sweep.target, self.weights):
                metrics["randomisation"].update(heatmaps, again(given["image"], given["classes"]))
        if self.fades or self.imputes:
            self._update_confidence(metrics, None if cached else again, heatmaps, given)

    @torch.no_grad()
    def _update_confidence(
        self, metrics: Mapping[str, Any], explainer: Explainer | None, heatmaps: Tensor, given: Mapping[str, Tensor]
    ) -> None:
        """Update the metrics of `Confidence`, ARCC only with an explainer, which explains faded images."""
        target, grid, images, classes = self.sweep.target, self.sweep.patches, given["normalised"], given["classes"]
        masks = unit_masks(heatmaps, grid.size)
        if self.fades:
            faded = target.score_images(images * masks[:, None]).take_along_dim(classes[:, None], 1)[:, 0]
            for name in self.fades:
                metrics[name].update(given["scores"], faded)
        if self.imputes:
            keep = road_masks(heatmaps.flatten(1), given["index"])
            outputs = masked_scores(target, images, classes, keep, grid, "noisy_linear", self.sweep.chunk_size)
            if "road" in self.names:
                metrics["road"].update(outputs)
            if "arcc" in self.names and explainer is not None:
                again = explainer(fade(given["image"], masks, target.mean), classes)
                metrics["arcc"].update(masks, unit_masks(again, grid.size), outputs)

    def _drops(self, given: Mapping[str, Tensor], keep: Tensor) -> Tensor:
        """Drops of the score of the class, such as its probability, under masks (B, M, N): (B, M)."""
        with torch.no_grad():
            scores = self.sweep.target.scores(self.sweep.logits(given["normalised"], keep))  # (B, M, K)
        classes = given["classes"][:, None, None].expand(-1, keep.shape[1], 1)
        return given["scores"][:, None] - scores.gather(-1, classes).squeeze(-1)

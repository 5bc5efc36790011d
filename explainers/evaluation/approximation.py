"""How well two coalitions stand for all of them: the numerical study of TVE, Appendix B (Figure 8)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torchmetrics import CatMetric

from explainers.errors import InputError
from explainers.masking import PatchGrid, masked_forward, neighbourhoods
from explainers.metrics.agreement import spearman
from explainers.sampling import random_patches, stream, uniform
from explainers.target import TargetModel


def random_subsets(index: Tensor, patches: Tensor, near: Tensor, count: int, seed: int) -> Tensor:
    """`count` subsets B of Z(x) \\ N(z), uniform: each patch that is not in N(z) is in B with probability 1/2.

    Args:
        index: which image of the data set, (B,).
        patches: which z of each image, (B, Z).
        near: their N(z), boolean (B, Z, N).

    Returns:
        Boolean, (B, Z, count, N).
    """
    num_patches, device = near.shape[-1], near.device
    patch = index[:, None] * num_patches + patches  # (B, Z)
    subset = patch[..., None] * count + torch.arange(count, device=device)  # (B, Z, count)
    counter = subset[..., None] * num_patches + torch.arange(num_patches, device=device)
    return (uniform(counter, seed) < 0.5) & ~near[:, :, None]


@torch.no_grad()
def gains(
    predict: Callable[[Tensor], Tensor],
    images: Tensor,
    classes: Tensor,
    near: Tensor,
    subsets: Tensor,
    grid: PatchGrid,
    chunk_size: int = 256,
) -> tuple[Tensor, Tensor]:
    """What N(z) adds to the log-probability of a class, log f(N(z) ∪ B) − log f(B), for two B or for sampled ones.

    Equation 3 is its mean over B = Z(x) \\ N(z) and B = ∅:

        ½ [log f(Z(x)) − log f(Z(x) \\ N(z)) + log f(N(z)) − log f(∅)]

    Equation 4 leaves out the half and log f(Z(x)) − log f(∅), which are the same for all patches of an image: it ranks
    those alike, but its values do not compare between images.

    Args:
        predict: normalised images (b, C, H, W) → log-probabilities (b, K).
        images: (B, C, H, W), normalised.
        classes: (B,).
        near: N(z) of Z patches of each image, boolean (B, Z, N).
        subsets: S subsets B for each of them, boolean (B, Z, S, N).

    Returns:
        Equation 3, (B, Z), and the terms of Equation 2, (B, Z, S), whose mean estimates it.
    """
    (count, _), size = subsets.shape[1:3], len(images)
    ends = torch.tensor([True, False], device=near.device)[None, :, None].expand(size, -1, near.shape[-1])
    with_near = (subsets | near[:, :, None]).flatten(1, 2)
    keep = torch.cat([ends, near, ~near, subsets.flatten(1, 2), with_near], 1)  # (B, 2 + 2·Z + 2·Z·S, N)
    found = masked_forward(predict, images, keep, grid, chunk_size=chunk_size)  # (B, M, K)
    found = found.gather(-1, classes[:, None, None].expand(-1, keep.shape[1], 1)).squeeze(-1).double()
    sampled = subsets.shape[1] * subsets.shape[2]
    everything, nothing, only_near, without, alone, together = found.split([1, 1, count, count, sampled, sampled], 1)
    return (everything - without + only_near - nothing) / 2, (together - alone).unflatten(1, (count, -1))


class TwoPointStudy(LightningModule):
    """In the place of `Evaluation`: how Equation 3, called `two_point`, and other attributions agree with Equation 2.

    For the predicted class and some patches of each image, `results` holds of each: the `attribution` of every patch;
    `expectation_S`, the mean over its first S subsets; their correlations over all patches, `pearson_S` and
    `spearman_S`; and `within_images_S`, the rank correlation of the patches of one image, averaged over images.

    Args:
        explainers: other attributions to compare, by name; they explain this target on this grid.
        hops: the size of N(z).
        patches: Z, of each image.
        subsets: numbers of sampled subsets, increasing; the smaller ones are the first of the largest.
        seed: of patches and subsets.
    """

    near: Tensor

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        explainers: Mapping[str, nn.Module],
        hops: int = 2,
        patches: int = 16,
        subsets: Sequence[int] = (16, 32),
        chunk_size: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 2 <= patches <= grid.num_patches:
            raise InputError(f"expected 2 to {grid.num_patches} patches of each image to correlate, got {patches}")
        self.target, self.grid = target.eval(), grid
        self.explainers = nn.ModuleDict({name: explainer.eval() for name, explainer in explainers.items()})
        self.hops, self.patches, self.subsets = hops, patches, tuple(subsets)
        self.chunk_size, self.seed = chunk_size, seed
        self.register_buffer("near", neighbourhoods(grid, hops), persistent=False)
        self.found = CatMetric(nan_strategy="disable")  # a row for each image and patch
        self.results: dict[str, dict[str, Any]] = {}
        self.measured: dict[str, float] = {}

    @property
    def columns(self) -> dict[str, str]:
        """The title of every number in `results` that belongs into a table."""
        titles = {"pearson": "r, {} subsets ↑", "spearman": "ρ, {} subsets ↑", "within_images": "ρ within images, {} ↑"}
        return {f"{key}_{count}": title.format(count) for key, title in titles.items() for count in self.subsets}

    @property
    def forward_passes(self) -> dict[str, int]:
        """Forward passes of the target for each image: those of each explainer, and those of the study."""
        explaining = {name: getattr(explainer, "forward_passes", 1) for name, explainer in self.explainers.items()}
        return explaining | {"coalitions": 3 + 2 * self.patches * (1 + max(self.subsets))}

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        normalised, index = self.target.normalise(batch["image"]), batch["index"]
        predicted = self.target.classify(self.target.embed(normalised)).argmax(-1)
        patches = random_patches(index, self.grid.num_patches, self.patches, stream("patches", self.seed, 0))
        near = self.near[patches]  # (B, Z, N)
        subsets = random_subsets(index, patches, near, max(self.subsets), stream("coalitions", self.seed, 0))
        two_point, terms = gains(
            self._log_probabilities, normalised, predicted, near, subsets, self.grid, self.chunk_size
        )
        heatmaps = {name: explainer(batch["image"], predicted) for name, explainer in self.explainers.items()}
        right = (predicted == batch["label"])[:, None].expand_as(patches)
        attributions = [two_point, *(heatmap.flatten(1).gather(1, patches) for heatmap in heatmaps.values())]
        expectations = [terms[..., :count].mean(-1) for count in self.subsets]
        columns = [index[:, None].expand_as(patches), right, *expectations, *attributions]
        self.found.update(torch.stack([column.double() for column in columns], -1))
        return {"heatmaps": heatmaps, "classes": predicted}

    def _log_probabilities(self, normalised: Tensor) -> Tensor:
        return self.target.classify(self.target.embed(normalised)).log_softmax(-1)

    def on_test_epoch_end(self) -> None:
        rows = self.found.compute().reshape(-1, self.patches, 2 + len(self.subsets) + 1 + len(self.explainers))
        rows = rows[rows[:, 0, 0].argsort()]  # in the order of one process
        self.measured = {"accuracy": rows[:, 0, 1].mean().item(), "images": len(rows)}
        expectations = dict(zip(self.subsets, rows[..., 2:].unbind(-1), strict=False))
        attributions = rows[..., 2 + len(self.subsets) :].unbind(-1)
        for name, attribution in zip(("two_point", *self.explainers), attributions, strict=True):
            found: dict[str, Any] = {"images": len(rows), "subsets": list(self.subsets)}
            found["attribution"] = attribution.flatten().tolist()
            for count, expectation in expectations.items():
                found[f"expectation_{count}"] = expectation.flatten().tolist()
                known = {key: value for key, value in correlations(attribution, expectation).items() if value == value}
                found |= {f"{key}_{count}": value for key, value in known.items()}  # NaN: of a constant
            self.results[name] = found

    def identity(self) -> dict[str, Any]:
        """What the results hold for: they compare with others only where all of this is the same."""
        return {
            **self.target.identity(),
            "patches_per_side": self.grid.side,
            "hops": self.hops,
            "patches": self.patches,
            "subsets": list(self.subsets),
            "classes": "predicted",
            **self.measured,
        }


def correlations(first: Tensor, second: Tensor) -> dict[str, float]:
    """Of two attributions of the same patches, (B, Z) each: over all patches, and by rank within images."""
    return {
        "pearson": torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1].item(),
        "spearman": spearman(first.reshape(1, -1), second.reshape(1, -1)).item(),
        "within_images": spearman(first, second).nanmean().item(),
    }

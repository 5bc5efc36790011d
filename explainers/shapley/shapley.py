"""Shapley values learned by least squares: ViT-Shapley (Covert et al., 2022) and FastSHAP (Jethani et al., 2021).

The value v(S) of a coalition S of patches is the vector of the model's class probabilities when only S is visible. Both
methods minimise the same objective; their networks differ (see `networks`).
"""

from typing import Literal

import torch
from torch import Tensor

from explainers.errors import check_positive, checks_choices
from explainers.learned.network_explainer import NetworkBuilder, NetworkExplainer
from explainers.learned.sources import MeanLoss, network_inputs
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.models.fetching import load_target
from explainers.shapley.coalition_values import CoalitionValues
from explainers.shapley.networks import FastSHAPNetwork, LightShapleyNetwork, ViTShapleyNetwork


def make_efficient(phi: Tensor, null: Tensor, grand: Tensor) -> Tensor:
    """The closest φ with Σ_z φ_z = v(all) − v(∅): the additive efficient normalisation of FastSHAP.

    >>> phi, null, grand = torch.tensor([[[1.0], [2.0]]]), torch.tensor([[0.0]]), torch.tensor([[5.0]])
    >>> make_efficient(phi, null, grand).tolist()  # each patch gets half of the missing 2
    [[[2.0], [3.0]]]

    Of attributions φ (B, N, K), v(∅) of no patch and v(all) of all patches, (B, K) each.
    """
    return phi + (grand - null - phi.sum(1))[:, None] / phi.shape[1]


def shapley_loss(phi: Tensor, keep: Tensor, values: Tensor, null: Tensor) -> Tensor:
    """N · E (v(S) − v(∅) − Σ_{z ∈ S} φ_z)², where E is the mean over images, coalitions and classes.

    Of all efficient φ, the Shapley values minimise it (Charnes et al., 1988). The factor N comes from the released
    ViT-Shapley; it keeps the magnitude of the loss when the grid gets finer.

    >>> phi, keep = torch.tensor([[[2.0], [3.0]]]), torch.tensor([[[True, False]]])  # S is the first of two patches
    >>> shapley_loss(phi, keep, values=torch.tensor([[[5.0]]]), null=torch.zeros(1, 1)).item()  # 2 · (5 − 0 − 2)²
    18.0

    The shapes are those of `fit_shapley`.
    """
    with torch.autocast(phi.device.type, enabled=False):  # low precision would lose small terms of the sums
        error = values - null[:, None] - keep.to(phi.dtype) @ phi  # (B, M, K)
    return phi.shape[1] * error.square().mean()


class ShapleyLoss(CoalitionValues, MeanLoss):
    """`shapley_loss` over random coalitions, a loss (see `sources`).

    Args:
        coalitions: number of coalitions of each image in one training step.
    """

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        coalitions: int = 32,
        paired: bool = True,
        chunk_size: int = 256,
        seed: int = 0,
    ) -> None:
        check_positive(coalitions=coalitions)
        super().__init__(target, grid, coalitions, seed, paired, chunk_size)
        self.coalitions = coalitions

    def compute(self, predicted: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """The objective `shapley_loss` of a batch."""
        return shapley_loss(predicted, rows["keep"], rows["values"], rows["null"])


class Shapley(NetworkExplainer):
    """Predicts the Shapley values of every patch for all classes in one forward pass. `ShapleyLoss` trains it.

    Args:
        weights: file of a trained network (see `export`).
        surrogate: the `target.safetensors` of a `Surrogate`, which is then explained instead of the target; `None`
            explains the target's own predictions for masked images.
        normalisation: `additive` applies `make_efficient` to the values in training and inference; `none` does not.
    """

    networks = (FastSHAPNetwork, LightShapleyNetwork, ViTShapleyNetwork)
    serves_every_head = False

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        network: NetworkBuilder,
        weights: str | None = None,
        surrogate: str | None = None,
        normalisation: Literal["additive", "none"] = "additive",
    ) -> None:
        model = target if surrogate is None else load_target(target, surrogate)
        super().__init__(model, grid, network)
        self.normalisation = normalisation
        self.reads = network_inputs(self.target, self.network.blocks)
        if weights is not None:
            self.load(weights)

    def _rows(self, images: Tensor) -> dict[str, Tensor]:
        """What the network reads of the images, and the class probabilities v(∅) and v(all)."""
        rows = super()._rows(images)
        normalised = self.target.normalise(images)
        with torch.no_grad():
            rows["embedding"] = self._embeddings(rows)
            null = self.target.score_images(torch.zeros_like(normalised[:1]))  # a blank image, (1, K)
            return rows | {"null": null, "grand": self.target.scores(self._logits(rows))}

    def predict(self, rows: dict[str, Tensor]) -> Tensor:
        """Predict the Shapley values (B, N, K), in float32 because `make_efficient` sums over all patches."""
        phi = self.network(rows.get("image"), rows.get("embedding"), self._feature_maps(rows)).float()
        return make_efficient(phi, rows["null"], rows["grand"]) if self.normalisation == "additive" else phi

    def _heatmaps(self, predicted: Tensor, rows: dict[str, Tensor], classes: Tensor | None = None) -> Tensor:
        phi = predicted.mT if classes is None else predicted[torch.arange(len(predicted)), :, classes]
        return phi.unflatten(-1, self.grid.shape)

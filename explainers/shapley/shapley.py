"""Shapley values learned by least squares: ViT-Shapley (Covert et al., 2022) and FastSHAP (Jethani et al., 2021).

The value v(S) of a coalition S of patches is the vector of the model's class probabilities when only S is visible. Both
methods minimise the same objective; their networks differ (see `networks`).
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import MeanMetric

from explainers.errors import check_positive, checks_choices
from explainers.masking import PatchGrid
from explainers.saved.identity import Identity, recipe
from explainers.shapley.coalition_values import CoalitionValues
from explainers.shapley.networks import FastSHAPNetwork, LightShapleyNetwork, ViTShapleyNetwork
from explainers.target import TargetModel
from explainers.target.inputs import checked_classes
from explainers.target.storage import load_target
from explainers.training.optimisation import OptimizerBuilder, SchedulerBuilder
from explainers.training.sources import complete, network_inputs
from explainers.training.training_module import NetworkExplainer


def efficient(phi: Tensor, null: Tensor, grand: Tensor) -> Tensor:
    """The closest φ with Σ_z φ_z = v(all) − v(∅): the additive efficient normalisation of FastSHAP.

    >>> phi, null, grand = torch.tensor([[[1.0], [2.0]]]), torch.tensor([[0.0]]), torch.tensor([[5.0]])
    >>> efficient(phi, null, grand).tolist()  # each patch gets half of the missing 2
    [[[2.0], [3.0]]]

    Args:
        phi: attributions, (B, N, K).
        null: v(∅), of no patch, (B, K).
        grand: v(all), of all patches, (B, K).
    """
    return phi + (grand - null - phi.sum(1))[:, None] / phi.shape[1]


def shapley_loss(phi: Tensor, keep: Tensor, values: Tensor, null: Tensor) -> Tensor:
    """N · E (v(S) − v(∅) − Σ_{z ∈ S} φ_z)², where E is the mean over images, coalitions and classes.

    Of all efficient φ, the Shapley values minimise it (Charnes et al., 1988). The factor N comes from the released
    ViT-Shapley; it keeps the magnitude of the loss when the grid gets finer.

    >>> phi, keep = torch.tensor([[[2.0], [3.0]]]), torch.tensor([[[True, False]]])  # S is the first of two patches
    >>> shapley_loss(phi, keep, values=torch.tensor([[[5.0]]]), null=torch.zeros(1, 1)).item()  # 2 · (5 − 0 − 2)²
    18.0

    Args:
        phi: attributions, (B, N, K).
        keep: coalitions S, boolean (B, M, N).
        values: v(S), (B, M, K).
        null: v(∅), of no patch, (B, K).
    """
    with torch.autocast(phi.device.type, enabled=False):  # low precision would lose small terms of the sums
        error = values - null[:, None] - keep.to(phi.dtype) @ phi  # (B, M, K)
    return phi.shape[1] * error.square().mean()


TRAINING = {
    "optimizer": "how the weights were found",
    "scheduler": "how the weights were found",
    "weights": "the start of the training",
    "surrogate": "replaces the target, which is described itself",
    "coalitions": "how many coalitions a step learns from",
    "paired": "draws of the training",
    "min_crop": "augmentation",
    "seed": "draws of the training",
}
"""Arguments of the training, which trained weights do not depend on: they may be used with others."""


class Shapley(NetworkExplainer):
    """Learns to predict the Shapley values of every patch for all classes in one forward pass.

    Args:
        target: the model to explain. It is neither trained nor saved.
        grid: the patches that are explained.
        network: builds the network from the model and the grid.
        optimizer: builds the optimiser from the parameters to train.
        scheduler: builds the schedule from the optimiser and the number of steps.
        weights: file of a trained network (see `export`) to start from.
        surrogate: the `target.safetensors` of a `Surrogate`, which is then explained instead of the target; `None`
            explains the target's own predictions for masked images.
        coalitions: number of coalitions of each image in one training step.
        paired: see `shapley_coalitions`.
        normalisation: `additive` applies `efficient` to the values in training and inference; `none` does not.
        min_crop: area of the smallest random crop of a training image, as a fraction; `None` for whole images.
        chunk_size: maximum number of masked images in memory.
        seed: seed of the draws of coalitions and crops.
    """

    networks = (FastSHAPNetwork, LightShapleyNetwork, ViTShapleyNetwork)

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        network: Callable[[TargetModel, PatchGrid], Any],
        optimizer: OptimizerBuilder | None = None,
        scheduler: SchedulerBuilder | None = None,
        weights: str | None = None,
        surrogate: str | None = None,
        coalitions: int = 32,
        paired: bool = True,
        normalisation: Literal["additive", "none"] = "additive",
        min_crop: float | None = None,
        chunk_size: int = 256,
        seed: int = 0,
    ) -> None:
        check_positive(coalitions=coalitions)
        super().__init__(optimizer, scheduler, min_crop, seed, frozen=("target",))
        model = target if surrogate is None else load_target(target, surrogate)
        target.check_grid(grid)
        self.target, self.grid = model.requires_grad_(False).eval(), grid
        self.network, self.normalisation = network(self.target, grid), normalisation
        self.reads = network_inputs(self.target, self.network.blocks)
        self.sources = (CoalitionValues(self.target, grid, coalitions, seed, paired, chunk_size), self.reads)
        self.val_loss = MeanMetric()
        if weights is not None:
            self.load(weights)

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Explain `classes` (B,), by default the predicted ones, in uint8 images (B, C, H, W): heatmaps (B, P, P)."""
        self.grid.check(images)
        phi, grand = self._explain(images)
        classes = checked_classes(grand.argmax(-1) if classes is None else classes, images, self.target.num_classes)
        return phi[torch.arange(images.shape[0]), :, classes].unflatten(-1, (self.grid.side, -1))

    def all_classes(self, images: Tensor) -> Tensor:
        """Explain every class at once: heatmaps (B, K, P, P)."""
        self.grid.check(images)
        return self._explain(images)[0].mT.unflatten(-1, (self.grid.side, -1))

    def _explain(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The Shapley values (B, N, K), and the class probabilities (B, K) of the whole images."""
        rows = {"image": images} | self.reads({"image": images})
        normalised = self.target.normalise(images)
        with torch.no_grad():
            embeddings = rows["embedding"] if "embedding" in rows else self.target.embed(normalised)
            grand = self.target.classify(embeddings).softmax(-1)
            null = self.target.probabilities(torch.zeros_like(normalised[:1]))  # a blank image, (1, K)
        return self._predict(rows, null, grand), grand

    def _predict(self, rows: dict[str, Tensor], null: Tensor, grand: Tensor) -> Tensor:
        """The Shapley values (B, N, K), in float32 because `efficient` sums over all patches."""
        maps = [rows[f"map_{i}"] for i in range(len(self.network.blocks))]
        phi = self.network(rows.get("image"), rows.get("embedding"), maps).float()
        return efficient(phi, null, grand) if self.normalisation == "additive" else phi

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(complete(self.augmented(batch), self.sources, self.current_epoch))
        self.log("train/loss", loss, batch_size=len(batch["index"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.val_loss.update(self.loss(complete(batch, self.sources)), len(batch["index"]))
        self.log("val/loss", self.val_loss, prog_bar=True)

    def loss(self, rows: dict[str, Tensor]) -> Tensor:
        """The objective `shapley_loss` of a batch with the rows of all `sources`."""
        phi = self._predict(rows, rows["null"], rows["grand"])
        return shapley_loss(phi, rows["keep"], rows["values"], rows["null"])

    def identity(self) -> Identity:
        """The model, network and grid that the weights were trained for; Shapley values depend on the head, too."""
        own = {"target": self.target.identity(), "network": self.network_recipe()}
        return own | recipe(self, without=(*own, *TRAINING))

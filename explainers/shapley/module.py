"""Shapley values learned by least squares: ViT-Shapley (Covert et al., 2022) and FastSHAP (Jethani et al., 2021).

The value of a coalition S of patches, v(S), is what the model says when only they are visible: its probabilities of all
classes. Both methods minimise the same objective, with networks of their own (see `shapley_networks`).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import MeanMetric

from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.shapley.coalitions import CoalitionValues
from explainers.sources import Features, Pixels, Source, complete
from explainers.target import TargetModel, weights_hash
from explainers.target_files import load_target
from explainers.training.module import TrainingModule
from explainers.training.optimisation import OptimizerBuilder, SchedulerBuilder
from explainers.training.weights import check_identity, load_weights, read_network, save_network


def efficient(phi: Tensor, null: Tensor, grand: Tensor) -> Tensor:
    """The nearest values that sum to v(all) − v(nothing): the additive efficient normalisation of FastSHAP.

    Args:
        phi: (B, N, K). null, grand: v(nothing) and v(all), (B, K).
    """
    return phi + (grand - null - phi.sum(1))[:, None] / phi.shape[1]


def shapley_loss(phi: Tensor, keep: Tensor, values: Tensor, null: Tensor) -> Tensor:
    """N · E (v(S) − v(nothing) − Σ_{z ∈ S} φ_z)², over images, coalitions and classes.

    Of all efficient φ, the Shapley values make it least (Charnes et al., 1988). The factor N is of the released
    ViT-Shapley: it keeps the loss of one size when the grid gets finer.

    Args:
        phi: (B, N, K). keep: S, boolean (B, M, N). values: v(S), (B, M, K). null: v(nothing), (B, K).
    """
    with torch.autocast(phi.device.type, enabled=False):  # sums of many small values
        error = values - null[:, None] - keep.to(phi.dtype) @ phi  # (B, M, K)
    return phi.shape[1] * error.square().mean()


class Shapley(TrainingModule):
    """Learns to predict the Shapley values of every patch for all classes in one forward pass.

    Args:
        target: the model to explain. Never trained, nor saved with it.
        grid: the patches that are explained.
        network: builds the network from the model and the grid.
        optimizer, scheduler: build the optimiser from the parameters to train, and its schedule.
        weights: a trained network (`export`) to start from.
        surrogate: the `target.safetensors` of a `Surrogate` of the target, to explain in its place; `None` explains the
            answers of the target itself to masked images.
        coalitions: how many coalitions of each image serve one step. paired: see `shapley_coalitions`.
        normalisation: `additive` makes the values efficient, in training and in use, see `efficient`.
        min_crop: area of the smallest random crop of a training image; `None` trains on the images as they are.
        chunk_size: masked images in memory at a time. seed: of the coalitions and the crops.
    """

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
        super().__init__(optimizer, scheduler, min_crop, seed, frozen=("target",))
        model = target if surrogate is None else load_target(target, surrogate)
        self.target, self.grid = model.requires_grad_(False).eval(), grid
        self.network, self.normalisation = network(self.target, grid), normalisation
        self.reads: Source = Features(self.target, self.network.blocks) if self.network.blocks else Pixels()
        self.sources = (CoalitionValues(self.target, grid, coalitions, seed, paired, chunk_size), self.reads)
        self.val_loss = MeanMetric()
        if weights is not None:
            self.load(weights)

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Explain `classes` (B,), by default the predicted ones, in uint8 images (B, C, H, W): heatmaps (B, P, P)."""
        phi, grand = self._explain(images)
        classes = grand.argmax(-1) if classes is None else classes
        return phi[torch.arange(len(images)), :, classes].unflatten(-1, (self.grid.side, -1))

    def all_classes(self, images: Tensor) -> Tensor:
        """Explain every class at once: heatmaps (B, K, P, P)."""
        return self._explain(images)[0].mT.unflatten(-1, (self.grid.side, -1))

    def _explain(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The values (B, N, K) and the probabilities (B, K) of whole images; a blank image comes with every batch."""
        seen = {"image": images} | self.reads({"image": images})
        normalised = self.target.normalise(images)
        with torch.no_grad():
            embeddings = seen["embedding"] if "embedding" in seen else self.target.embed(normalised)
            grand = self.target.classify(embeddings).softmax(-1)
            null = self.target.probabilities(torch.zeros_like(normalised[:1]))
        return self._predict(seen, null, grand), grand

    def _predict(self, seen: dict[str, Tensor], null: Tensor, grand: Tensor) -> Tensor:
        """(B, N, K), in full precision: efficiency is a sum over all patches."""
        maps = [seen[f"map_{i}"] for i in range(len(self.network.blocks))]
        phi = self.network(seen.get("image"), seen.get("embedding"), maps).float()
        return efficient(phi, null, grand) if self.normalisation == "additive" else phi

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(complete(self.augmented(batch), self.sources, self.current_epoch))
        self.log("train/loss", loss, batch_size=len(batch["index"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.val_loss.update(self._loss(complete(batch, self.sources)), len(batch["index"]))
        self.log("val/loss", self.val_loss, prog_bar=True)

    def _loss(self, seen: dict[str, Tensor]) -> Tensor:
        phi = self._predict(seen, seen["null"], seen["grand"])
        return shapley_loss(phi, seen["keep"], seen["values"], seen["null"])

    def identity(self) -> dict[str, str]:
        """What the weights of the network belong to: the values are of one head, not of the backbone alone."""
        return self.target.identity() | {
            "head_sha256": weights_hash(self.target.head),
            "num_classes": str(self.target.num_classes),
            "patches_per_side": str(self.grid.side),
        }

    def export(self, folder: Path) -> Path:
        """Write the trained network, and what it belongs to, as `explainer.safetensors`."""
        return save_network(self.network, folder / "explainer.safetensors", self.identity())

    def load(self, path: str) -> None:
        """Load what `export` wrote for this model and grid."""
        saved, weights = read_network(path)
        self.check_identity(saved, path)
        load_weights(self.network, weights, path)

    def check_identity(self, saved: Mapping[str, str], path: str) -> None:
        """Compare the identity of trained weights with this module's.

        Raises:
            InputError: for another model, grid or number of classes.
        """
        own = self.identity()
        check_identity(saved, own, path, {"num_classes": "classes:", "patches_per_side": "patches a side:"})
        if any(saved[key] != own[key] for key in ("backbone_sha256", "head_sha256")):
            raise InputError(
                f"{path} was trained on other weights of {own['backbone']} or its head, and Shapley values are of one "
                "model: train it for this one, or explain a task by the model that it knows (explainers.tve.General)"
            )

"""TVE: a transferable vision explainer that learns meta-attributions (Wang et al., ICML 2024)."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from explainers.augmentation import random_resized_crop
from explainers.masking import PatchGrid, masked_forward, neighbourhoods
from explainers.networks import LightNetwork
from explainers.optimisation import OptimizerBuilder, SchedulerBuilder, configure
from explainers.sampling import random_patches, uniform
from explainers.target import TargetModel

log = logging.getLogger(__name__)


def meta_attribution(
    embed: Callable[[Tensor], Tensor], images: Tensor, near: Tensor, grid: PatchGrid, chunk_size: int = 256
) -> Tensor:
    """Definition 1: what the backbone G sees of N(z), and of everything else.

    Args:
        embed: G, normalised images (B, C, H, W) → embeddings (B, D).
        images: (B, C, H, W), normalised.
        near: N(z) of Z patches z of each image; boolean, (B, Z, N).

    Returns:
        (B, Z, 2, D): g = G(N(z); x), then h = G(Z(x) \\ N(z); x).
    """
    keep = torch.stack([near, ~near], 2)  # (B, Z, 2, N)
    return masked_forward(embed, images, keep.flatten(1, 2), grid, chunk_size=chunk_size).unflatten(1, (-1, 2))


def transfer(
    head: Callable[[Tensor], Tensor],
    meta: Tensor,
    h_weight: float = 1.0,
    score: Literal["log_probability", "logit"] = "log_probability",
) -> Tensor:
    """Definition 2: φ(z) = log H(g; y) − log H(h; y), the attribution of every patch to every class y.

    Args:
        head: the task's classifier H, embeddings (..., D) → logits (..., K).
        meta: g and h of every patch, (B, N, 2, D).
        h_weight, score: the released code has 0 and `logit`.

    Returns:
        (B, K, N).
    """
    scores = head(meta).float()  # (B, N, 2, K)
    if score == "log_probability":
        scores = scores.log_softmax(-1)
    return (scores[:, :, 0] - h_weight * scores[:, :, 1]).mT


class TVE(LightningModule):
    """Learns to predict the meta-attribution of every patch in one forward pass.

    Fine-tuning (Section 6.3) is this module with another `target` and pre-trained `weights`.

    Args:
        target: the model to explain; its `backbone` is G and its `head` is H. Never trained, nor saved with it.
        grid: the patches that are explained.
        network: builds E from the target and the grid.
        optimizer: builds the optimiser from the parameters to train.
        scheduler: builds the schedule from the optimiser and the number of steps.
        weights: a trained network (`export`) to start from.
        hops: the size of N(z); of several sizes, one is drawn for every patch.
        patches_per_image: how many patches z of each image serve one step; the release has 1.
        reduction: the squared error is a `sum` over D as in Equation 7, or, as released, a `mean`.
        min_crop: area of the smallest random crop of a training image; `None` trains on the images as they are.
        score, h_weight: see `transfer`.
        pooling: average the heatmap over this many patches a side, as a released figure does (5).
        chunk_size: masked images in memory at a time. seed: of the patches that are drawn.
    """

    near: Tensor

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        network: Callable[[TargetModel, PatchGrid], nn.Module],
        optimizer: OptimizerBuilder | None = None,
        scheduler: SchedulerBuilder | None = None,
        weights: str | None = None,
        hops: tuple[int, ...] = (2,),
        patches_per_image: int = 1,
        reduction: Literal["sum", "mean"] = "sum",
        min_crop: float | None = None,
        score: Literal["log_probability", "logit"] = "log_probability",
        h_weight: float = 1.0,
        pooling: int = 1,
        chunk_size: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.target, self.grid = target.requires_grad_(False).eval(), grid
        self.network: Any = network(target, grid)
        self.optimizer, self.scheduler = optimizer, scheduler
        self.patches_per_image, self.reduction, self.min_crop = patches_per_image, reduction, min_crop
        self.score, self.h_weight, self.pooling = score, h_weight, pooling
        self.hops, self.chunk_size, self.seed, self.fresh = tuple(hops), chunk_size, seed, weights is None
        self.val_loss = MeanMetric()
        self.register_buffer("near", torch.stack([neighbourhoods(grid, hop) for hop in hops]), persistent=False)
        if weights is not None:
            self.load(weights)

    def train(self, mode: bool = True) -> "TVE":
        super().train(mode)
        self.target.eval()  # or stochastic depth would change the targets
        return self

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Explain `classes` (B,), by default the predicted ones, in uint8 images (B, C, H, W): heatmaps (B, P, P)."""
        embeddings, maps = self._look(images)
        if classes is None:
            logits = self.target(images) if embeddings is None else self.target.classify(embeddings)
            classes = logits.argmax(-1)
        return self._transfer(self.network(images, embeddings, maps))[torch.arange(len(images)), classes]

    def all_classes(self, images: Tensor) -> Tensor:
        """Explain every class at once: heatmaps (B, K, P, P)."""
        return self._transfer(self.network(images, *self._look(images)))

    def attributions(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        """What Equation 7 needs of the target, for `image` uint8 (B, C, H, W) and `index` (B,). It can be stored.

        Returns:
            `patch` (B, Z), the patches drawn; `meta` (B, Z, 2, D), their meta-attributions; and for a network that
            reads the target's features `embedding` (B, D), and `map_0`, `map_1`, ... (B, C, P', P').
        """
        images, index = batch["image"], batch["index"]
        patches = random_patches(index, self.grid.num_patches, self.patches_per_image, self._stream("patches", epoch))
        counter = index[:, None] * self.grid.num_patches + patches
        hop = (uniform(counter, self._stream("hops", epoch)) * len(self.near)).long()  # (B, Z)
        with torch.no_grad():
            normalised = self.target.normalise(images)
            near = self.near[hop, patches]  # (B, Z, N)
            meta = meta_attribution(self.target.embed, normalised, near, self.grid, self.chunk_size)
            embeddings, maps = self._look(images)
        read = {} if embeddings is None else {"embedding": embeddings}
        return {"patch": patches, "meta": meta} | read | {f"map_{i}": value for i, value in enumerate(maps)}

    def _stream(self, purpose: Literal["patches", "hops", "crops"], epoch: int) -> int:
        """A seed for every purpose and epoch: the same draws twice would be correlated."""
        return 3 * (self.seed * 100_003 + epoch) + ("patches", "hops", "crops").index(purpose)

    def attribution_key(self) -> dict[str, str]:
        """Everything but the images that `attributions` of epoch 0 depend on."""
        drawn = str((self.patches_per_image, self.seed))
        return self.identity() | {"patches_per_image and seed": drawn, "blocks": str(self.network.blocks)}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.min_crop is not None:
            seed = self._stream("crops", self.current_epoch)
            batch = batch | {"image": random_resized_crop(batch["image"], batch["index"], seed, self.min_crop)}
        seen = batch if "meta" in batch else self.attributions(batch, self.current_epoch)
        if self.global_step == 0 and batch_idx == 0 and self.fresh and isinstance(self.network, LightNetwork):
            meta, embeddings = self.all_gather((seen["meta"], seen["embedding"]))  # every process starts alike
            self.network.calibrate(meta.view(-1, *seen["meta"].shape[1:]), embeddings.view(-1, self.target.embed_dim))
        loss = self._loss(batch, seen)
        self.log("train/loss", loss, batch_size=len(batch["index"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        seen = batch if "meta" in batch else self.attributions(batch)
        self.val_loss.update(self._loss(batch, seen), len(batch["index"]))  # right for processes of unequal shares too
        self.log("val/loss", self.val_loss, prog_bar=True)

    def _loss(self, batch: dict[str, Tensor], seen: dict[str, Tensor]) -> Tensor:
        """Equation 7, over the patches that were drawn."""
        maps = [seen[f"map_{i}"] for i in range(len(self.network.blocks))]
        predicted = self.network(batch.get("image"), seen.get("embedding"), maps)  # (B, N, 2, D)
        images = torch.arange(len(predicted), device=predicted.device)[:, None]
        error = (predicted[images, seen["patch"]] - seen["meta"]).float().square()  # (B, Z, 2, D)
        return (error.sum(-1) if self.reduction == "sum" else error.mean(-1)).sum(-1).mean()

    def _look(self, images: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """What the network reads of the target, in one forward: embeddings (B, D) and feature maps, or nothing."""
        if not self.network.blocks:
            return None, []
        return self.target.embed_with_maps(self.target.normalise(images), self.network.blocks)

    def _transfer(self, meta: Tensor) -> Tensor:
        """Meta-attributions (B, N, 2, D) → heatmaps of every class (B, K, P, P)."""
        heatmaps = transfer(self.target.classify, meta, self.h_weight, self.score).unflatten(-1, (self.grid.side, -1))
        if self.pooling > 1:
            heatmaps = F.avg_pool2d(heatmaps, self.pooling, 1, self.pooling // 2, count_include_pad=False)
        return heatmaps

    def configure_optimizers(self) -> OptimizerLRScheduler:
        steps = self.trainer.estimated_stepping_batches
        return configure(self.network.parameters(), self.optimizer, self.scheduler, steps)

    def identity(self) -> dict[str, str]:
        """What the weights of the network belong to."""
        return {
            "backbone": self.target.name,
            "backbone_sha256": self.target.weights_hash(),
            "embed_dim": str(self.target.embed_dim),
            "patches_per_side": str(self.grid.side),
            "hops": str(self.hops),
        }

    def export(self, folder: Path) -> Path:
        """Write the trained network, and what it belongs to, as `explainer.safetensors`."""
        weights = {name: value.detach().cpu().contiguous() for name, value in self.network.state_dict().items()}
        save_file(weights, path := folder / "explainer.safetensors", metadata=self.identity())
        return path

    def load(self, path: str) -> None:
        """Load what `export` wrote. Another width or grid is refused; other weights of the backbone are said."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"no trained explainer at {path}: train one with train.py, or give another path")
        with safe_open(path, "pt") as file:
            self._check_identity(file.metadata() or {}, path)
            self.network.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118

    def _check_identity(self, saved: dict[str, str], path: str) -> None:
        own = self.identity()
        for key, what in (("embed_dim", "embeddings of width"), ("patches_per_side", "patches a side:")):
            if saved.get(key) != own[key]:
                raise ValueError(
                    f"{path} explains {saved.get('backbone')} with {what} {saved.get(key)}; "
                    f"this target, {own['backbone']}, has {own[key]}"
                )
        if saved["backbone_sha256"] != own["backbone_sha256"]:
            log.warning("%s was trained on other weights of this backbone: TVE-PT (Section 6.3)", path)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The frozen target stays out of the checkpoint; what it was is recorded."""
        state = checkpoint["state_dict"].items()
        checkpoint["state_dict"] = {name: value for name, value in state if not name.startswith("target.")}
        checkpoint["identity"] = self.identity()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._check_identity(checkpoint["identity"], "the checkpoint")
        target = {f"target.{name}": value for name, value in self.target.state_dict().items()}
        checkpoint["state_dict"] = checkpoint["state_dict"] | target

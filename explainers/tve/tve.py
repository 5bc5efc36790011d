"""TVE: a transferable vision explainer that learns meta-attributions (Wang et al., ICML 2024)."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanMetric

from explainers.errors import InputError, check_range, checks_choices
from explainers.masking import PatchGrid
from explainers.metrics.error_bound import ErrorBound
from explainers.saved.identity import Identity, recipe
from explainers.target import TargetModel
from explainers.target.inputs import checked_classes
from explainers.training.optimisation import OptimizerBuilder, SchedulerBuilder
from explainers.training.sources import complete, network_inputs
from explainers.training.training_module import NetworkExplainer, check_backbone
from explainers.tve.light_network import LightNetwork
from explainers.tve.meta_attribution import MetaAttributions, transfer
from explainers.tve.paper_network import PaperNetwork

TRAINING = {
    "optimizer": "how the weights were found",
    "scheduler": "how the weights were found",
    "weights": "the start of the training",
    "allow_finetuned_backbone": "allows a difference",
    "patches_per_image": "how many patches a step learns from",
    "reduction": "scale of the loss",
    "min_crop": "augmentation",
    "seed": "draws of the training",
}
"""Arguments of the training, which trained weights do not depend on: they may be used with others."""

READING = {
    "score": "reads another attribution from the same meta-attributions",
    "h_weight": "reads another attribution from the same meta-attributions",
    "pooling": "averages the heatmap",
}
"""Arguments of the heatmap, which is computed from what the network predicts."""


class TVE(NetworkExplainer):
    """Learns to predict the meta-attribution of every patch in one forward pass.

    For a target with a fine-tuned backbone (Section 6.3) there are three variants. Fine-tuning takes pre-trained
    `weights` and `allow_finetuned_backbone`. Learning from scratch takes no `weights`. TVE-PT takes the same arguments
    as fine-tuning and is not trained.

    Args:
        target: the model to explain; its `backbone` is G and its `head` is H. It is neither trained nor saved.
        grid: the patches that are explained.
        network: builds E from the target and the grid.
        optimizer: builds the optimiser from the parameters to train.
        scheduler: builds the schedule from the optimiser and the number of steps.
        weights: file of a trained network (see `export`) to start from.
        allow_finetuned_backbone: accept `weights` that were trained for other weights of the same backbone.
        hops: radii of N(z), in patches, see `MetaAttributions`.
        patches_per_image: patches of each image in a training step; the released code has 1.
        reduction: reduction of the squared error over D: `sum` as in Equation 7, or `mean` as in the released code.
        min_crop: area of the smallest random crop of a training image, as a fraction; `None` for whole images.
        score: see `transfer`.
        h_weight: see `transfer`.
        pooling: side of the square window that averages the heatmap, in patches; 1 for none. A figure of the released
            code uses 5.
        chunk_size: maximum number of masked images in memory.
        seed: seed of the draws of patches and crops.
    """

    networks = (LightNetwork, PaperNetwork)

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        network: Callable[[TargetModel, PatchGrid], Any],
        optimizer: OptimizerBuilder | None = None,
        scheduler: SchedulerBuilder | None = None,
        weights: str | None = None,
        allow_finetuned_backbone: bool = False,
        hops: Sequence[int] = (2,),
        patches_per_image: int = 1,
        reduction: Literal["sum", "mean"] = "sum",
        min_crop: float | None = None,
        score: Literal["log_probability", "logit"] = "log_probability",
        h_weight: float = 1.0,
        pooling: int = 1,
        chunk_size: int = 256,
        seed: int = 0,
    ) -> None:
        check_range(1, grid.num_patches, patches_per_image=patches_per_image)
        if pooling < 1 or pooling % 2 == 0:
            raise InputError(f"expected an odd pooling, a window with a patch in its middle, got pooling={pooling}")
        super().__init__(optimizer, scheduler, min_crop, seed, frozen=("target",))
        target.check_grid(grid)
        self.target, self.grid = target.requires_grad_(False).eval(), grid
        self.network = network(target, grid)
        self.meta = MetaAttributions(target, grid, hops, patches_per_image, chunk_size, seed)
        self.reads = network_inputs(target, self.network.blocks)
        self.sources = (self.meta, self.reads)
        self.hops = tuple(hops)
        self.reduction, self.score, self.h_weight, self.pooling = reduction, score, h_weight, pooling
        self.uncalibrated = weights is None
        self.allow_finetuned_backbone = allow_finetuned_backbone
        self.val_loss, self.theorem1 = MeanMetric(), ErrorBound()
        if weights is not None:
            self.load(weights)

    def forward(self, images: Tensor, classes: Tensor | None = None) -> Tensor:
        """Explain `classes` (B,), by default the predicted ones, in uint8 images (B, C, H, W): heatmaps (B, P, P)."""
        self.grid.check(images)
        rows = self._inputs(images)
        if classes is None:
            classes = self._predicted_classes(rows)
        classes = checked_classes(classes, images, self.target.num_classes)
        return self._heatmaps(self.predict(rows), self.target.classify, classes)

    def all_classes(self, images: Tensor) -> Tensor:
        """Explain every class at once: heatmaps (B, K, P, P)."""
        self.grid.check(images)
        return self._heatmaps(self.predict(self._inputs(images)), self.target.classify)

    def explain_tasks(self, images: Tensor, heads: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        """Explain the class that each of T classifiers on this backbone predicts, in one pass of the network.

        Args:
            images: uint8 images, (B, C, H, W).
            heads: T classifiers, embeddings (..., D) → logits (..., K); K may differ between them.

        Returns:
            Heatmaps, (B, T, P, P).
        """
        self.grid.check(images)
        rows = self._inputs(images)
        embeddings = rows["embedding"] if "embedding" in rows else self.target.embed(self.target.normalise(images))
        meta = self.predict(rows).float()
        with torch.autocast(images.device.type, enabled=False):  # attributions are small differences of logits
            heatmaps = [self._heatmaps(meta, head, head(embeddings.float()).argmax(-1)) for head in heads]
        return torch.stack(heatmaps, 1)

    def predict(self, seen: dict[str, Tensor], patches: Tensor | None = None) -> Tensor:
        """Predict meta-attributions with E.

        Args:
            seen: the rows of `reads`: images, or features of the target.
            patches: patches to predict for, (B, Z); `None` predicts for all.

        Returns:
            (B, N, 2, D), or with `patches` (B, Z, 2, D).
        """
        maps = [seen[f"map_{i}"] for i in range(len(self.network.blocks))]
        return self.network(seen.get("image"), seen.get("embedding"), maps, patches)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        rows = complete(self.augmented(batch), self.sources, self.current_epoch)
        if self.uncalibrated and self.global_step == 0:
            self._calibrate(rows)
        loss = self.loss(self.predict(rows, rows["patch"]), rows["meta"])
        self.log("train/loss", loss, batch_size=len(batch["index"]))
        return loss

    def _calibrate(self, rows: dict[str, Tensor]) -> None:
        """Calibrate the network on the first batches of all processes, so that all of them get the same result."""
        wanted = {name: rows[name] for name in ("meta", "embedding") if name in rows}
        gathered = self.of_all_processes(wanted)
        self.network.calibrate(**{name: gathered[name].view(-1, *row.shape[1:]) for name, row in wanted.items()})
        self.uncalibrated = False

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        rows = complete(batch, self.sources)
        predicted = self.predict(rows, rows["patch"])
        self.val_loss.update(self.loss(predicted, rows["meta"]), len(predicted))  # exact for unequal batches too
        self.log("val/loss", self.val_loss, prog_bar=True)
        classes = self._predicted_classes(rows)[:, None, None, None].expand(*predicted.shape[:3], 1)
        log_probabilities = [
            self.target.classify(m).log_softmax(-1).gather(-1, classes)[..., 0] for m in (predicted, rows["meta"])
        ]
        self.theorem1.update(*log_probabilities)

    def on_validation_epoch_end(self) -> None:
        values = {f"val/theorem1_{name}": value.float() for name, value in self.theorem1.compute().items()}
        self.log_dict(values, sync_dist=True)  # the values are equal in all processes, but Lightning would warn
        self.theorem1.reset()

    def loss(self, predicted: Tensor, meta: Tensor) -> Tensor:
        """Equation 7 over Z patches of each image; `predicted` and `meta` are (B, Z, 2, D)."""
        error = (predicted - meta).float().square()
        return (error.sum(-1) if self.reduction == "sum" else error.mean(-1)).sum(-1).mean()

    def _inputs(self, images: Tensor) -> dict[str, Tensor]:
        """The inputs of the network: the images, and the target's features if the network reads any."""
        return {"image": images} | self.reads({"image": images})

    def _predicted_classes(self, rows: dict[str, Tensor]) -> Tensor:
        """The classes (B,) that the target predicts."""
        logits = self.target.classify(rows["embedding"]) if "embedding" in rows else self.target(rows["image"])
        return logits.argmax(-1)

    def _heatmaps(self, meta: Tensor, head: Callable[[Tensor], Tensor], classes: Tensor | None = None) -> Tensor:
        """Meta-attributions (B, N, 2, D) → heatmaps of every class (B, K, P, P), or of `classes` (B,): (B, P, P)."""
        heatmaps = transfer(head, meta, self.h_weight, self.score, classes).unflatten(-1, (self.grid.side, -1))
        if self.pooling > 1:
            heatmaps = F.avg_pool2d(heatmaps, self.pooling, 1, self.pooling // 2, count_include_pad=False)
        return heatmaps

    def identity(self) -> Identity:
        """The backbone, network, grid and neighbourhood sizes that the weights of the network were trained for."""
        own = {"target": self.target.backbone_identity(), "network": self.network_recipe()}
        return own | recipe(self, without=(*own, *TRAINING, *READING))

    def check_identity(self, saved: Identity, path: str) -> None:
        """Compare the identity of trained weights with this module's, see `check_backbone`."""
        check_backbone(saved, self.identity(), path, self.allow_finetuned_backbone)

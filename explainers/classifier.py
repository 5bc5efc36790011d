"""Fine-tunes the models to explain (TVE, Appendix E)."""

from pathlib import Path
from typing import Literal

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from explainers import Source, complete
from explainers.augmentation import random_resized_crop
from explainers.exchange import save_target
from explainers.optimisation import OptimizerBuilder, SchedulerBuilder, configure
from explainers.target import TargetModel, save_head


class Embeddings:
    """A source (see `explainers`): `embedding` (B, D) of each image, which is all that tuning the head needs."""

    provides = "embedding"

    def __init__(self, target: TargetModel) -> None:
        self.target = target

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"embedding": self.target.embed(self.target.normalise(batch["image"]))}

    def key(self) -> dict[str, str]:
        return self.target.identity() | {"source": "embeddings"}


class Classifier(LightningModule):
    """A linear classifier on the target's backbone.

    Args:
        num_classes: of the task; `None` takes those of the trainer's datamodule.
        tune: `head`, classifier-tuning, which leaves the backbone as it is; or `all`, full fine-tuning.
        min_crop: area of the smallest random crop of a training image; `None` trains on the images as they are.
    """

    def __init__(
        self,
        target: TargetModel,
        num_classes: int | None,
        optimizer: OptimizerBuilder,
        scheduler: SchedulerBuilder | None = None,
        tune: Literal["head", "all"] = "head",
        min_crop: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.target, self.tune, self.min_crop, self.seed = target, tune, min_crop, seed
        self.num_classes = num_classes
        if num_classes is not None:
            self._make_head(num_classes)
        self.target.backbone.requires_grad_(tune == "all")
        self.optimizer, self.scheduler = optimizer, scheduler
        self.accuracy, self.val_loss = MeanMetric(), MeanMetric()
        self.train()  # the trainer keeps every module in the mode it finds it in

    def _make_head(self, num_classes: int) -> None:
        if num_classes < 2:
            raise ValueError(
                f"expected at least 2 classes to tell apart, got {num_classes}; add images of another class"
            )
        self.num_classes = num_classes
        self.target.head = nn.Linear(self.target.embed_dim, num_classes)

    def setup(self, stage: str) -> None:
        """Compare `num_classes` with the classes of the images, or take it from them."""
        names = list(getattr(getattr(self.trainer, "datamodule", None), "classes", ()))
        if self.num_classes is None and not names:
            raise ValueError(
                "expected images of known classes, got a data set that names none: take labelled images (data=folder),"
                " or set explainer.num_classes"
            )
        if self.num_classes is None:
            self._make_head(len(names))
        elif names and len(names) != self.num_classes:
            raise ValueError(
                f"expected the images to have the {self.num_classes} classes of explainer.num_classes, got {len(names)}"
                f" ({', '.join(names[:5])}{', ...' * (len(names) > 5)}); leave the number out, or correct the folder"
            )

    def train(self, mode: bool = True) -> "Classifier":
        super().train(mode)
        if self.tune == "head":
            self.target.backbone.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """uint8 images (B, C, H, W) → logits (B, K)."""
        return self.target(images)

    @property
    def sources(self) -> tuple[Source, ...]:
        """What a datamodule can store: the embeddings of whole images, where the backbone stays as it is."""
        if self.tune != "head" or self.min_crop is not None:
            raise ValueError(
                f"expected explainer.tune=head and explainer.min_crop=null to store embeddings, got {self.tune} and"
                f" {self.min_crop}: take a datamodule of images"
            )
        return (Embeddings(self.target),)

    def _logits(self, batch: dict[str, Tensor]) -> Tensor:
        if self.tune == "all":
            return self(batch["image"])
        return self.target.classify(complete(batch, (Embeddings(self.target),))["embedding"])

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy. A label that is no class is named here: on a GPU it would kill the process without a word."""
        lowest, highest = torch.stack(labels.aminmax()).tolist()
        if lowest < 0 or highest >= logits.shape[-1]:
            raise ValueError(
                f"expected labels from 0 to {logits.shape[-1] - 1}, got {lowest} to {highest}, where -1 is an image"
                " without a label; take labelled images, or set explainer.num_classes to their classes"
            )
        return F.cross_entropy(logits, labels)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.min_crop is not None:
            seed = self.seed * 100_003 + self.current_epoch
            batch = batch | {"image": random_resized_crop(batch["image"], batch["index"], seed, self.min_crop)}
        loss = self._loss(self._logits(batch), batch["label"])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits, labels = self._logits(batch), batch["label"]
        self.val_loss.update(self._loss(logits, labels), len(labels))
        self.accuracy.update((logits.argmax(-1) == labels).float())
        self.log("val/loss", self.val_loss)
        self.log("val/accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        tuned = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return configure(tuned, self.optimizer, self.scheduler, self.trainer.estimated_stepping_batches)

    def export(self, folder: Path) -> None:
        """Write `head.safetensors`, and after full tuning `target.safetensors`, which timm loads as a checkpoint."""
        save_head(self.target.head, folder / "head.safetensors")
        if self.tune == "all":
            save_target(self.target, folder / "target.safetensors")

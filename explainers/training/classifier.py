"""Trains a linear classifier on a backbone, or fine-tunes both (TVE, Appendix E)."""

import copy
from pathlib import Path
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from explainers.errors import InputError, checks_choices
from explainers.learned.sources import Features, Source, complete
from explainers.metrics.means import Mean, Ratios
from explainers.models import TargetModel
from explainers.models.fetching import save_target
from explainers.models.heads import save_head
from explainers.models.inputs import check_labels
from explainers.training.optimisation import OptimizerBuilder, SchedulerBuilder
from explainers.training.training_module import TrainingModule


class Classifier(TrainingModule):
    """Trains a linear classifier on the target's backbone.

    Args:
        target: the model; a copy of it gets another head and is trained.
        num_classes: number of classes of the task; `None` takes the classes of the trainer's datamodule.
        optimizer: this, `scheduler`, `min_crop` and `seed`: see `TrainingModule`.
        tune: `head` trains the classifier and freezes the backbone; `all` is full fine-tuning.
    """

    @checks_choices
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
        super().__init__(optimizer, scheduler, min_crop, seed, frozen=("target.backbone",) if tune == "head" else ())
        self.target = copy.deepcopy(target)
        self.tune = tune
        self.num_classes = num_classes
        if num_classes is not None:
            self._make_head(num_classes)
        self.target.backbone.requires_grad_(tune == "all")
        self.accuracy = Mean()
        self.val_loss = Ratios()
        self.train()  # the trainer keeps the current mode of every module

    def _make_head(self, num_classes: int) -> None:
        if num_classes < 2:
            raise InputError(
                f"expected at least 2 classes to tell apart, got num_classes={num_classes}: add images of others",
                "num_classes",
            )
        self.num_classes = num_classes
        self.target.head = nn.Linear(self.target.embed_dim, num_classes)

    def setup(self, stage: str) -> None:
        """Check `num_classes` against the datamodule, or take it from there and build the head."""
        names = list(getattr(getattr(self.trainer, "datamodule", None), "classes", ()))
        if self.num_classes is None and not names:
            raise InputError(
                "expected images of known classes, got a data set that names none: take labelled images, or set"
                " num_classes=10",
                "num_classes",
            )
        self.target.classes = names
        if self.num_classes is None:
            self._make_head(len(names))
        elif names and len(names) != self.num_classes:
            raise InputError(
                f"expected images of num_classes={self.num_classes} classes, got {len(names)}"
                f" ({', '.join(names[:5])}{', ...' * (len(names) > 5)}); leave the number out, or correct the folder",
                "num_classes",
            )

    def forward(self, images: Tensor) -> Tensor:
        """Predict: uint8 images (B, C, H, W) → logits (B, K)."""
        return self.target(images)

    @property
    def sources(self) -> tuple[Source, ...]:
        """The rows that a datamodule can cache: embeddings of whole images, if the backbone is frozen."""
        if self.tune != "head" or self.min_crop is not None:
            raise InputError(
                f"expected tune=head and min_crop=None to cache embeddings, got tune={self.tune} and"
                f" min_crop={self.min_crop}: set cache=none",
                "tune",
                "min_crop",
            )
        return (Features(self.target),)

    def _logits(self, batch: dict[str, Tensor]) -> Tensor:
        if self.tune == "all":
            return self(batch["image"])
        return self.target.classify(complete(batch, (Features(self.target),))["embedding"])

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy. Checks the labels, because an invalid label on a GPU aborts the process without a message."""
        check_labels(labels, logits.shape[-1], "set num_classes= to that of their classes", "num_classes")
        return F.cross_entropy(logits, labels)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(self._logits(self.augment_images(batch)), batch["label"])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self._logits(batch)
        labels = batch["label"]
        self.val_loss.update(self._loss(logits, labels) * len(labels), len(labels))
        self.accuracy.update((logits.argmax(-1) == labels).float())
        self.log("val/loss", self.val_loss)
        self.log("val/accuracy", self.accuracy, prog_bar=True)

    def export(self, folder: Path) -> None:
        """Write `head.safetensors`, and after full fine-tuning `target.safetensors`, a checkpoint that timm loads."""
        save_head(self.target.head, folder / "head.safetensors", self.target.backbone_identity(), self.target.classes)
        if self.tune == "all":
            save_target(self.target, folder / "target.safetensors")

"""Fine-tunes the models to explain (TVE, Appendix E)."""

from pathlib import Path
from typing import Literal

from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from explainers.augmentation import random_resized_crop
from explainers.optimisation import OptimizerBuilder, SchedulerBuilder, configure
from explainers.target import TargetModel, save_head


class Classifier(LightningModule):
    """A linear classifier on the target's backbone, for a task of `num_classes` classes.

    Args:
        tune: `head`, classifier-tuning, which leaves the backbone as it is; or `all`, full fine-tuning.
        min_crop: area of the smallest random crop of a training image; `None` trains on the images as they are.
    """

    def __init__(
        self,
        target: TargetModel,
        num_classes: int,
        optimizer: OptimizerBuilder,
        scheduler: SchedulerBuilder | None = None,
        tune: Literal["head", "all"] = "head",
        min_crop: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.target, self.tune, self.min_crop, self.seed = target, tune, min_crop, seed
        self.target.head = nn.Linear(target.embed_dim, num_classes)
        self.target.backbone.requires_grad_(tune == "all")
        self.optimizer, self.scheduler = optimizer, scheduler
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.val_loss = MeanMetric()
        self.train()  # the trainer keeps every module in the mode it finds it in

    def train(self, mode: bool = True) -> "Classifier":
        super().train(mode)
        if self.tune == "head":
            self.target.backbone.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """uint8 images (B, C, H, W) → logits (B, K)."""
        return self.target(images)

    def attributions(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What tuning the head needs of an image, which can be stored: `embedding` (B, D) and `label` (B,)."""
        return {"embedding": self.target.embed(self.target.normalise(batch["image"])), "label": batch["label"]}

    def attribution_key(self) -> dict[str, str]:
        """Everything but the images that `attributions` depend on."""
        if self.tune != "head":
            raise ValueError("a backbone that is tuned has no embeddings to store: take a datamodule of images")
        return {"backbone": self.target.name, "backbone_sha256": self.target.weights_hash()}

    def _logits(self, batch: dict[str, Tensor]) -> Tensor:
        return self.target.classify(batch["embedding"]) if "embedding" in batch else self(batch["image"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.min_crop is not None:
            seed = self.seed * 100_003 + self.current_epoch
            batch = batch | {"image": random_resized_crop(batch["image"], batch["index"], seed, self.min_crop)}
        loss = F.cross_entropy(self._logits(batch), batch["label"])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits, labels = self._logits(batch), batch["label"]
        self.accuracy.update(logits, labels)
        self.val_loss.update(F.cross_entropy(logits, labels), len(labels))
        self.log("val/loss", self.val_loss)
        self.log("val/accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        tuned = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return configure(tuned, self.optimizer, self.scheduler, self.trainer.estimated_stepping_batches)

    def export(self, folder: Path) -> None:
        """Write `head.safetensors`, and after full tuning `target.safetensors`, which timm loads as a checkpoint."""
        save_head(self.target.head, folder / "head.safetensors")
        if self.tune == "all":
            weights, head = self.target.backbone.state_dict(), self.target.head
            names = self.target.backbone.pretrained_cfg["classifier"]
            names = (
                (names,) if isinstance(names, str) else names
            )  # a distilled DeiT has two, and this one is their mean
            for name, part in zip(names, head.weight.chunk(len(names), -1), strict=True):
                weights |= {f"{name}.weight": part * len(names), f"{name}.bias": head.bias.clone()}
            save_file(
                {key: value.detach().cpu().contiguous() for key, value in weights.items()},
                folder / "target.safetensors",
            )

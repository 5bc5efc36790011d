"""The LightningModule that trains TVE, AnyHead and Shapley; explaining images needs neither it nor Lightning."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from explainers.metrics.means import Ratios
from explainers.saved.identity import Identity
from explainers.training.network_explainer import NetworkExplainer
from explainers.training.sources import Source, complete
from explainers.training.state_dicts import part
from explainers.training.training_module import TrainingModule


class ExplainerTraining(TrainingModule):
    """Trains the network of an explainer with what the explainer was built with: optimiser, schedule, crops and seed.

    A checkpoint has the weights of the explainer under their own names, without those of the target.

    Args:
        explainer: the explainer, which is changed in place.
    """

    def __init__(self, explainer: NetworkExplainer) -> None:
        super().__init__(
            explainer.optimizer, explainer.scheduler, explainer.min_crop, explainer.seed, frozen=("explainer.target",)
        )
        self.explainer = explainer
        self.val_loss = Ratios(explainer.ratios)
        self.metrics: Any = nn.ModuleDict(explainer.validation_metrics())

    @property
    def sources(self) -> tuple[Source, ...]:
        """What a step reads; a datamodule can cache it."""
        return tuple(self.explainer.sources)

    def forward(self, images: Tensor) -> Tensor:
        """Explain the predicted classes of uint8 images (B, C, H, W): heatmaps (B, P, P)."""
        return self.explainer(images)

    def on_fit_start(self) -> None:
        """Set the mode, because loaded weights leave an explainer in eval mode, and the trainer keeps modes."""
        self.train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        explainer = self.explainer
        rows = complete(self.augmented(batch), self.sources, self.current_epoch)
        if explainer.uncalibrated and self.global_step == 0:
            explainer.calibrate(rows)
            explainer.uncalibrated = False
        loss = explainer.loss(explainer.predict(rows), rows)
        self.log("train/loss", loss, batch_size=len(batch["index"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        rows = complete(batch, self.sources)
        predicted = self.explainer.predict(rows)
        self.val_loss.update(*self.explainer.loss_sums(predicted, rows))
        self.log("val/loss", self.val_loss, prog_bar=True)
        self.explainer.measure(self.metrics, predicted, rows)

    def on_validation_epoch_end(self) -> None:
        for name, metric in self.metrics.items():
            values = {f"val/{name}_{key}": value.float() for key, value in metric.compute().items()}
            self.log_dict(values, sync_dist=True)  # the values are equal in all processes, but Lightning would warn
            metric.reset()

    def identity(self) -> Identity:
        """What the weights of the explainer are valid for, see `NetworkExplainer.identity`."""
        return self.explainer.identity()

    def check_identity(self, saved: Identity, path: str) -> None:
        """Raise an InputError unless a checkpoint, called `path`, has weights that the explainer may use."""
        self.explainer.check_identity(saved, path)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what `TrainingModule` saves, with the names that weights have in the explainer."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["state_dict"] = part(checkpoint["state_dict"], "explainer")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check the identity, and name the weights as Lightning expects them."""
        checkpoint["state_dict"] = {f"explainer.{name}": value for name, value in checkpoint["state_dict"].items()}
        super().on_load_checkpoint(checkpoint)

    def export(self, folder: Path) -> Path:
        """Write the trained network, see `NetworkExplainer.export`."""
        return self.explainer.export(folder)


def lightning_module(built: Any) -> Any:
    """What Lightning trains: an explainer in an `ExplainerTraining`; others, such as a classifier, as they are."""
    return ExplainerTraining(built) if isinstance(built, NetworkExplainer) else built

"""LightningModules: the base class of all that learn, and the one that trains learned explainers."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from explainers.errors import InputError
from explainers.learned.network_explainer import NetworkExplainer, gather_processes
from explainers.learned.sources import Loss, Source, complete
from explainers.metrics.means import Ratios
from explainers.runtime.sampling import stream, uniform
from explainers.saved.identity import Identity, weights_hash
from explainers.saved.weights import check_alike, check_finite, check_identity, first_not_finite, part
from explainers.training.optimisation import OptimizerBuilder, SchedulerBuilder


def random_resized_crop(images: Tensor, index: Tensor, seed: int, min_scale: float = 0.2) -> Tensor:
    """Crop each image at random, resize the crop to the size of the image, and flip it with probability 1/2.

    The area of a crop, as a fraction of the image, is uniform in [`min_scale`, 1]. Its aspect ratio is log-uniform in
    [3/4, 4/3], as in torchvision's RandomResizedCrop. A side longer than the image's is shortened to it.

    Args:
        images: uint8, (B, C, H, W), as the result.
        index: index of each image in the data set, (B,); `index` and `seed` determine the crop.
        seed: a different one for every epoch, see `sampling.stream`.
        min_scale: area of the smallest crop, as a fraction of the image.

    >>> images = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8).expand(3, 1, 8, 8)
    >>> crops = random_resized_crop(images, index=torch.tensor([5, 5, 6]), seed=0)
    >>> torch.equal(crops[0], crops[1]), torch.equal(crops[0], crops[2])
    (True, False)
    """
    scale, ratio, row, column, flip = uniform(index[:, None] * 5 + torch.arange(5, device=index.device), seed).unbind(1)
    area = min_scale + (1 - min_scale) * scale
    aspect = ((2 * ratio - 1) * math.log(4 / 3)).exp()
    width = (area * aspect).sqrt().clamp(max=1)  # (B,), as a fraction of the image's width
    height = (area / aspect).sqrt().clamp(max=1)  # (B,), as a fraction of the image's height
    zero = torch.zeros_like(width)
    theta = torch.stack(
        [
            torch.stack([width * torch.where(flip < 0.5, -1, 1), zero, (2 * column - 1) * (1 - width)], -1),
            torch.stack([zero, height, (2 * row - 1) * (1 - height)], -1),
        ],
        1,
    )  # (B, 2, 3): maps coordinates of the crop to coordinates of the image, both in [-1, 1]
    positions = F.affine_grid(theta.float(), list(images.shape), align_corners=False)
    cropped = F.grid_sample(images.float(), positions, mode="bilinear", padding_mode="border", align_corners=False)
    return cropped.round().clamp(0, 255).byte()


ADVISED = "lr", "gradient_clip_val", "precision"
"""Settings that a message about a training that diverged names."""


class TrainingModule(LightningModule):
    """A LightningModule with frozen parts.

    A frozen part stays in eval mode, which turns stochastic depth and dropout off, and is not saved in checkpoints. A
    checkpoint contains `identity` instead, and can be loaded only by a module of the same identity.

    A training that diverges ends with an InputError in all processes: at the first loss or gradient that is not finite,
    before the weights change, or after a validation whose loss is not finite. Its checkpoints are finite.

    Args:
        optimizer: builds the optimiser from the parameters to train; `None` for a module that is not trained.
        scheduler: builds the schedule from the optimiser and the number of steps; `None` for a constant learning rate.
        min_crop: area of the smallest random crop, as a fraction of the image; `None` to train on whole images.
        seed: seed of the random crops, and of dropout and stochastic depth.
        frozen: names of the frozen submodules.
    """

    def __init__(
        self,
        optimizer: OptimizerBuilder | None,
        scheduler: SchedulerBuilder | None,
        min_crop: float | None = None,
        seed: int = 0,
        frozen: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.min_crop = min_crop
        self.seed = seed
        self.frozen = frozen
        self.step_loss = torch.zeros(())
        """Sum of the losses of the batches of a step of the optimiser."""

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all submodules except the frozen parts, which stay in eval mode."""
        super().train(mode)
        for name in self.frozen:
            self.get_submodule(name).eval()
        return self

    def augment_images(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the training batch with random crops of its images, drawn again in every epoch.

        Args:
            batch: holds `image`, uint8 (B, C, H, W), and `index`, the index of each image in the data set, (B,).

        Raises:
            InputError: if the batch has cached rows, because they were computed from whole images.
        """
        if self.min_crop is None:
            return batch
        cached = sorted(batch.keys() - {"image", "label", "index", "truth"})
        if cached:
            raise InputError(
                f"expected min_crop=None with cached rows, which are of whole images, got min_crop={self.min_crop} and"
                f" cached {', '.join(cached)}: set min_crop=None or cache=none",
                "min_crop",
            )
        seed = stream("crops", self.seed, self.current_epoch)
        return batch | {"image": random_resized_crop(batch["image"], batch["index"], seed, self.min_crop)}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed torch, so that dropout and stochastic depth depend on the step and the process alone.

        A resumed run then draws what an uninterrupted one does, without the states of generators in its checkpoint.
        """
        step = torch.tensor((self.global_rank << 32) + batch_idx)
        draw = uniform(step, stream("dropout", self.seed, self.current_epoch)).item()
        torch.manual_seed(int(draw * 2**32))

    def on_before_backward(self, loss: Tensor) -> None:
        """Keep the loss for the check before the optimiser's step."""
        self.step_loss = self.step_loss.to(loss.device) + loss.detach()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Raise an InputError in all processes if a loss or the gradients are not finite.

        Infinite gradients of 16-bit floats are no error: their scaler skips the step.
        """
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        norm = get_total_norm([weight.grad for weight in weights if weight.grad is not None])
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        own = torch.stack([self.step_loss.float(), norm.to(self.step_loss.device, torch.float)])
        self.step_loss = torch.zeros_like(self.step_loss)
        loss, length = gather_processes(own).view(-1, 2).mean(0).tolist()
        if not math.isfinite(loss) or not scaled and not math.isfinite(length):
            got = f"a loss of {loss:.3g} and a gradient norm of {length:.3g} in step {self.global_step + 1}"
            raise InputError(f"expected a finite loss and finite gradients, got {got}{self._advice()}", *ADVISED)

    def on_validation_end(self) -> None:
        """Raise an InputError in all processes if the loss of the validation is not finite."""
        loss = self.trainer.callback_metrics.get("val/loss")
        if loss is not None and not loss.isfinite():
            got = f"{loss.item()} after step {self.global_step}"
            raise InputError(f"expected a finite val/loss, got {got}{self._advice()}", *ADVISED)

    def _advice(self) -> str:
        """The rest of the message about a training that diverged: learning rate, what to try, last checkpoint."""
        trainer: Any = self.trainer
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        precision = ["set precision=32-true"] if "16" in str(trainer.precision) else []
        if not rates:  # a validation alone
            return f": {precision[0]}" if precision else ""
        clip = [] if trainer.gradient_clip_val else ["set gradient_clip_val=1"]
        attempts = ", or ".join(["lower lr=", *clip, *precision])
        path = newest_checkpoint(trainer)
        kept = f"ckpt_path={path} is the last finite checkpoint" if path else "no checkpoint is written yet"
        return f" (learning rate {max(rates):.3g}): {attempts}; {kept}"

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build the optimiser of all parameters that require gradients, and its schedule, which counts steps."""
        if self.optimizer is None:
            raise InputError("training needs an optimizer, and none was given")
        optimizer = self.optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])
        if self.scheduler is None:
            return optimizer
        schedule = self.scheduler(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def identity(self) -> Identity:
        """The hash of each frozen part; trained weights are valid only with the same frozen parts."""
        return {f"{name}_sha256": weights_hash(self.get_submodule(name)) for name in self.frozen}

    def check_identity(self, saved: Identity, path: str) -> None:
        """Raise an InputError unless a checkpoint, called `path`, has the identity of this module."""
        check_identity(saved, self.identity(), path)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remove the frozen parts from the checkpoint, and add the identity and the latest metrics.

        Raises:
            InputError: if a weight is not finite; the earlier file then stays.
        """
        frozen = tuple(f"{name}." for name in self.frozen)
        weights = {name: value for name, value in checkpoint["state_dict"].items() if not name.startswith(frozen)}
        checkpoint["state_dict"] = weights
        name = first_not_finite(checkpoint["state_dict"])
        if name is not None:
            got = f"NaN or infinity in {name} after step {self.global_step}"
            raise InputError(f"expected finite weights, got {got}{self._advice()}")
        checkpoint["identity"] = self.identity()
        # A run that is killed after its last checkpoint need not measure again
        checkpoint["metrics"] = {name: value.item() for name, value in self.trainer.callback_metrics.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check the identity, and add this module's frozen parts, because Lightning expects a complete state dict."""
        self.check_identity(checkpoint.get("identity", {}), "the checkpoint")
        check_finite(checkpoint["state_dict"], "the checkpoint")
        for name in self.frozen:
            weights = self.get_submodule(name).state_dict()
            checkpoint["state_dict"] |= {f"{name}.{key}": value for key, value in weights.items()}
        check_alike(self.state_dict(), checkpoint["state_dict"], "the checkpoint")


class ExplainerTraining(TrainingModule):
    """Trains the network of a learned explainer: TVE, AnyHead or Shapley.

    A checkpoint has the weights of the explainer under their own names, without those of the target.

    >>> from functools import partial
    >>> import timm
    >>> from explainers.models import TargetModel
    >>> from explainers.tve import TVE, LightNetwork, TVELoss
    >>> target = TargetModel(timm.create_model("test_vit", num_classes=2))
    >>> tve = TVE(target, target.grid, partial(LightNetwork, blocks=[5]))
    >>> training = ExplainerTraining(tve, partial(TVELoss, patches_per_image=4), partial(torch.optim.AdamW, lr=1e-3))
    >>> training.loss.forward_passes
    8

    Args:
        explainer: the explainer, which is changed in place.
        loss: builds the `Loss` from the target and the grid of the explainer, such as `TVELoss`,
            `ShapleyLoss`, or a teacher of `explainers.anyhead`.
        optimizer: this and the rest: see `TrainingModule`.
    """

    def __init__(
        self,
        explainer: NetworkExplainer,
        loss: Callable[..., Loss],
        optimizer: OptimizerBuilder | None = None,
        scheduler: SchedulerBuilder | None = None,
        min_crop: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(optimizer, scheduler, min_crop, seed, frozen=("explainer.target",))
        self.explainer = explainer
        self.loss: Loss = explainer.build_loss(loss)
        self.sources: tuple[Source, ...] = self.loss, explainer.reads
        self.initialised = False
        self.val_loss = Ratios(self.loss.ratios)
        self.metrics: Any = nn.ModuleDict(explainer.validation_metrics())

    def forward(self, images: Tensor) -> Tensor:
        """Explain the predicted classes of uint8 images (B, C, H, W): heatmaps (B, rows, columns)."""
        return self.explainer(images)

    def on_fit_start(self) -> None:
        """Set the mode, because loaded weights leave an explainer in eval mode, and the trainer keeps modes."""
        self.train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        rows = complete(self.augment_images(batch), self.sources, self.current_epoch)
        if not self.initialised and self.global_step == 0:
            self.explainer.initialise(rows, self.loss)
            self.initialised = True
        loss = self.loss.compute(self.explainer.predict(rows), rows)  # rows may say what to predict, as TVE's `patch`
        self.log("train/loss", loss, batch_size=len(batch["index"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        rows = complete(batch, self.sources)  # of epoch 0: the same draws in every validation
        predicted = self.explainer.predict(rows)
        self.val_loss.update(*self.loss.compute_sums(predicted, rows))
        self.log("val/loss", self.val_loss, prog_bar=True)
        self.explainer.measure(self.metrics, predicted, rows)

    def on_validation_epoch_end(self) -> None:
        for name, metric in self.metrics.items():
            values = {f"val/{name}_{key}": value.float() for key, value in metric.compute().items()}
            self.log_dict(values, sync_dist=True)  # the values are equal in all processes, but Lightning would warn
            metric.reset()

    def identity(self) -> Identity:
        return self.explainer.identity()

    def check_identity(self, saved: Identity, path: str) -> None:
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


def newest_checkpoint(trainer: Trainer) -> Path | None:
    """The newest file that the checkpoint callbacks of a trainer have written; `None` before the first one."""
    names = ("last_model_path", "best_model_path")
    paths = [Path(getattr(callback, name, "")) for callback in trainer.checkpoint_callbacks for name in names]
    return max((path for path in paths if path.is_file()), key=lambda path: path.stat().st_mtime, default=None)

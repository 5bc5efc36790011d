"""The base class of all LightningModules that learn: frozen parts, random crops, optimiser, and divergence."""

import math
from pathlib import Path
from typing import Any, Self

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from explainers.errors import InputError
from explainers.sampling import stream, uniform
from explainers.saved.identity import Identity, weights_hash
from explainers.saved.weights import check_finite, check_identity, first_not_finite
from explainers.training.augmentation import random_resized_crop
from explainers.training.optimisation import OptimizerBuilder, SchedulerBuilder, configure
from explainers.training.processes import of_all_processes
from explainers.training.state_dicts import check_alike, with_part, without_part


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

    frozen: tuple[str, ...] = ()

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
        for part in self.frozen:
            self.get_submodule(part).eval()
        return self

    def augmented(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
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
                f"expected min_crop=null with cached rows, which are of whole images, got {self.min_crop} and cached"
                f" {', '.join(cached)}: set min_crop=null or cache=none"
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
        loss, length = of_all_processes(own).view(-1, 2).mean(0).tolist()
        if not math.isfinite(loss) or not scaled and not math.isfinite(length):
            got = f"a loss of {loss:.3g} and a gradient norm of {length:.3g} in step {self.global_step + 1}"
            raise InputError(f"expected a finite loss and finite gradients, got {got}{self._advice()}")

    def on_validation_end(self) -> None:
        """Raise an InputError in all processes if the loss of the validation is not finite."""
        loss = self.trainer.callback_metrics.get("val/loss")
        if loss is not None and not loss.isfinite():
            got = f"{loss.item()} after step {self.global_step}"
            raise InputError(f"expected a finite val/loss, got {got}{self._advice()}")

    def _advice(self) -> str:
        """The rest of the message about a training that diverged: learning rate, what to try, last checkpoint."""
        trainer: Any = self.trainer
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        precision = ["set trainer.precision=32-true"] if "16" in str(trainer.precision) else []
        if not rates:  # a validation alone
            return f": {precision[0]}" if precision else ""
        clip = [] if trainer.gradient_clip_val else ["set trainer.gradient_clip_val=1"]
        attempts = ", or ".join(["lower optimizer.lr", *clip, *precision])
        path = last_checkpoint(trainer)
        kept = f"ckpt_path={path} is the last finite checkpoint" if path else "no checkpoint is written yet"
        return f" (learning rate {max(rates):.3g}): {attempts}; {kept}"

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build the optimiser of all parameters that require gradients, and its schedule."""
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return configure(trainable, self.optimizer, self.scheduler, self.trainer.estimated_stepping_batches)

    def identity(self) -> Identity:
        """Return the hash of each frozen part; trained weights are valid only with the same frozen parts."""
        return {f"{part}_sha256": weights_hash(self.get_submodule(part)) for part in self.frozen}

    def check_identity(self, saved: Identity, path: str) -> None:
        """Raise an InputError unless a checkpoint, called `path`, has the identity of this module."""
        check_identity(saved, self.identity(), path)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remove the frozen parts from the checkpoint, and add the identity and the latest metrics.

        Raises:
            InputError: if a weight is not finite; the earlier file then stays.
        """
        for part in self.frozen:
            checkpoint["state_dict"] = without_part(checkpoint["state_dict"], part)
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
        for part in self.frozen:
            checkpoint["state_dict"] = with_part(checkpoint["state_dict"], part, self.get_submodule(part))
        check_alike(self.state_dict(), checkpoint["state_dict"], "the checkpoint")


def last_checkpoint(trainer: Trainer) -> Path | None:
    """The newest file that the checkpoint callbacks of a trainer have written; `None` before the first one."""
    names = ("last_model_path", "best_model_path")
    paths = [Path(getattr(callback, name, "")) for callback in trainer.checkpoint_callbacks for name in names]
    return max((path for path in paths if path.is_file()), key=lambda path: path.stat().st_mtime, default=None)

"""Trains a model to explain itself for every head, without labels: its teacher is the model before the training."""

import copy

import torch
from torch import Tensor

from explainers.errors import InputError
from explainers.learned.network_explainer import gather_processes
from explainers.learned.sources import Features, Pixels, complete
from explainers.metrics.means import Mean, Metric, Ratios
from explainers.training.optimisation import OptimizerBuilder, SchedulerBuilder
from explainers.vectors.fixed_head import embed_as_read
from explainers.vectors.self_explaining import HeadBuilder, LabelBuilder, SelfExplaining, SelfTraining


def relative_error(embeddings: Tensor, wanted: Tensor) -> Tensor:
    """Σ |e − ê|² / Σ |ê − mean ê|² over the images of a batch: 1 if all embeddings are the mean of the wanted ones ê.

    >>> relative_error(torch.tensor([[1.0], [1.0]]), torch.tensor([[0.0], [2.0]])).item()
    1.0

    Raises:
        InputError: for a single image, which does not vary.
    """
    if len(wanted) < 2:
        raise InputError(
            "batch_size: expected batches of 2 images or more, because errors of embeddings are divided by their"
            f" variation, got {len(wanted)}: take larger batches",
            "batch_size",
        )
    variation = (wanted - wanted.mean(0)).square().sum()
    return (embeddings - wanted).square().sum() / variation.clamp(min=1e-8)


class EmbeddingError(Metric):
    """The `relative_error` of all images of all processes, however they are divided into batches.

    >>> metric = EmbeddingError(width=1)
    >>> for wanted in (0.0, 2.0):
    ...     metric.update(torch.tensor([[1.0]]), torch.tensor([[wanted]]))
    >>> metric.compute().item()
    1.0

    Args:
        width: D, width of the embeddings.
    """

    full_state_update = False
    errors: Tensor
    squares: Tensor
    total: Tensor
    images: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        for name, size in (("errors", ()), ("squares", ()), ("total", (width,)), ("images", ())):
            self.add_state(name, torch.zeros(size, dtype=torch.double), dist_reduce_fx="sum")

    def update(self, embeddings: Tensor, wanted: Tensor) -> None:
        wanted = wanted.double()
        self.errors += (embeddings.double() - wanted).square().sum()
        self.squares += wanted.square().sum()
        self.total += wanted.sum(0)
        self.images += len(wanted)

    def compute(self) -> Tensor:
        variation = self.squares - self.total.square().sum() / self.images
        return (self.errors / variation.clamp(min=1e-8)).float()


class SelfDistillation(SelfTraining):
    """Trains a model to explain its embedding, whatever head is put on it, and to keep the embedding.

    It minimises α · L_predict + (1 − α) · L_explain. L_predict is the `relative_error` of the embeddings, which hold
    the predictions of every head. L_explain is the loss of a teacher of `explainers.anyhead`: patches learn vectors
    c_z, and v · c_z attributes any functional v. Both compare with a frozen copy of the model before this training, so
    that neither labels nor classes are needed.

    Args:
        explainer: the model, whose backbone is trained in place.
        head: builds its head, unless it was loaded with one; `patch_scale=None` computes the factor of the vectors c_z
            from the first batch, so that they have the size that the loss expects.
        loss: builds L_explain from the frozen copy and the grid: `CoalitionTeacher` or `PropagationTeacher`.
        alpha: α, in (0, 1).
        last_blocks: number of the last blocks that learn, see `learn_last_blocks`.
        optimizer: builds the optimiser from the parameters of the backbone.
        scheduler: builds the schedule from the optimiser and the number of steps.
    """

    def __init__(
        self,
        explainer: SelfExplaining,
        head: HeadBuilder,
        loss: LabelBuilder,
        alpha: float = 0.8,
        last_blocks: int | None = None,
        optimizer: OptimizerBuilder | None = None,
        scheduler: SchedulerBuilder | None = None,
    ) -> None:
        if not 0 < alpha < 1:
            raise InputError(f"expected alpha above 0 and below 1, got {alpha}", "alpha")
        super().__init__(explainer, head, alpha, last_blocks, optimizer, scheduler, frozen=("teacher",))
        self.teacher = copy.deepcopy(explainer.target).eval().requires_grad_(False)
        self.loss = loss(self.teacher, explainer.grid)
        self.sources = Pixels(), self.loss, Features(self.teacher)
        self.initialised = head.patch_scale is not None
        self.predict_loss = EmbeddingError(self.teacher.embed_dim)
        self.explain_loss = Ratios(self.loss.ratios)
        self.accuracy = Mean()
        self.train()  # the trainer keeps the current mode of every module

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        rows = complete(batch, self.sources, self.current_epoch)
        embeddings, patches, paths = embed_as_read(self.explainer.target, self.explainer.grid, rows["image"])
        with torch.autocast(patches.device.type, enabled=False):
            if not self.initialised and self.global_step == 0:
                self._initialise(patches, rows)
            predicting = relative_error(embeddings.float(), rows["embedding"].float())
            explaining = self.loss.compute(self.explainer.target.head.vectors(patches, paths), rows)
            loss = self.alpha * predicting + (1 - self.alpha) * explaining
        self.log("train/loss", loss, batch_size=len(rows["image"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        rows, target = complete(batch, self.sources), self.explainer.target
        embeddings, patches, paths = embed_as_read(target, self.explainer.grid, rows["image"])
        with torch.autocast(patches.device.type, enabled=False):
            self.explain_loss.update(*self.loss.compute_sums(target.head.vectors(patches, paths), rows))
        self.predict_loss.update(embeddings, rows["embedding"])
        logits, before = target.classify(embeddings), self.teacher.classify(rows["embedding"])
        self.accuracy.update((logits.argmax(-1) == before.argmax(-1)).float())
        self.log("val/accuracy", self.accuracy, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        """Log the loss of all images."""
        loss = self.alpha * self.predict_loss.compute() + (1 - self.alpha) * self.explain_loss.compute()
        self.log("val/loss", loss, prog_bar=True, sync_dist=True)  # equal in all processes, but Lightning would warn
        self.predict_loss.reset()
        self.explain_loss.reset()

    @torch.no_grad()
    def _initialise(self, patches: Tensor, rows: dict[str, Tensor]) -> None:
        """Multiply `patch_scale` so that the vectors c_z, which may be 100 times too large, have the loss's unit."""
        self.initialised = True
        head = self.explainer.target.head
        head.patch_scale *= gather_processes(self.loss.unit(rows) / head.vectors(patches).std()).mean()

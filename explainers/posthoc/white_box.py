"""Methods that read the inside of a transformer: one recorded forward pass, and one backward pass, for each batch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from explainers.errors import checks_choices
from explainers.masking import PatchGrid, map_shape
from explainers.models import TargetModel
from explainers.models.gradients import compute_gradient
from explainers.models.heads import ConstantLengths
from explainers.models.inputs import Functionals, resolve_functionals, validate_classes
from explainers.models.scores import check_probabilities, log_odds
from explainers.transformer.blocks import find_blocks, head_projections, is_transformer, num_prefix_tokens, readout
from explainers.transformer.recording import Record, record_pass
from explainers.transformer.rules import Rules
from explainers.transformer.stages import find_stages, record_stages

Output = Literal["logit", "probability", "log_odds"]
Gradients = Callable[[Sequence[Tensor]], list[Tensor]]
"""Recorded tensors (B, ...) → their gradients (B, V, ...) for all V functionals that are explained."""


def class_functionals(target: TargetModel, embeddings: Tensor, classes: Tensor, output: Output = "logit") -> Tensor:
    """Compute the gradient of each image's class score at its embedding: the functional v that explains the class.

    For the logit of a linear head, v is the row v_y of the class. For the probability it is p_y (v_y − Σ_k p_k v_k).
    For the log-odds log p_y / (1 − p_y), it is v_y minus the mean of the other rows, weighted by their probabilities.
    The probability of a `sigmoid` is p_y (1 − p_y) v_y, its log-odds v_y; the only score of a `value` is v_y. The
    score of a cosine head is explained for a constant length of the embedding, as in `head_functionals`.

    Args:
        target: the model whose head classifies the embeddings.
        embeddings: (B, D).
        classes: class of each image, (B,).
        output: the score of the class.

    Returns:
        v, (B, D).
    """
    with torch.inference_mode(False), torch.enable_grad():
        embeddings = embeddings.detach().float().clone().requires_grad_()
        with ConstantLengths():
            logits = target.classify(embeddings)
        own = classes.clone()  # a copy, because inference tensors have no gradient
        if output == "log_odds":
            of_class = log_odds(logits, own, target.score)
        else:
            of_class = (target.scores(logits) if output == "probability" else logits).gather(-1, own[:, None])[:, 0]
        return compute_gradient(embeddings, of_class, target, "its head")


def positive_seeds(embeddings: Tensor, functionals: Tensor) -> Tensor:
    """Apply the α = 1 rule of LRP to the head: the positive summands of v · e share the relevance 1.

    Of embeddings e (B, D) and functionals v (B, V, D); the product of the result (B, V, D) with e sums to 1 over D.
    """
    summands = functionals * embeddings[:, None]
    positive = functionals.masked_fill(summands <= 0, 0)
    return (positive / summands.clamp(min=0).sum(-1, keepdim=True).clamp(min=1e-9)).detach()


def sum_on_grid(scores: Tensor, shape: tuple[int, int]) -> Tensor:
    """Resample scores (..., h, w) to (..., rows, columns): each is split by area of overlap, so the sum stays the same.

    >>> sum_on_grid(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), shape=(1, 1)).tolist()
    [[10.0]]
    """
    if scores.shape[-2:] == shape:
        return scores
    rows, columns = (_shares(old, new).to(scores) for old, new in zip(scores.shape[-2:], shape, strict=True))
    return rows @ scores @ columns.mT


def _shares(size: int, side: int) -> Tensor:
    """Compute which fraction of old cell j lies in new cell i, for `size` old and `side` new cells: (side, size)."""
    old, new = torch.arange(size) * side, torch.arange(side)[:, None] * size
    return (torch.minimum(old + side, new + size) - torch.maximum(old, new)).clamp(min=0) / side


@dataclass(frozen=True)
class Reads:
    """What a method reads of a forward pass, beside the tokens that enter each layer.

    Args:
        attention: attention weights and values; the model must attend globally.
        biases: biases, and the outputs of their layers; the model must attend globally.
        norms: outputs of the first normalisations.
        heads: values of single heads after their projection.
        stages: the stages of a CNN can take the place of the blocks of a transformer.
    """

    attention: bool = False
    biases: bool = False
    norms: bool = False
    heads: bool = False
    stages: bool = False


class FunctionalMethod(nn.Module):
    """Base class of methods that explain linear functionals of the embedding, and through them the score of a class.

    A method is `linear` if the heatmap of a sum of functionals is the sum of their heatmaps.

    Args:
        target: the model to explain, a timm transformer unless the method says otherwise.
        grid: the patches that are explained.
        output: score of the class that is explained: `logit`, `probability` or `log_odds`. Of a `value`, the first two
            are the value, and the last is refused.
    """

    signed: bool = True
    linear: bool = False

    def __init_subclass__(cls) -> None:
        """Let the constructors of subclasses check their choices."""
        super().__init_subclass__()
        if "__init__" in vars(cls):
            cls.__init__ = checks_choices(cls.__init__)  # type: ignore[method-assign]

    @checks_choices
    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "logit") -> None:
        super().__init__()
        target.check_grid(grid)
        if output == "log_odds":
            check_probabilities(target, "output=log_odds", "take output=logit, the value itself")
        self.target = target.in_eval_mode()
        self.grid = grid
        self.output = output

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Explain one class (B,) of each uint8 image (B, C, H, W): heatmaps (B, rows, columns)."""
        wanted = validate_classes(classes, images, self.target.num_classes)

        def functionals_of(embeddings: Tensor) -> Tensor:
            return class_functionals(self.target, embeddings, wanted, self.output)[:, None]

        return self.explain_all(images, functionals_of)[:, 0]

    def explain(self, images: Tensor, functionals: Functionals) -> Tensor:
        """Explain linear functionals v · G(x) of the embedding in one forward pass, see `FunctionalExplainer`."""
        heatmaps = self.explain_all(images, resolve_functionals(functionals, images, self.target.embed_dim))
        return heatmaps[:, 0] if isinstance(functionals, Tensor) and functionals.dim() == 2 else heatmaps

    def explain_all(self, images: Tensor, functionals_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Explain functionals (B, V, D) that depend on the embeddings (B, D): (B, V, rows, columns)."""
        raise NotImplementedError

    def patches_on_grid(self, scores: Tensor) -> Tensor:
        """Bring scores of the model's own patches, (B, V, N'), to the grid: (B, V, rows, columns)."""
        return sum_on_grid(scores.unflatten(-1, map_shape(scores.shape[-1], self.grid.shape)), self.grid.shape)


class WhiteBox(FunctionalMethod):
    """Base class of methods that record one forward pass and take gradients of it.

    Subclasses compute heatmaps in `heatmaps`. `reads` says what is recorded, `start` is the first layer to record, and
    `rules` change the backward pass.
    """

    rules: Rules = Rules()
    reads: Reads = Reads()
    start: int = 0
    ignores_classes: bool = False

    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "logit") -> None:
        super().__init__(target, grid, output)
        self.on_stages = self.reads.stages and not is_transformer(target)
        if self.reads.attention or self.reads.biases:  # raises an InputError for Swin, which has them for each window
            self.readout(1)
        if self.reads.heads:
            head_projections(target, 0)

    def heatmaps(self, record: Record, gradients: Gradients) -> Tensor:
        """Compute heatmaps (B, V, rows, columns) from the record of a forward pass and the gradients of it."""
        raise NotImplementedError

    def explain_all(self, images: Tensor, functionals_of: Callable[[Tensor], Tensor]) -> Tensor:
        self.grid.check(images)
        with self._record() as record:
            embeddings = self.target.embed(self.target.normalise(images))
        # Outside record_pass, whose rules must not change the head
        functionals = functionals_of(embeddings)
        if self.rules.linear == "positive":
            functionals = positive_seeds(embeddings, functionals)
        heatmaps = self.heatmaps(record, partial(record.gradients, embeddings, functionals))
        return heatmaps.detach().expand(-1, functionals.shape[1], -1, -1).float()

    def _record(self) -> AbstractContextManager[Record]:
        """Record the forward pass that runs inside the returned context."""
        if self.on_stages:
            return record_stages(self.target, self.start)
        # A method that ignores classes needs no gradients, so no layer keeps its graph
        start = len(find_blocks(self.target)) if self.ignores_classes else self.start
        return record_pass(self.target, self.rules, self.reads.attention, self.reads.biases, start, self.reads.norms)

    def layers(self) -> list[nn.Module]:
        """Return the layers: the blocks of a transformer, or the stages of a CNN if the method takes them."""
        return find_stages(self.target) if self.on_stages else find_blocks(self.target)

    def on_grid(self, scores: Tensor) -> Tensor:
        """Bring scores of tokens (B, V, T), or of feature maps (B, V, h, w), to the grid: (B, V, rows, columns)."""
        if scores.dim() == 3:
            return self.patches_on_grid(scores[..., num_prefix_tokens(self.target) :])
        return sum_on_grid(scores, self.grid.shape)

    def readout(self, num_tokens: int) -> Tensor:
        """Return the weight of each output token in the embedding, (T,); see `blocks.readout`."""
        return readout(self.target, num_tokens)

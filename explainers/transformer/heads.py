"""Records queries, keys, values and outputs of the attention heads of a transformer's last blocks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from explainers.models import TargetModel
from explainers.transformer.blocks import blocks_of
from explainers.transformer.recording import Record, attached, gradients_of_inputs
from explainers.transformer.rules import Rules


class HeadsRecord(Record):
    """The record of a forward pass that `record_heads` makes.

    Args:
        target: the model.
        start: index of the first block whose heads are recorded.
        rules: rules of the backward pass.

    Attributes:
        queries: of each block from `start` on, as attention compares them: normalised and rotated, (B, A, T, d).
        keys: the same, of keys.
        values: value vectors of these blocks, (B, A, T, d).
        mixed: outputs of their heads before the projection, (B, A, T, d).
    """

    def __init__(self, target: TargetModel, start: int, rules: Rules) -> None:
        super().__init__(range(len(blocks_of(target))), rules, attention=False, start=start)
        self.queries: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.mixed: list[Tensor] = []

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        mixed = super()._attend(q, k, v, *args, **options)
        if self.entered > self.start:
            self.queries.append(q.detach())
            self.keys.append(k.detach())
            self.values.append(v.detach())
            self.mixed.append(mixed)
        return mixed


@contextmanager
def record_heads(
    target: TargetModel, start: int, rules: Rules | None = None, gradients: bool = False
) -> Iterator[HeadsRecord]:
    """Record the heads of the blocks from `start` on, during the forward pass that runs inside this context.

    Args:
        target: a timm transformer with global attention.
        start: index of the first block.
        rules: rules of the backward pass; `None` computes plain gradients.
        gradients: record the graph from block `start` on, for gradients of `mixed`.

    Raises:
        InputError: unless exactly one forward pass ran inside.

    >>> import timm
    >>> target = TargetModel(timm.create_model("test_vit", num_classes=2)).eval()
    >>> with record_heads(target, start=5) as record:
    ...     embeddings = target.embed(torch.rand(1, 3, 160, 160))
    >>> len(record.keys), record.keys[0].shape
    (1, torch.Size([1, 2, 101, 32]))
    """
    record = HeadsRecord(target, start, rules or Rules())
    with gradients_of_inputs(target) if gradients else torch.no_grad(), attached(record, target):
        yield record

"""Records the forward pass of a transformer; one backward pass then gives all gradients."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.models.gradients import BY_MASKS, check_gradients
from explainers.transformer.blocks import find_blocks
from explainers.transformer.rules import RULED, Rules, attention_factors, residual

BIASED = {F.linear: 2, F.layer_norm: 3}
"""Operation with a bias → index of the bias among its arguments."""


class Record(TorchFunctionMode):
    """The record of one forward pass of a transformer. `record_pass` makes it, and `record_direct` for direct paths.

    Args:
        blocks: indices of the blocks whose attention is recorded.
        rules: rules of the backward pass.
        attention: record attention weights and value vectors. Attention is then not fused, hence slower.
        biases: record the biases and the outputs of their layers.
        start: index of the first block whose gradients are wanted; −1 keeps the graph before the blocks, too.
        norms: record the outputs of the first normalisations.
        rows: function from the number of tokens T to a mask (T,) of the rows of attention to record, without gradients;
            of the tokens, only `final` is then recorded. `None` records all rows and tokens, with their graph.

    Attributes:
        inputs: the input x_l of each block, (B, T, D); for Swin (B, height, width, D).
        outputs: the output of each block.
        normalised: the output of each block's first normalisation, if `norms`.
        middles: the tokens between attention and MLP, after the skip connection. Recorded with the attention.
        attention: attention weights of each of `blocks`, (B, A, T, T); rows attend to columns.
        values: value vectors of each of `blocks`, (B, A, T, d). Recorded with the attention.
        biases: for each block, pairs of the output of a linear or normalisation layer and its bias. Layers after a
            block, such as the final normalisation, are listed with that block.
        final: the output of the last block, without a gradient.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        rules: Rules,
        attention: bool,
        biases: bool = False,
        start: int = 0,
        norms: bool = False,
        rows: Callable[[int], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.blocks = tuple(blocks)
        self.rules = rules
        self.records_attention = attention
        self.records_biases = biases
        self.start = start
        self.norms = norms
        self.rows = rows
        self.entered = 0
        self.inputs: list[Tensor] = []
        self.normalised: list[Tensor] = []
        self.middles: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.attention: list[Tensor] = []
        self.values: list[Tensor] = []
        self.biases: list[list[tuple[Tensor, Tensor]]] = []
        self.final = torch.empty(0)

    def gradients(self, embeddings: Tensor, functionals: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Compute the gradients of V linear functionals of the embedding in one backward pass.

        Args:
            embeddings: the embeddings of the recorded forward pass, (B, D).
            functionals: v, (B, V, D).
            tensors: recorded tensors, (B, ...) each.

        Returns:
            For each tensor its gradients, (B, V, ...); zeros for layers with a bias that the rules make constant, such
            as those of queries and keys if attention is frozen.
        """
        seeds = functionals.to(embeddings.dtype).movedim(1, 0)  # (V, B, D)
        batched = len(seeds) > 1  # a batch of one would cost more than a plain pass
        with torch.inference_mode(False):
            gradients = torch.autograd.grad(
                embeddings,
                list(tensors),
                seeds if batched else seeds[0],
                is_grads_batched=batched,
                retain_graph=True,
                allow_unused=True,
            )
        constant, found = {id(output) for layer in self.biases for output, _ in layer}, []
        for tensor, gradient in zip(tensors, gradients, strict=True):
            if gradient is not None:
                found.append(gradient.movedim(0, 1) if batched else gradient[:, None])
            elif id(tensor) in constant:
                found.append(torch.zeros_like(tensor)[:, None].expand(-1, len(seeds), *[-1] * (tensor.dim() - 1)))
            else:
                raise InputError(
                    f"expected a model whose embedding has gradients at all blocks, got one without: take {BY_MASKS}"
                )
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.entered and func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if not self.entered or self.rows is not None:
            return func(*args, **kwargs)
        if func is torch.Tensor.add:
            return self._add(*args, **kwargs)
        result = RULED[func](self.rules, *args, **kwargs) if func in RULED else func(*args, **kwargs)
        if self.records_biases and func in BIASED:
            bias = (*args, *[None] * 4)[BIASED[func]] if "bias" not in kwargs else kwargs["bias"]
            if bias is not None:
                self.biases[-1].append((result, bias))
        return result

    def enter_block(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Record the input of a block (a forward pre-hook); gradients end at the input of block `start`."""
        self.entered += 1
        if self.rows is not None:
            return args
        tokens = args[0].detach().requires_grad_() if len(self.inputs) == self.start else args[0]
        self.inputs.append(tokens)
        self.biases.append([])
        return tokens, *args[1:]

    def leave_norm(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """Record the output of a block's first normalisation (a forward hook)."""
        self.normalised.append(output)

    def leave_attention(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Record the input of a block's second normalisation (a forward pre-hook)."""
        if self.records_attention and self.rows is None:
            self.middles.append(args[0])

    def leave_block(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """Record the output of a block (a forward hook)."""
        self.final = output.detach()
        if self.rows is None:
            self.outputs.append(output)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        q, k, v = attention_factors(self.rules, q, k, v)
        if self.records_attention and self.rows is None:
            weights = attention_scores(q, k, attn_mask, scale).softmax(-1).to(v.dtype)
            if self.rules.attention == "frozen":
                weights.requires_grad_()  # keep the gradient of the weights available
            self.attention.append(weights)
            self.values.append(v)
            return weights @ v
        if self.rows is not None and self.entered - 1 in self.blocks:
            read = self.rows(q.shape[2])
            scores = attention_scores(q[:, :, read], k, None if attn_mask is None else attn_mask[..., read, :], scale)
            self.attention.append(scores.float().softmax(-1).to(v.dtype).detach())
            self.values.append(v.detach())
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)

    def _add(self, x: Tensor, other: Any, **options: Any) -> Tensor:
        if self.rules.residual == "sum":
            return torch.add(x, other, **options)
        stream = self.inputs[-1]  # skip connections add tensors of this size; rotary embeddings add parts of heads
        is_residual = isinstance(other, Tensor) and other.shape == x.shape
        if not is_residual or x.dim() < 2 or (x.numel(), x.shape[-1]) != (stream.numel(), stream.shape[-1]):
            return torch.add(x, other, **options)
        return residual(self.rules, x, other)


def attention_scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Compute the scores before the softmax, (B, A, R, T), of R queries q (B, A, R, d) and T keys k (B, A, T, d)."""
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT
    return scores if mask is None else scores + mask


@contextmanager
def record_pass(
    target: TargetModel,
    rules: Rules | None = None,
    attention: bool = False,
    biases: bool = False,
    start: int = 0,
    norms: bool = False,
) -> Iterator[Record]:
    """Record the forward pass of a transformer that runs inside this context, with its graph.

    The context enables gradients, even under `torch.no_grad`, and on exit restores hooks and flags of the model. The
    arguments are those of `Record`; without `rules`, gradients are plain.

    Raises:
        InputError: if the model has no transformer blocks, or unless exactly one forward pass ran inside.

    >>> import timm
    >>> target = TargetModel(timm.create_model("test_vit", num_classes=2)).eval()
    >>> with record_pass(target, attention=True) as record:
    ...     embeddings = target.embed(torch.rand(1, 3, 160, 160))
    >>> gradients = record.gradients(embeddings, torch.ones(1, 1, 64), record.inputs)
    >>> len(record.inputs), record.attention[0].shape, gradients[0].shape
    (6, torch.Size([1, 2, 101, 101]), torch.Size([1, 1, 101, 64]))
    """
    record = Record(range(len(find_blocks(target))), rules or Rules(), attention, biases, start, norms)
    with record_input_gradients(target), check_gradients(target, (record.rules, start)), attach_record(record, target):
        yield record


@contextmanager
def record_input_gradients(target: TargetModel) -> Iterator[None]:
    """Record the graph of what runs inside this context, without weights; on exit, restore the flags of the target."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for weight in [weight for weight in target.parameters() if weight.requires_grad]:
            stack.callback(weight.requires_grad_)
            weight.requires_grad_(False)  # otherwise autograd keeps the input of every layer
        if getattr(target.backbone, "grad_checkpointing", False):
            stack.callback(setattr, target.backbone, "grad_checkpointing", True)
            target.backbone.grad_checkpointing = False  # it would run the blocks twice
        yield


@contextmanager
def attach_record(record: Record, target: TargetModel) -> Iterator[None]:
    """Attach a record to the blocks of a target for exactly one forward pass; on exit, restore hooks and flags."""
    blocks: list[Any] = find_blocks(target)
    with ExitStack() as stack:
        for number, block in enumerate(blocks):
            stack.callback(block.register_forward_pre_hook(record.enter_block).remove)
            if record.norms:
                stack.callback(block.norm1.register_forward_hook(record.leave_norm).remove)
            stack.callback(block.norm2.register_forward_pre_hook(record.leave_attention).remove)
            stack.callback(block.register_forward_hook(record.leave_block).remove)
            if number in record.blocks:
                stack.callback(setattr, block.attn, "fused_attn", block.attn.fused_attn)
                block.attn.fused_attn = True  # `_attend` replaces the fused call
        stack.enter_context(record)
        yield
    wanted = len(record.blocks) if record.records_attention else 0
    if record.entered != len(blocks) or len(record.attention) != wanted:
        raise InputError(
            f"expected one forward pass of the {len(blocks)} blocks of {target.name}, recorded {record.entered} blocks"
            f" and {len(record.attention)} attention maps: run target.embed once inside the context"
        )


class HeadsRecord(Record):
    """The record of a forward pass that `record_heads` makes.

    Attributes:
        queries: of each block from `start` on, as attention compares them: normalised and rotated, (B, A, T, d).
        keys: the same, of keys.
        values: value vectors of these blocks, (B, A, T, d).
        mixed: outputs of their heads before the projection, (B, A, T, d).
    """

    def __init__(self, target: TargetModel, start: int, rules: Rules) -> None:
        super().__init__(range(len(find_blocks(target))), rules, attention=False, start=start)
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
    """Record the heads of the blocks from `start` on, during the one forward pass that runs inside this context.

    With `gradients`, record the graph from block `start` on, for gradients of `mixed` under the `rules`.
    """
    record = HeadsRecord(target, start, rules or Rules())
    with record_input_gradients(target) if gradients else torch.no_grad(), attach_record(record, target):
        yield record

"""What happens inside a transformer: one forward pass is recorded, one backward pass gives all gradients."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from explainers.errors import InputError
from explainers.target import TargetModel
from explainers.transformer import rules
from explainers.transformer.blocks import blocks_of
from explainers.transformer.rules import Rules

# Operations whose gradients rules change, or whose operands are recorded → the method of `Trace` that replaces them
REPLACED: dict[Any, str] = {
    F.scaled_dot_product_attention: "_attend",
    F.linear: "_linear",
    F.layer_norm: "_layer_norm",
    F.rms_norm: "_rms_norm",
    F.gelu: "_gelu",
    F.silu: "_silu",
    F.relu: "_relu",
    torch.sigmoid: "_sigmoid",
    torch.Tensor.sigmoid: "_sigmoid",
    torch.Tensor.add: "_add",
    torch.Tensor.mul: "_multiply",
}


class Trace(TorchFunctionMode):
    """Records the forward pass of a transformer; made by `trace`. Lists have one entry for each block, (B, T, ...).

    Attributes:
        inputs: the input x_l of each block, (B, T, D); of Swin (B, h, w, D).
        outputs: the output of each block.
        attention: attention weights (B, A, T, T) for A heads; rows attend to columns. Empty if not asked for.
        values: value vectors of each head, (B, A, T, d). Recorded with the attention.
        middles: the tokens between attention and MLP, with the skip connection. Recorded with the attention.
        biases: pairs of the output of a linear or normalisation layer and its bias. Layers after a block, such as the
            final normalisation, count as a part of it.
    """

    def __init__(self, rules: Rules, attention: bool, biases: bool, start: int) -> None:
        super().__init__()
        self.rules, self.records_attention, self.records_biases, self.start = rules, attention, biases, start
        self.inputs: list[Tensor] = []
        self.middles: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.attention: list[Tensor] = []
        self.values: list[Tensor] = []
        self.biases: list[list[tuple[Tensor, Tensor]]] = []

    def gradients(self, embeddings: Tensor, functionals: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Compute the gradients of V linear functionals of the embedding, in one backward pass that all V share.

        Args:
            embeddings: the embeddings of the recorded forward pass, (B, D).
            functionals: v, (B, V, D).
            tensors: recorded tensors, (B, ...) each.

        Returns:
            For each tensor its gradients, (B, V, ...).
        """
        seeds = functionals.to(embeddings.dtype).movedim(1, 0)  # (V, B, D)
        batched = len(seeds) > 1  # batching has a cost of its own
        with torch.inference_mode(False):
            found = torch.autograd.grad(
                embeddings,
                list(tensors),
                seeds if batched else seeds[0],
                is_grads_batched=batched,
                retain_graph=True,
                allow_unused=True,  # such as queries, when attention is frozen
            )
        return [
            torch.zeros_like(tensor)[:, None].expand(-1, len(seeds), *[-1] * (tensor.dim() - 1))
            if gradient is None
            else gradient.movedim(0, 1)
            if batched
            else gradient[:, None]
            for tensor, gradient in zip(tensors, found, strict=True)
        ]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Looked up by name: bound methods in a table would be a cycle, which keeps the memory of a batch alive for long
        replacement = getattr(self, REPLACED[func]) if self.inputs and func in REPLACED else func
        return replacement(*args, **(kwargs or {}))

    def enter_block(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Record the input of a block (a forward pre-hook); gradients end at the input of block `start`."""
        tokens = args[0].detach().requires_grad_() if len(self.inputs) == self.start else args[0]
        self.inputs.append(tokens)
        self.biases.append([])
        return tokens, *args[1:]

    def leave_attention(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Record the input of a block's second normalisation (a forward pre-hook)."""
        if self.records_attention:
            self.middles.append(args[0])

    def leave_block(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """Record the output of a block (a forward hook)."""
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
        if self.rules.attention == "halved":
            q, k, v = rules.scale_gradient(q, 0.25), rules.scale_gradient(k, 0.25), rules.scale_gradient(v, 0.5)
        elif self.rules.attention == "frozen":
            q, k = q.detach(), k.detach()
        if not self.records_attention:
            return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)
        scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT
        if attn_mask is not None:
            scores = scores + attn_mask
        weights = scores.softmax(-1).to(v.dtype)
        if self.rules.attention == "frozen":
            weights.requires_grad_()  # so that its own gradient can still be asked for
        self.attention.append(weights)
        self.values.append(v)
        return weights @ v

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = F.linear(x, weight, bias)
        y = rules.linear(x, weight, y) if self.rules.linear == "positive" else y
        return self._record_bias(y, bias)

    def _layer_norm(
        self, x: Tensor, shape: list[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Tensor:
        norm = rules.layer_norm if self.rules.norm == "frozen" else F.layer_norm
        return self._record_bias(norm(x, shape, weight, bias, eps), bias)

    def _rms_norm(self, x: Tensor, shape: list[int], weight: Any = None, eps: float | None = None) -> Tensor:
        return (rules.rms_norm if self.rules.norm == "frozen" else F.rms_norm)(x, shape, weight, eps)

    def _record_bias(self, y: Tensor, bias: Tensor | None) -> Tensor:
        if self.records_biases and bias is not None:
            self.biases[-1].append((y, bias))
        return y

    def _gelu(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        return self._activation(x, F.gelu(x, *args, **options))

    def _silu(self, x: Tensor, inplace: bool = False) -> Tensor:
        return self._activation(x, F.silu(x))

    def _relu(self, x: Tensor, inplace: bool = False) -> Tensor:
        return self._activation(x, F.relu(x))

    def _activation(self, x: Tensor, y: Tensor) -> Tensor:
        return rules.activation(x, y) if self.rules.activation == "ratio" else y

    def _sigmoid(self, x: Tensor) -> Tensor:
        return x.sigmoid().detach() if self.rules.activation == "ratio" else x.sigmoid()

    def _multiply(self, x: Tensor, other: Any) -> Tensor:
        both = isinstance(other, Tensor) and x.shape == other.shape and x.requires_grad and other.requires_grad
        if both and self.rules.activation == "ratio":
            return rules.scale_gradient(x, 0.5) * rules.scale_gradient(other, 0.5)
        return torch.mul(x, other)

    def _add(self, x: Tensor, other: Any, **options: Any) -> Tensor:
        stream = self.inputs[-1]  # only sums of its size are skip connections; rotary embeddings add parts of heads
        is_residual = isinstance(other, Tensor) and other.shape == x.shape
        is_residual &= x.dim() > 1 and (x.numel(), x.shape[-1]) == (stream.numel(), stream.shape[-1])
        if self.rules.residual == "sum" or not is_residual:
            return torch.add(x, other, **options)
        if self.rules.residual == "signed":
            return rules.signed_residual(x, other, self.rules.gamma)
        return rules.conserved_residual(x, other)


@contextmanager
def trace(
    target: TargetModel, rules: Rules | None = None, attention: bool = False, biases: bool = False, start: int = 0
) -> Iterator[Trace]:
    """Record the forward pass of a transformer that runs inside this context.

    Gradients are enabled inside, whatever is around. Hooks and flags of the model are afterwards as before.

    Args:
        target: the model to record; a timm transformer.
        rules: rules of the backward pass; by default it computes gradients.
        attention: record attention weights and value vectors, which the fused attention does not compute.
        biases: record the biases and the outputs of their layers.
        start: index of the first block whose gradients are wanted.

    Raises:
        InputError: for models without transformer blocks, and if nothing was recorded.

    >>> import timm
    >>> target = TargetModel(timm.create_model("test_vit", num_classes=2)).eval()
    >>> with trace(target, attention=True) as record:
    ...     embeddings = target.embed(torch.rand(1, 3, 160, 160))
    >>> gradients = record.gradients(embeddings, torch.ones(1, 1, 64), record.inputs)
    >>> len(record.inputs), record.attention[0].shape, gradients[0].shape
    (6, torch.Size([1, 2, 101, 101]), torch.Size([1, 1, 101, 64]))
    """
    record = Trace(rules or Rules(), attention, biases, start)
    blocks: list[Any] = list(blocks_of(target))
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for weight in [weight for weight in target.parameters() if weight.requires_grad]:
            stack.callback(weight.requires_grad_)
            weight.requires_grad_(False)  # or autograd would keep the input of every layer for the weight's gradient
        if getattr(target.backbone, "grad_checkpointing", False):
            stack.callback(setattr, target.backbone, "grad_checkpointing", True)
            target.backbone.grad_checkpointing = False  # it would run the blocks twice
        for block in blocks:
            stack.callback(block.register_forward_pre_hook(record.enter_block).remove)
            stack.callback(block.norm2.register_forward_pre_hook(record.leave_attention).remove)
            stack.callback(block.register_forward_hook(record.leave_block).remove)
            stack.callback(setattr, block.attn, "fused_attn", block.attn.fused_attn)
            block.attn.fused_attn = True  # the one call that `_attend` replaces
        stack.enter_context(record)
        yield record
    if len(record.inputs) != len(blocks) or attention and len(record.attention) != len(blocks):
        raise InputError(
            f"expected one forward pass of the {len(blocks)} blocks of {target.name}, recorded {len(record.inputs)}"
            f" blocks and {len(record.attention)} attention maps: run target.embed once inside the context"
        )

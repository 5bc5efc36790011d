"""Methods that read attention maps, alone or with their gradients, relevance, or the transformations of tokens."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import check_positive
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.posthoc.layerwise import PLUS, Rollout, Transitions, add_maps, rollout
from explainers.posthoc.propagation import LRP_RULES
from explainers.posthoc.white_box import Gradients, Output, Reads, WhiteBox, positive_seeds
from explainers.transformer.blocks import (
    embed_tokens,
    find_blocks,
    head_projections,
    layer_index,
    num_prefix_tokens,
    value_paths,
)
from explainers.transformer.recording import Record, record_pass

Measured = Literal["both", "length", "direction"]
"""What transformation weights measure of each token."""


def positive_attention(attention: Tensor, gradient: Tensor) -> Tensor:
    """Compute E_h[(∂y/∂A ⊙ A)⁺], the mean over heads (Chefer et al., ICCV 2021, Equation 5).

    Of attention weights A (B, A, T, T) and gradients (B, V, A, T, T): (B, V, T, T).
    """
    return (attention[:, None] * gradient).clamp(min=0).mean(2)


class RawAttention(Transitions):
    """Attention Ā_l that the class token pays to the patches in the last layer, mean over heads."""

    ignores_classes = True
    signed = False

    def transitions(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        return [weights.mean(1)[:, None] for weights in record.attention[start:]]


class AttentionGradient(Transitions):
    """Plain gradients of the attention weights, mean over heads ("vanilla gradients", SkipPLUS, Figure 8)."""

    linear = True

    def transitions(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        return [gradient.mean(2) for gradient in gradients(record.attention[start:])]


class AttentionRollout(Rollout):
    """Attention rollout, R ← (0.5 I + 0.5 Ā_l) R: Rollout of RawAttention (Abnar & Zuidema, 2020)."""

    def __init__(self, target: TargetModel, grid: PatchGrid) -> None:
        super().__init__(target, grid, RawAttention)


class AttentionGradCAM(Transitions):
    """Grad-CAM on the attention map of the last layer: heads weighted by their mean gradient over the patches.

    Chefer et al. (2021) adapt Grad-CAM to transformers in this way. Each row of a head's map has its own weight.

    Args:
        relu: set negative values of the mean over heads to 0; if all are negative, the whole heatmap is 0.
    """

    def __init__(
        self, target: TargetModel, grid: PatchGrid, output: Output = "logit", layer: int = -1, relu: bool = True
    ) -> None:
        super().__init__(target, grid, output, layer)
        self.relu = relu
        self.signed = not relu

    def transitions(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        maps, prefix = record.attention[start:], num_prefix_tokens(self.target)
        map_gradients = gradients(maps)
        matrices = [
            (weights[:, None] * gradient[..., prefix:].mean(-1, keepdim=True)).mean(2)
            for weights, gradient in zip(maps, map_gradients, strict=True)
        ]
        return [matrix.clamp(min=0) for matrix in matrices] if self.relu else matrices


class GenAtt(Transitions):
    """Attention times its positive gradient in each layer: T_l = E_h[(∂y/∂A ⊙ A)⁺] (Chefer et al., ICCV 2021)."""

    identity, weight = 1.0, 1.0
    signed = False

    def transitions(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        maps = record.attention[start:]
        return [positive_attention(*pair) for pair in zip(maps, gradients(maps), strict=True)]


class GAE(Rollout):
    """Generic attention explainability, R ← R + T_l R: Rollout of GenAtt (Chefer et al., ICCV 2021, Eq. 5 and 6)."""

    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "logit") -> None:
        super().__init__(target, grid, partial(GenAtt, output=output))


class GradSAM(PLUS):
    """Gradient self-attention maps (Barkan et al., 2021): PLUS of GenAtt at the class token (SkipPLUS, Section 3.4)."""

    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "logit") -> None:
        super().__init__(target, grid, partial(GenAtt, output=output))


class PartialLRP(Transitions):
    """Relevance of the attention in the last layer, its positive part, mean over heads (Voita et al., 2019)."""

    rules = LRP_RULES
    signed = False

    def transitions(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        return [relevance.clamp(min=0).mean(2) for relevance in _relevance(record.attention[start:], gradients)]


def _relevance(attention: list[Tensor], gradients: Gradients) -> list[Tensor]:
    """Compute the relevance (B, V, A, T, T) of attention weights of each layer under rules that change gradients.

    The product of weights and values has the relevance weights × gradients, half of which is the weights' (Equation 9).
    """
    return [0.5 * weights[:, None] * each for weights, each in zip(attention, gradients(attention), strict=True)]


class TransformerAttribution(WhiteBox):
    """Transformer Attribution: Π_l (I + E_h[(∂y/∂A ⊙ R_A)⁺]) (Chefer et al., CVPR 2021, Equation 13).

    R_A is the relevance of the attention weights A. A separate forward and backward pass with the rules of `LRP`
    computes it.

    Args:
        start: index of the first layer that is included; negative from the last. The authors' evaluation code has 1.
    """

    reads = Reads(attention=True)
    signed = False
    forward_passes = 2

    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "logit", start: int = 0) -> None:
        super().__init__(target, grid, output)
        self.start = layer_index(target, start)

    def explain_all(self, images: Tensor, functionals_of: Callable[[Tensor], Tensor]) -> Tensor:
        self.grid.check(images)
        with record_pass(self.target, LRP_RULES, attention=True, start=self.start) as lrp:
            embeddings = self.target.embed(self.target.normalise(images))
        seeds = positive_seeds(embeddings, functionals_of(embeddings))
        relevance = _relevance(lrp.attention[self.start :], partial(lrp.gradients, embeddings, seeds))
        with record_pass(self.target, self.rules, attention=True, start=self.start) as record:
            embeddings = self.target.embed(self.target.normalise(images))
        map_gradients = record.gradients(embeddings, functionals_of(embeddings), record.attention[self.start :])
        matrices = [(each * part).clamp(min=0).mean(2) for each, part in zip(map_gradients, relevance, strict=True)]
        return self.on_grid(rollout(matrices, self.readout(matrices[0].shape[-1]), 1, 1)).detach().float()


class TAM(WhiteBox):
    """Transition attention maps (Yuan et al., NeurIPS 2021): a Markov chain from the last layer to the first.

    The first state is the class token's attention in the last layer. Each earlier layer l maps the state to
    state · (I + Ā_l), where Ā_l is its mean attention over heads. The heatmap is the final state times the integrated
    gradient of the last layer's attention, the mean over images between the mean colour and the image.

    Args:
        steps: number of images on the path of the integral, both ends included.
    """

    reads = Reads(attention=True)
    signed = False

    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "logit", steps: int = 20) -> None:
        super().__init__(target, grid, output)
        check_positive(steps=steps)
        self.steps = self.forward_passes = steps

    def explain_all(self, images: Tensor, functionals_of: Callable[[Tensor], Tensor]) -> Tensor:
        self.grid.check(images)
        functionals, attention, gradients = None, [], []
        top = len(find_blocks(self.target)) - 1
        for alpha in torch.linspace(1, 0, self.steps).tolist():
            with record_pass(self.target, self.rules, attention=True, start=top) as record:
                embeddings = self.target.embed(alpha * self.target.normalise(images))
            if functionals is None:  # alpha is 1: this is the image itself
                functionals, attention = functionals_of(embeddings), [weights.detach() for weights in record.attention]
            gradients.append(record.gradients(embeddings, functionals, record.attention[-1:])[0])
        integrated = add_maps(gradients) / self.steps
        readout = self.readout(integrated.shape[-1])
        *earlier, last = (weights.mean(1)[:, None] for weights in attention)
        states = rollout(earlier, readout @ last, 1, 1)
        return self.on_grid(states * (readout @ integrated.clamp(min=0).mean(2))).float()


class LeGrad(WhiteBox):
    """LeGrad (Bousselham et al., 2024): positive gradients of the attention maps, mean over heads, rows and layers.

    The model's last normalisation, pooling and head score the output of each layer l as if l were the last layer. The
    gradient of this score is taken at the attention map of layer l.
    """

    reads = Reads(attention=True)
    signed = False

    def explain_all(self, images: Tensor, functionals_of: Callable[[Tensor], Tensor]) -> Tensor:
        self.grid.check(images)
        with record_pass(self.target, self.rules, attention=True) as record:
            embeddings = self.target.embed(self.target.normalise(images))
            of_layers = [embed_tokens(self.target, tokens) for tokens in record.outputs]
        functionals = functionals_of(embeddings)
        maps = [
            record.gradients(embedding, functionals, [weights])[0].clamp(min=0).mean((2, 3))
            for embedding, weights in zip(of_layers, record.attention, strict=True)
        ]
        return self.on_grid(add_maps(maps) / len(maps)).detach().float()


def transformation_weights(
    before: Tensor, after: Tensor, scale: Literal["softmax", "mean"] = "mean", measured: Measured = "both"
) -> Tensor:
    """Compute W_i = ‖Ẽ_i‖ / ‖E_i‖ · NECC_i: how TokenTM weighs the change of length and direction of each token.

    Args:
        before: tokens E before the transformation, (B, T, D).
        after: tokens Ẽ after the transformation, (B, T, D).
        scale: NECC_i is exp(cos(E_i, Ẽ_i)), divided by its sum over tokens (`softmax`) or its mean (`mean`).
        measured: `length` leaves out NECC_i, `direction` leaves out ‖Ẽ_i‖ / ‖E_i‖.
    """
    length = after.norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-8)
    correlation = F.cosine_similarity(before, after, dim=-1).softmax(-1)
    direction = correlation * (before.shape[1] if scale == "mean" else 1)
    return {"both": length * direction, "length": length, "direction": direction}[measured]


class TokenTM(WhiteBox):
    """TokenTM (Wu et al., CVPR 2024): attention and transformations of tokens, R_l = U_MLP U_attention R_{l−1}.

    R_0 = diag(‖E_i‖) contains the lengths of the tokens that enter the first layer; U_attention =
    I + E_h[(∂y/∂A ⊙ A)⁺] diag(W), and U_MLP = I + diag(W), each with its own transformation weights W. The heatmap is
    the class token's row of R after the last layer.

    The implementation follows the abstract and the supplement of the paper, without its main text; what they leave open
    is an option. According to the abstract, the method aggregates attention weights and tokens "before and after" each
    transformation, so by default the W of attention compares the tokens with their value vectors.

    Args:
        transformed: the tokens Ẽ. `values`: for attention, the projected values of the tokens before attention mixes
            them; for the MLP, its output. `stream`: the sum of each with its skip connection, as in LibraGrad's code.
        scale: normalisation of the correlations, see `transformation_weights`; LibraGrad's code has `softmax`.
        heads: `together` averages (∂y/∂A ⊙ A)⁺ over heads, as GAE does. `apart` averages A and (∂y/∂A)⁺ over heads and
            multiplies the means, as LibraGrad's code does.
        mlp: include U_MLP.
        measured: what W contains: `both`, or as an ablation the `length` or the `direction` alone; R_0 stays.
    """

    reads = Reads(attention=True)
    signed = False

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        output: Output = "logit",
        transformed: Literal["values", "stream"] = "values",
        scale: Literal["softmax", "mean"] = "mean",
        heads: Literal["together", "apart"] = "together",
        mlp: bool = True,
        measured: Measured = "both",
    ) -> None:
        super().__init__(target, grid, output)
        if transformed == "values":
            head_projections(target, 0)  # raises an InputError now rather than in the first batch
        self.transformed = transformed
        self.scale = scale
        self.heads = heads
        self.mlp = mlp
        self.measured = measured

    def heatmaps(self, record: Record, gradients: Gradients) -> Tensor:
        row = self.readout(record.inputs[0].shape[1]).expand(1, 1, -1)
        layers = list(enumerate(zip(record.attention, gradients(record.attention), strict=True)))
        for layer, (attention, gradient) in reversed(layers):
            of_attention, of_mlp = self._weights(record, layer)
            if self.heads == "together":
                moved = positive_attention(attention, gradient)
            else:
                moved = attention.mean(1)[:, None] * gradient.clamp(min=0).mean(2)
            if self.mlp:
                row = row * (1 + of_mlp[:, None])
            row = row + (row[..., None, :] @ moved)[..., 0, :] * of_attention[:, None]
        return self.on_grid(row * record.inputs[0].norm(dim=-1)[:, None])

    def _weights(self, record: Record, layer: int) -> tuple[Tensor, Tensor]:
        """Compute the transformation weights of attention and of the MLP, (B, T) each."""
        tokens, middle, output = record.inputs[layer], record.middles[layer], record.outputs[layer]
        if self.transformed == "stream":
            pairs = (tokens, middle), (middle, output)
        else:
            pairs = (tokens, value_paths(self.target, record.values[layer], layer).sum(1)), (middle, output - middle)
        of_attention, of_mlp = (transformation_weights(*pair, self.scale, self.measured).detach() for pair in pairs)
        return of_attention, of_mlp

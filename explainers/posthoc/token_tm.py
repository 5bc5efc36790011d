"""TokenTM: attention weighted by how much each layer transforms the tokens (Wu et al., CVPR 2024)."""

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.posthoc.attention import positive_attention
from explainers.posthoc.white_box import Gradients, Output, Reads, WhiteBox
from explainers.transformer.blocks import head_projections, value_paths
from explainers.transformer.recording import Record

Measured = Literal["both", "length", "direction"]
"""What transformation weights measure of each token."""


def transformation_weights(
    before: Tensor, after: Tensor, scale: Literal["softmax", "mean"] = "mean", measured: Measured = "both"
) -> Tensor:
    """Compute W_i = ‖Ẽ_i‖ / ‖E_i‖ · NECC_i: how a transformation changes the length and the direction of each token.

    Args:
        before: tokens E before the transformation, (B, T, D).
        after: tokens Ẽ after the transformation, (B, T, D).
        scale: NECC_i is exp(cos(E_i, Ẽ_i)), divided by its sum over tokens (`softmax`) or its mean (`mean`).
        measured: `length` leaves out NECC_i, `direction` leaves out ‖Ẽ_i‖ / ‖E_i‖.

    >>> import torch
    >>> tokens = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> transformation_weights(tokens, 3 * tokens).tolist()
    [[3.0, 3.0]]
    >>> transformation_weights(tokens, 3 * tokens, measured="direction").tolist()
    [[1.0, 1.0]]
    """
    length = after.norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-8)
    correlation = F.cosine_similarity(before, after, dim=-1).softmax(-1)
    direction = correlation * (before.shape[1] if scale == "mean" else 1)
    return {"both": length * direction, "length": length, "direction": direction}[measured]


class TokenTM(WhiteBox):
    """Follows attention and transformations of tokens through all layers: R_l = U_MLP U_attention R_{l−1}.

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

    Raises:
        InputError: if a scale of correlations is given to weights without them.
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
        if measured == "length" and scale != "mean":
            raise InputError(f"expected no scale of correlations with measured=length, got scale={scale}: leave it out")
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
            if self.mlp:
                row = row * (1 + of_mlp[:, None])
            row = row + (row[..., None, :] @ self._mixed(attention, gradient))[..., 0, :] * of_attention[:, None]
        return self.on_grid(row * record.inputs[0].norm(dim=-1)[:, None])

    def _mixed(self, attention: Tensor, gradient: Tensor) -> Tensor:
        """Combine attention with its gradient, and average over heads: (B, V, T, T)."""
        if self.heads == "together":
            return positive_attention(attention, gradient)
        return attention.mean(1)[:, None] * gradient.clamp(min=0).mean(2)

    def _weights(self, record: Record, layer: int) -> tuple[Tensor, Tensor]:
        """Compute the transformation weights of attention and of the MLP, (B, T) each."""
        tokens, middle, output = record.inputs[layer], record.middles[layer], record.outputs[layer]
        if self.transformed == "stream":
            pairs = (tokens, middle), (middle, output)
        else:
            pairs = (tokens, value_paths(self.target, record.values[layer], layer).sum(1)), (middle, output - middle)
        of_attention, of_mlp = (transformation_weights(*pair, self.scale, self.measured).detach() for pair in pairs)
        return of_attention, of_mlp

"""What the attention of a block carries between tokens: AttIN, GlobEnc, ALTI."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.posthoc.layerwise import Transitions, rollout
from explainers.posthoc.white_box import Gradients, Output, Reads
from explainers.transformer.blocks import find_blocks, value_paths
from explainers.transformer.recording import Record


def contribution_norms(attention: Tensor, paths: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Compute ‖T_i(x_j)‖₂, where T_i(x_j) = Σ_h A^h_ij f_h(x_j) + [i = j] x_i is what token j adds to token i.

    The norms follow from inner products of the vectors f_h(x_j). The T² vectors T_i(x_j) are never computed.

    Args:
        attention: attention weights A^h_ij, (B, A, T, T).
        paths: f_h(x_j), the value of token j in head h after the output projection, (B, A, T, D).
        tokens: x, (B, T, D); `None` leaves out the skip connection, [i = j] x_i.

    Returns:
        (B, T, T); row i, column j.
    """
    heads_last = attention.permute(0, 2, 3, 1)  # (B, T, T, A)
    products = torch.einsum("bgtd,bhtd->btgh", paths, paths)  # (B, T, A, A)
    squares = (torch.einsum("bijg,bjgh->bijh", heads_last, products) * heads_last).sum(-1)
    if tokens is not None:
        own = torch.einsum("bhii,bhid->bid", attention, paths)
        squares = squares + torch.diag_embed((tokens.square() + 2 * tokens * own).sum(-1))
    return squares.clamp(min=0).sqrt()


def alti_contributions(attention: Tensor, paths: Tensor, tokens: Tensor, output: Tensor) -> Tensor:
    """Compute the contributions of ALTI (Ferrando et al., 2022, Equations 8 and 9): each row sums to 1.

    c_ij = max(0, ‖y_i‖₁ − ‖y_i − T_i(x_j)‖₁), divided by the sum of its row, for the `output` y (B, T, D); the other
    arguments, and the shape of the result, are those of `contribution_norms`.
    """
    rows = []
    for i in range(tokens.shape[1]):  # one row at a time: all T² vectors T_i(x_j) take too much memory
        parts = torch.einsum("bhj,bhjd->bjd", attention[:, :, i], paths)
        parts[:, i] += tokens[:, i]
        y = output[:, i, None]
        rows.append((y.abs().sum(-1) - (y - parts).abs().sum(-1)).clamp(min=0))
    contributions = torch.stack(rows, 1)
    return contributions / contributions.sum(-1, keepdim=True).clamp(min=1e-12)


class Contributions(Transitions):
    """Base class of methods that measure what token j adds to token i by the attention of a block, for every class."""

    ignores_classes = True
    signed = False
    reads = Reads(attention=True, heads=True)
    identity, weight = 0.0, 1.0  # the matrices contain the skip connection

    @torch.no_grad()
    def transitions(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        return [
            self.contributions(record, layer, value_paths(self.target, record.values[layer], layer))[:, None]
            for layer in range(start, len(record.inputs))
        ]

    def contributions(self, record: Record, layer: int, paths: Tensor) -> Tensor:
        """Compute the matrix (B, T, T) of a layer from its f_h(x_j), the `paths` (B, A, T, D)."""
        raise NotImplementedError


class AttIN(Contributions):
    """Attention × Input Norm: ‖Σ_h A^h_ij f_h(x_j)‖₂ (Kobayashi et al., EMNLP 2020; SkipPLUS, Section E.2).

    PLUS sums the norms of all layers as they are. Rollout first divides each row by its sum (SkipPLUS, Equation 2).
    """

    identity, weight = 0.5, 0.5

    def contributions(self, record: Record, layer: int, paths: Tensor) -> Tensor:
        return contribution_norms(record.attention[layer], paths)

    def rollout(self, record: Record, gradients: Gradients, start: int) -> Tensor:
        matrices = [norms / norms.sum(-1, keepdim=True) for norms in self.transitions(record, gradients, start)]
        return self.on_grid(rollout(matrices, self.readout(matrices[-1].shape[-1]), self.identity, self.weight))


class GlobEnc(Contributions):
    """Norms of what each token adds to each other, after the block's second normalisation (SkipPLUS, Section E.2).

    GlobEnc (Modarressi et al., NAACL 2022) includes attention, skip connections and both normalisations of a block, but
    not its MLP. In a pre-norm block, the second one normalises the sum of attention and first skip connection. Its
    scale is the same for all that is added to one token: it vanishes, because each row of the matrix sums to 1.
    """

    def contributions(self, record: Record, layer: int, paths: Tensor) -> Tensor:
        norm = find_blocks(self.target)[layer].norm2
        added, own = (normalise_summands(norm, each) for each in (paths, record.inputs[layer]))
        norms = contribution_norms(record.attention[layer], added, own)
        return norms / norms.sum(-1, keepdim=True)


def normalise_summands(norm: Any, summands: Tensor) -> Tensor:
    """Apply LayerNorm, RMSNorm or nothing to summands (..., D) of tokens, without biases and the scales of tokens."""
    centred = summands - summands.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else summands
    weight = getattr(norm, "weight", None)
    return centred if weight is None else centred * weight


class ALTI(Contributions):
    """How close each token's summand T_i(x_j) is to the sum y_i, in the L1 norm (Ferrando et al., EMNLP 2022).

    Args:
        sum_to: the sums y_i. `attention`: the tokens after attention and its skip connection, which are the sums of the
            summands and biases. `block`: the output of the whole block, as in SkipPLUS's code.
    """

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        output: Output = "logit",
        layer: int = -1,
        sum_to: Literal["attention", "block"] = "attention",
    ) -> None:
        super().__init__(target, grid, output, layer)
        self.sum_to = sum_to

    def contributions(self, record: Record, layer: int, paths: Tensor) -> Tensor:
        sums = record.middles if self.sum_to == "attention" else record.outputs
        return alti_contributions(record.attention[layer], paths, record.inputs[layer], sums[layer])

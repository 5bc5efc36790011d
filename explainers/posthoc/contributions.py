"""What attention carries between tokens: AttIN, GlobEnc, ALTI in each block; paths to the output."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from explainers.errors import checks_choices
from explainers.masking import PatchGrid
from explainers.posthoc.layerwise import Transitions, rollout
from explainers.posthoc.white_box import Gradients, Output, class_functionals, sum_on_grid
from explainers.target import TargetModel
from explainers.target.inputs import Functionals, checked_classes, functionals_at
from explainers.transformer.blocks import blocks_of, layer_index, middle_layer, value_paths
from explainers.transformer.direct_paths import check_direct, direct_paths, record_direct
from explainers.transformer.path_flow import path_flow, record_flow
from explainers.transformer.recording import Record


def contribution_norms(attention: Tensor, paths: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Compute ‖T_i(x_j)‖₂, where T_i(x_j) = Σ_h A^h_ij f_h(x_j) + [i = j] x_i is what token j adds to token i.

    The norms are computed from inner products of the vectors f_h(x_j). The T² vectors T_i(x_j) are never computed.

    Args:
        attention: attention weights, the A^h_ij of the formula, (B, A, T, T).
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

    c_ij = max(0, ‖y_i‖₁ − ‖y_i − T_i(x_j)‖₁), divided by the sum of its row.

    Args:
        attention: attention weights, (B, A, T, T).
        paths: f_h(x_j), (B, A, T, D), see `contribution_norms`.
        tokens: x, (B, T, D).
        output: y, (B, T, D).

    Returns:
        (B, T, T).
    """
    rows = []
    for i in range(tokens.shape[1]):  # one row at a time: all T² vectors T_i(x_j) take too much memory
        parts = torch.einsum("bhj,bhjd->bjd", attention[:, :, i], paths)
        parts[:, i] += tokens[:, i]
        y = output[:, i, None]
        rows.append((y.abs().sum(-1) - (y - parts).abs().sum(-1)).clamp(min=0))
    contributions = torch.stack(rows, 1)
    return contributions / contributions.sum(-1, keepdim=True).clamp(min=1e-12)


class AttIN(Transitions):
    """Attention × Input Norm: ‖Σ_h A^h_ij f_h(x_j)‖₂ (Kobayashi et al., EMNLP 2020; SkipPLUS, Section E.2).

    PLUS sums the norms of all layers as they are. Rollout first divides each row by its sum (SkipPLUS, Equation 2).
    """

    ignores_classes = True
    projects = True

    @torch.no_grad()
    def transitions(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        return [
            contribution_norms(record.attention[layer], value_paths(self.target, record.values[layer], layer))[:, None]
            for layer in range(start, len(record.inputs))
        ]

    def rollout(self, record: Record, gradients: Gradients, start: int) -> Tensor:
        matrices = [norms / norms.sum(-1, keepdim=True) for norms in self.transitions(record, gradients, start)]
        return self.on_grid(rollout(matrices, self.readout(matrices[-1].shape[-1]), self.identity, self.weight))


class GlobEnc(Transitions):
    """Norms of what each token adds to each other, by attention and skip connection (Modarressi et al., NAACL 2022).

    GlobEnc includes the block's second skip connection but not its MLP. In a pre-norm block, the tokens then leave the
    block as the sum of attention and first skip connection. SkipPLUS's code adds the second normalisation of this sum;
    here it is left out. Each row of the matrix sums to 1.
    """

    ignores_classes = True
    projects = True
    identity, weight = 0.0, 1.0  # the matrices contain the skip connection

    def transitions(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        matrices = []
        for layer in range(start, len(record.inputs)):
            paths = value_paths(self.target, record.values[layer], layer)
            norms = contribution_norms(record.attention[layer], paths, record.inputs[layer]).detach()
            matrices.append((norms / norms.sum(-1, keepdim=True))[:, None])
        return matrices


class ALTI(Transitions):
    """How close each token's summand T_i(x_j) is to the sum y_i, in the L1 norm (Ferrando et al., EMNLP 2022).

    Args:
        target: the model to explain, a timm transformer with global attention.
        grid: the patches that are explained.
        output: not used.
        layer: index of the layer whose map is the heatmap; negative from the last.
        sum_to: the sums y_i. `attention`: the tokens after attention and its skip connection, which are the sums of the
            summands and biases. `block`: the output of the whole block, as in SkipPLUS's code.
    """

    ignores_classes = True
    projects = True
    identity, weight = 0.0, 1.0  # the matrices contain the skip connection

    @checks_choices
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

    @torch.no_grad()
    def transitions(self, record: Record, gradients: Gradients, start: int) -> list[Tensor]:
        sums = record.middles if self.sum_to == "attention" else record.outputs
        return [
            alti_contributions(
                record.attention[layer],
                value_paths(self.target, record.values[layer], layer),
                record.inputs[layer],
                sums[layer],
            )[:, None]
            for layer in range(start, len(record.inputs))
        ]


class DirectPaths(nn.Module):
    """What attention moves directly from each patch into the score of a class, summed over the blocks from `start` on.

    AnyHead adds this heatmap to the prediction of its network; here the heatmap is an explainer of its own.

    Args:
        target: the model to explain, a timm transformer with a class token or average pooling.
        grid: the patches that are explained.
        output: score of the class that is explained: `logit`, `probability` or `log_odds`.
        start: index of the first block; negative from the last; `None` for the middle one, as in SkipPLUS.

    Raises:
        InputError: for models whose direct paths are not known, see `explainers.transformer.direct_paths`.
    """

    linear = True

    @checks_choices
    def __init__(
        self, target: TargetModel, grid: PatchGrid, output: Output = "logit", start: int | None = None
    ) -> None:
        super().__init__()
        target.check_grid(grid)
        self.target = target.eval()
        self.grid = grid
        self.output = output
        first = middle_layer(blocks_of(target)) if start is None else layer_index(target, start)
        self.blocks = range(first, len(blocks_of(target)))
        check_direct(target, self.blocks)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Explain one class (B,) of each uint8 image (B, C, H, W): heatmaps (B, P, P)."""
        self.grid.check(images)
        wanted = checked_classes(classes, images, self.target.num_classes)
        return self._heatmaps(images, lambda of: class_functionals(self.target, of, wanted, self.output)[:, None])[:, 0]

    def explain(self, images: Tensor, functionals: Functionals) -> Tensor:
        """Explain linear functionals v · G(x) of the embedding.

        Args:
            images: uint8, (B, C, H, W).
            functionals: v, (B, D), or (B, V, D) for several of each image; or a function of the embeddings (B, D) →
                (B, V, D).

        Returns:
            (B, P, P) or (B, V, P, P).
        """
        self.grid.check(images)
        heatmaps = self._heatmaps(images, functionals_at(functionals, images, self.target.embed_dim))
        return heatmaps[:, 0] if isinstance(functionals, Tensor) and functionals.dim() == 2 else heatmaps

    def _heatmaps(self, images: Tensor, functionals_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Explain functionals (B, V, D) that depend on the embeddings (B, D): heatmaps (B, V, P, P)."""
        with torch.no_grad():
            embeddings, scores_of = self._recorded(images)
        functionals = functionals_of(embeddings)
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            scores = scores_of(functionals.float())
        return sum_on_grid(scores.unflatten(-1, (round(scores.shape[-1] ** 0.5), -1)), self.grid.side)

    def _recorded(self, images: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The embeddings (B, D) of uint8 images, and a function of functionals (B, V, D) → scores (B, V, N)."""
        with record_direct(self.target, self.blocks) as record:
            embeddings = self.target.embed(self.target.normalise(images))
        vectors = direct_paths(self.target, record).float().sum(1)  # (B, N, D)
        return embeddings, lambda functionals: functionals @ vectors.mT


class PathFlow(DirectPaths):
    """Paths from each patch into the score of a class, also through later MLPs and other patches (this project's own).

    See `explainers.transformer.path_flow`. Like direct paths, it explains all classes and functionals from one forward
    pass. Models with average pooling, or with other MLPs than two linear layers around a GELU, have no MLP paths: their
    direct paths flow between patches.

    Args:
        target: the model to explain, a timm transformer with a class token or average pooling.
        grid: the patches that are explained.
        output: score of the class that is explained: `logit`, `probability` or `log_odds`.
        start: index of the first block; negative from the last; `None` for the middle one, as in SkipPLUS.

    Raises:
        InputError: for models whose direct paths are not known, see `explainers.transformer.direct_paths`.
    """

    def _recorded(self, images: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        with record_flow(self.target, self.blocks) as record:
            embeddings = self.target.embed(self.target.normalise(images))
        return embeddings, lambda functionals: path_flow(self.target, record, functionals).float().sum(1).mT

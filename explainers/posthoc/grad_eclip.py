"""Grad-ECLIP: gradients of the class token's attention output weigh the channels of the patches' values."""

from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import check_integers, check_range, checks_choices
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.posthoc.layerwise import sum_of
from explainers.posthoc.white_box import Gradients, Output, WhiteBox, sum_on_grid
from explainers.transformer.blocks import blocks_of, head_projections, num_prefix_tokens, project_heads
from explainers.transformer.heads import HeadsRecord, record_heads
from explainers.transformer.recording import Record


def loosened_weights(queries: Tensor, keys: Tensor) -> Tensor:
    """Compute λ_i, the mean cosine between queries and the key of patch i, scaled to [0, 1] over the patches.

    Args:
        queries: of the tokens that the embedding reads, (B, R, C).
        keys: of the patches, (B, N, C).

    Returns:
        (B, N); 0 where all patches have the same cosine.

    >>> loosened_weights(torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[2.0, 0.0], [0.0, 1.0], [-3.0, 0.0]]])).tolist()
    [[1.0, 0.5, 0.0]]
    """
    cosines = (F.normalize(keys.float(), dim=-1) @ F.normalize(queries.float(), dim=-1).mT).mean(-1)
    low, high = cosines.aminmax(dim=1, keepdim=True)
    return (cosines - low) / (high - low).clamp(min=1e-12)


class GradECLIP(WhiteBox):
    """Grad-ECLIP (Zhao et al., ICML 2024): H_i = ReLU(Σ_c w_c λ_i v_i^c), of the values v_i of patch i in all heads.

    w is the gradient of the score at the attention output of the class token, before the projection. λ_i is the cosine
    between its query and the key of patch i, scaled to [0, 1] over the patches of the image: attention without the
    sparsity of the softmax. Several layers are summed before the ReLU. If the embedding reads several tokens, w is the
    sum of their gradients, and λ_i is scaled from the mean of their cosines.

    The released code also runs the last block with a single head; here the model stays as it is.

    Args:
        layers: number of last layers whose maps are summed.
        similarity: queries and keys that λ compares: those of the `heads`, or `projected` by the output projection of
            the attention, as in the released code.
    """

    signed = False
    attention = True  # queries, keys, values and outputs of its heads

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        output: Output = "logit",
        layers: int = 1,
        similarity: Literal["heads", "projected"] = "heads",
    ) -> None:
        super().__init__(target, grid, output)
        check_integers(layers=layers)
        check_range(1, len(blocks_of(target)), layers=layers)
        self.start = len(blocks_of(target)) - layers
        self.similarity = similarity
        if similarity == "projected":
            head_projections(target, self.start)

    def heatmaps(self, record: Record, gradients: Gradients) -> Tensor:
        assert isinstance(record, HeadsRecord)
        maps = [self._map(record, i, gradient) for i, gradient in enumerate(gradients(record.mixed))]
        scores = sum_of(maps).clamp(min=0)
        return sum_on_grid(scores.unflatten(-1, (round(scores.shape[-1] ** 0.5), -1)), self.grid.side)

    def _map(self, record: HeadsRecord, i: int, gradient: Tensor) -> Tensor:
        """The map of the i-th recorded layer before the ReLU, (B, V, N), from the gradient (B, V, A, T, d)."""
        prefix = num_prefix_tokens(self.target)
        read = self.readout(gradient.shape[3]) > 0
        queries, keys = (self._compared(heads[i], self.start + i) for heads in (record.queries, record.keys))
        spatial = loosened_weights(queries[:, read], keys[:, prefix:])
        channels = gradient[:, :, :, read].float().sum(3)  # (B, V, A, d)
        return torch.einsum("bvhc,bhnc,bn->bvn", channels, record.values[i][:, :, prefix:].float(), spatial)

    def _compared(self, heads: Tensor, layer: int) -> Tensor:
        """Queries or keys (B, A, T, d) of a layer as one vector for each token."""
        if self.similarity == "projected":
            return project_heads(self.target, heads, layer)
        return heads.transpose(1, 2).flatten(2)

    def _recording(self) -> AbstractContextManager[Record]:
        return record_heads(self.target, self.start, self.rules, gradients=True)

"""Methods made for CLIP: Grad-ECLIP, and the dense similarity of MaskCLIP and NACLIP."""

from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import UnsupportedModel, check_integers, check_positive, check_range
from explainers.masking import PatchGrid, map_shape
from explainers.models import TargetModel
from explainers.posthoc.layerwise import add_maps
from explainers.posthoc.patch_vectors import PatchVectors
from explainers.posthoc.white_box import Gradients, Output, Reads, WhiteBox
from explainers.transformer.blocks import (
    apply_mlp,
    embed_each,
    find_blocks,
    head_projections,
    num_prefix_tokens,
    project_heads,
    readout,
)
from explainers.transformer.recording import HeadsRecord, Record, record_heads


def loosen_weights(queries: Tensor, keys: Tensor) -> Tensor:
    """Compute λ_i, the mean cosine between queries and the key of patch i, scaled to [0, 1] over the patches: (B, N).

    Queries (B, R, C) are of the tokens that the embedding reads, keys (B, N, C) of the patches. Where all patches have
    the same cosine, λ is 0.

    >>> loosen_weights(torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[2.0, 0.0], [0.0, 1.0], [-3.0, 0.0]]])).tolist()
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
    reads = Reads(attention=True)  # queries, keys, values and outputs of its heads

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
        check_range(1, len(find_blocks(target)), layers=layers)
        self.start = len(find_blocks(target)) - layers
        self.similarity = similarity
        if similarity == "projected":
            head_projections(target, self.start)

    def heatmaps(self, record: Record, gradients: Gradients) -> Tensor:
        assert isinstance(record, HeadsRecord)
        maps = [self._map(record, i, gradient) for i, gradient in enumerate(gradients(record.mixed))]
        return self.patches_on_grid(add_maps(maps).clamp(min=0))

    def _map(self, record: HeadsRecord, i: int, gradient: Tensor) -> Tensor:
        """The map of the i-th recorded layer before the ReLU, (B, V, N), from the gradient (B, V, A, T, d)."""
        prefix = num_prefix_tokens(self.target)
        read = self.readout(gradient.shape[3]) > 0
        queries, keys = (self._join_heads(heads[i], self.start + i) for heads in (record.queries, record.keys))
        spatial = loosen_weights(queries[:, read], keys[:, prefix:])
        channels = gradient[:, :, :, read].float().sum(3)  # (B, V, A, d)
        return torch.einsum("bvhc,bhnc,bn->bvn", channels, record.values[i][:, :, prefix:].float(), spatial)

    def _join_heads(self, heads: Tensor, layer: int) -> Tensor:
        """Queries or keys (B, A, T, d) of a layer as one vector for each token."""
        if self.similarity == "projected":
            return project_heads(self.target, heads, layer)
        return heads.transpose(1, 2).flatten(2)

    def _record(self) -> AbstractContextManager[Record]:
        return record_heads(self.target, self.start, self.rules, gradients=True)


class DenseSimilarity(PatchVectors):
    """Base class of methods that replace the attention of the last block: the heatmap is v · e_z / ‖e_z‖.

    e_z embeds the new token of patch z as the model embeds what it reads: by the final normalisation. The heatmap is
    the cosine of v and e_z times ‖v‖, a factor of the image. Lengths are those in the space of the backbone's
    embedding, because v is a functional of it; with a projection after it, as CLIP has, the papers divide by the length
    after the projection.
    """

    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "logit") -> None:
        super().__init__(target, grid, output)
        readout(target, 1)  # raises an UnsupportedModel for windows and attention pooling
        self.last = len(find_blocks(target)) - 1
        head_projections(target, self.last)
        if target.distilled:
            raise UnsupportedModel("one class token or average pooling", target.name, "another method, such as GAE")

    def _vectors(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with record_heads(self.target, self.last) as record:
            embeddings = self.target.embed(self.target.normalise(images))
        tokens = self._tokens(record)[:, num_prefix_tokens(self.target) :]
        return embeddings, F.normalize(embed_each(self.target, tokens).float(), dim=-1)

    def _tokens(self, record: HeadsRecord) -> Tensor:
        """Compute the tokens that replace the output of the last block, (B, T, D)."""
        raise NotImplementedError


class MaskCLIP(DenseSimilarity):
    """MaskCLIP (Zhou et al., ECCV 2022): v · e_z / ‖e_z‖ of patches whose last block moves nothing between tokens.

    A token goes through the value and the output projection of the last block alone. See `DenseSimilarity` for ‖e_z‖.
    Key smoothing and prompt denoising, which need the probabilities of a list of prompts, are left out.

    Args:
        block: what remains of the last block: `values` for the projections alone (the paper), `whole` with both skip
            connections and the MLP (the released code for ViT).
    """

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        output: Output = "logit",
        block: Literal["values", "whole"] = "values",
    ) -> None:
        super().__init__(target, grid, output)
        self.block = block

    def _tokens(self, record: HeadsRecord) -> Tensor:
        tokens = project_heads(self.target, record.values[0], self.last)
        if self.block == "values":
            return tokens
        return apply_mlp(self.target, record.inputs[self.last] + tokens, self.last)


class NACLIP(DenseSimilarity):
    """NACLIP (Hajimiri et al., WACV 2025): v · e_z / ‖e_z‖ of patches that attend to similar keys and to neighbours.

    The attention of the last block becomes softmax(k kᵀ / √d + ω), with ω_ij = exp(−‖p_i − p_j‖² / 2σ²) for patches at
    positions p, and 0 for other tokens; the block's skip connections and MLP are left out. See `DenseSimilarity` for
    ‖e_z‖.

    Args:
        std: σ, in patches.
    """

    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "logit", std: float = 5.0) -> None:
        super().__init__(target, grid, output)
        check_positive(std=std)
        self.std = std

    def _tokens(self, record: HeadsRecord) -> Tensor:
        keys, values, prefix = record.keys[0], record.values[0], num_prefix_tokens(self.target)
        shape = map_shape(keys.shape[2] - prefix, self.grid.shape)
        near = neighbourhood_kernel(shape, self.std, keys.device).to(keys.dtype)
        mixed = F.scaled_dot_product_attention(keys, keys, values, F.pad(near, (prefix, 0, prefix, 0)))
        return project_heads(self.target, mixed, self.last)


def neighbourhood_kernel(shape: tuple[int, int], std: float, device: torch.device | None = None) -> Tensor:
    """Compute ω_ij = exp(−‖p_i − p_j‖² / 2σ²) of the positions p of rows × columns of patches, (N, N); σ is `std`.

    >>> (100 * neighbourhood_kernel((2, 2), std=1.0)[0]).round().tolist()
    [100.0, 61.0, 61.0, 37.0]
    """
    along = [torch.arange(size, dtype=torch.float32, device=device) for size in shape]
    rows, columns = ((-(each[:, None] - each).square() / (2 * std**2)).exp() for each in along)
    return torch.kron(rows, columns)

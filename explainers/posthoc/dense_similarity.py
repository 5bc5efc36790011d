"""Dense similarity of a functional with the patch tokens of the last block: MaskCLIP and NACLIP."""

from math import isqrt
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import UnsupportedModel, check_positive, checks_choices
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.posthoc.patch_vectors import PatchVectors
from explainers.posthoc.white_box import Output
from explainers.transformer.blocks import (
    apply_mlp,
    blocks_of,
    embed_each,
    head_projections,
    num_prefix_tokens,
    project_heads,
    readout,
)
from explainers.transformer.heads import HeadsRecord, record_heads


class DenseSimilarity(PatchVectors):
    """Base class of methods that replace the attention of the last block: the heatmap is v · e_z / ‖e_z‖.

    e_z embeds the new token of patch z as the model embeds what it reads: by the final normalisation. The heatmap is
    the cosine of v and e_z times ‖v‖, a factor of the image. Lengths are those in the space of the backbone's
    embedding, because v is a functional of it; with a projection after it, as CLIP has, the papers divide by the length
    after the projection.
    """

    @checks_choices
    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "logit") -> None:
        super().__init__(target, grid, output)
        readout(target, 1)  # raises an UnsupportedModel for windows and attention pooling
        self.last = len(blocks_of(target)) - 1
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

    @checks_choices
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

    @checks_choices
    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "logit", std: float = 5.0) -> None:
        super().__init__(target, grid, output)
        check_positive(std=std)
        self.std = std

    def _tokens(self, record: HeadsRecord) -> Tensor:
        keys, values, prefix = record.keys[0], record.values[0], num_prefix_tokens(self.target)
        near = neighbourhood_kernel(isqrt(keys.shape[2] - prefix), self.std, keys.device).to(keys.dtype)
        mixed = F.scaled_dot_product_attention(keys, keys, values, F.pad(near, (prefix, 0, prefix, 0)))
        return project_heads(self.target, mixed, self.last)


def neighbourhood_kernel(side: int, std: float, device: torch.device | None = None) -> Tensor:
    """Compute ω_ij = exp(−‖p_i − p_j‖² / 2σ²) of the positions p of a square of patches, (N, N).

    Args:
        side: patches per side.
        std: σ, in patches.
        device: where to compute them.

    >>> (100 * neighbourhood_kernel(2, std=1.0)[0]).round().tolist()
    [100.0, 61.0, 61.0, 37.0]
    """
    along = torch.arange(side, dtype=torch.float32, device=device)
    kernel = (-(along[:, None] - along).square() / (2 * std**2)).exp()
    return torch.kron(kernel, kernel)

"""Pairs of masked images: a coalition of patches and its complement, and the difference of their embeddings."""

import torch
from torch import Tensor, nn

from explainers.errors import check_positive, checks_choices
from explainers.masking import PatchGrid, Removal
from explainers.models import TargetModel
from explainers.models.removal import masked_outputs


class MaskedPairs:
    """The pairs of some images that have gone through the target, two masked forward passes each.

    Args:
        target: the model whose backbone is G.
        normalised: normalised images, (B, C, H, W).
        grid: the patches.
        removal: what replaces hidden patches, see `Removal`.
        chunk_size: maximum number of masked images in memory.

    Attributes:
        keep: one coalition S of each pair, boolean (B, M, N).
        differences: G(x_S) − G(x_S̄), where S̄ is the complement of S: float32, (B, M, D).
    """

    @checks_choices
    def __init__(
        self, target: TargetModel, normalised: Tensor, grid: PatchGrid, removal: Removal, chunk_size: int
    ) -> None:
        check_positive(chunk_size=chunk_size)
        self.target = target
        self.normalised = normalised
        self.grid = grid
        self.removal = removal
        self.chunk_size = chunk_size
        self.keep = torch.zeros(len(normalised), 0, grid.num_patches, dtype=torch.bool, device=normalised.device)
        self.differences = torch.zeros(len(normalised), 0, target.embed_dim, device=normalised.device)

    def __len__(self) -> int:
        return self.keep.shape[1]

    def add(self, keep: Tensor) -> None:
        """Embed the pairs of further coalitions, boolean (B, M, N)."""
        keep = keep.to(self.keep.device)
        both = torch.stack([keep, ~keep], 2).flatten(1, 2)
        embeddings = self._embed(self.normalised, both).unflatten(1, (-1, 2))
        self.keep = torch.cat([self.keep, keep], 1)
        self.differences = torch.cat([self.differences, embeddings[:, :, 0] - embeddings[:, :, 1]], 1)

    def blank(self) -> Tensor:
        """Embed an image without any patch: (1, D), equal for all images."""
        return self._embed(self.normalised[:1], self.keep.new_zeros(1, 1, self.grid.num_patches))[:, 0]

    @torch.no_grad()
    def _embed(self, normalised: Tensor, keep: Tensor) -> Tensor:
        identity = nn.Identity()
        return masked_outputs(self.target, identity, normalised, keep, self.grid, self.removal, self.chunk_size).float()

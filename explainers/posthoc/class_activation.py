"""Class activation mapping, exact where the embedding is the mean of the last feature map."""

import torch
from torch import Tensor

from explainers.errors import InputError, UnsupportedModel, checks_choices
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.posthoc.patch_vectors import PatchVectors
from explainers.posthoc.white_box import Output


class CAM(PatchVectors):
    """Class activation mapping (Zhou et al., 2016): v · f_z / N for position z of the last feature map, of N positions.

    The embedding is the mean of the f_z, so the scores of all positions sum to v · G(x). It takes one forward pass and
    no backward pass, for any number of classes; between two images, f_z · f'_w decomposes the product of their
    embeddings (Stylianou et al., 2019).

    Raises:
        UnsupportedModel: for a model with another embedding, such as a class token.
    """

    @checks_choices
    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "logit") -> None:
        super().__init__(target, grid, output)
        side = grid.image_size
        noise = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0)).to(target.mean.device)
        if not self._averages(noise):
            raise UnsupportedModel(
                "a model that averages its last feature map",
                target.name,
                "a CNN such as ResNet, or a method for transformers, such as DirectPaths",
            )

    @torch.no_grad()
    def _averages(self, normalised: Tensor) -> bool:
        """Whether the embeddings of images (B, C, H, W) are the means of their feature maps."""
        try:
            embeddings, features = self.target.embed_with_patches(normalised)
        except InputError:  # it has no features of patches
            return False
        size = embeddings.abs().max()
        return bool(((features.mean(1) - embeddings).abs().max() < 1e-3 * size).item())

    def _vectors(self, images: Tensor) -> tuple[Tensor, Tensor]:
        embeddings, features = self.target.embed_with_patches(self.target.normalise(images))
        return embeddings, features.float() / features.shape[1]

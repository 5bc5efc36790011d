"""Class activation mapping, exact where the embedding is the mean of the last feature map."""

import torch
from torch import Tensor, nn

from explainers.errors import InputError, UnsupportedModel, checks_choices
from explainers.masking import PatchGrid
from explainers.posthoc.white_box import Output, class_functionals, sum_on_grid
from explainers.target import TargetModel
from explainers.target.inputs import Functionals, checked_classes, functionals_at


class CAM(nn.Module):
    """Class activation mapping (Zhou et al., 2016): v · f_z / N for position z of the last feature map, of N positions.

    The embedding is the mean of the f_z, so the scores of all positions sum to v · G(x). It takes one forward pass and
    no backward pass, for any number of classes; between two images, f_z · f'_w decomposes the product of their
    embeddings (Stylianou et al., 2019).

    Args:
        target: the model to explain, a CNN or Swin that averages its last feature map.
        grid: the patches that are explained.
        output: score of the class that is explained: `logit`, `probability` or `log_odds`.

    Raises:
        UnsupportedModel: for a model with another embedding, such as a class token.
    """

    linear = True

    @checks_choices
    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "logit") -> None:
        super().__init__()
        target.check_grid(grid)
        self.target = target.eval()
        self.grid = grid
        self.output = output
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

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Explain one class (B,) of each uint8 image (B, C, H, W): heatmaps (B, P, P)."""
        wanted = checked_classes(classes, images, self.target.num_classes)

        def of_classes(embeddings: Tensor) -> Tensor:
            return class_functionals(self.target, embeddings, wanted, self.output)[:, None]

        return self.explain(images, of_classes)[:, 0]

    @torch.no_grad()
    def decompose(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the vectors of patches (B, N, D) and the embeddings (B, D) of uint8 images (B, C, H, W)."""
        self.grid.check(images)
        embeddings, features = self.target.embed_with_patches(self.target.normalise(images))
        features = features.float() / features.shape[1]
        maps = features.mT.unflatten(2, (round(features.shape[1] ** 0.5), -1))  # (B, D, h, w)
        return sum_on_grid(maps, self.grid.side).flatten(2).mT, embeddings

    def explain(self, images: Tensor, functionals: Functionals) -> Tensor:
        """Explain linear functionals v · G(x) of the embedding, see `FunctionalExplainer`."""
        vectors, embeddings = self.decompose(images)
        found = functionals_at(functionals, images, self.target.embed_dim)(embeddings)
        with torch.autocast(images.device.type, enabled=False):
            heatmaps = (found.float() @ vectors.float().mT).unflatten(-1, (self.grid.side, -1))
        return heatmaps[:, 0] if isinstance(functionals, Tensor) and functionals.dim() == 2 else heatmaps

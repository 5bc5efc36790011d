"""The direct paths of patches as an explainer: one forward pass, no backward pass, nothing trained."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from explainers.errors import checks_choices
from explainers.masking import PatchGrid
from explainers.posthoc.layerwise import layer_index, middle_layer
from explainers.posthoc.white_box import Output, class_functionals, sum_on_grid
from explainers.target import TargetModel
from explainers.target.inputs import check_functionals, checked_classes
from explainers.transformer.blocks import blocks_of
from explainers.transformer.direct_paths import check_direct, direct_paths, record_direct


class DirectPaths(nn.Module):
    """What attention moves directly from each patch into the score of a class, summed over the blocks from `start` on.

    AnyHead adds it to what its network predicts; here it stands alone.

    Args:
        target: the model to explain, a timm transformer with a class token or average pooling.
        grid: the patches that are explained.
        output: what is explained: the `logit`, the `probability` or the `log_odds` of the class.
        start: index of the first block; negative from the last; `None` for the middle one, as SkipPLUS.

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
        self.target, self.grid, self.output = target.eval(), grid, output
        first = middle_layer(target) if start is None else layer_index(target, start)
        self.blocks = range(first, len(blocks_of(target)))
        check_direct(target, self.blocks)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Explain one class (B,) of each uint8 image (B, C, H, W): heatmaps (B, P, P)."""
        self.grid.check(images)
        wanted = checked_classes(classes, images, self.target.num_classes)
        return self._heatmaps(images, lambda of: class_functionals(self.target, of, wanted, self.output)[:, None])[:, 0]

    def explain(self, images: Tensor, functionals: Tensor) -> Tensor:
        """Explain linear functionals v · G(x) of the embedding.

        Args:
            images: uint8, (B, C, H, W).
            functionals: v, (B, D), or (B, V, D) for several of each image.

        Returns:
            (B, P, P) or (B, V, P, P).
        """
        self.grid.check(images)
        check_functionals(functionals, images, self.target.embed_dim)
        if functionals.dim() == 2:
            return self._heatmaps(images, lambda _: functionals[:, None])[:, 0]
        return self._heatmaps(images, lambda _: functionals)

    def _heatmaps(self, images: Tensor, functionals_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Explain functionals (B, V, D) that depend on the embeddings (B, D): heatmaps (B, V, P, P)."""
        with torch.no_grad():
            with record_direct(self.target, self.blocks) as record:
                embeddings = self.target.embed(self.target.normalise(images))
            vectors = direct_paths(self.target, record).float().sum(1)  # (B, N, D)
        functionals = functionals_of(embeddings)
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            scores = functionals.float() @ vectors.mT
        return sum_on_grid(scores.unflatten(-1, (round(scores.shape[-1] ** 0.5), -1)), self.grid.side)

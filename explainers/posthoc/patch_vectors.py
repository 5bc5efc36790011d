"""Methods with a vector c_z of each patch: v · c_z is the heatmap of any linear functional v of the embedding."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from explainers.errors import InputError, UnsupportedModel
from explainers.learned.trunk import Decomposition, at_patches
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.posthoc.white_box import FunctionalMethod, Output
from explainers.transformer.blocks import find_blocks, layer_index
from explainers.transformer.direct_paths import check_direct, record_direct
from explainers.transformer.path_flow import check_flow, count_patches, read_paths, record_flow, sum_paths
from explainers.transformer.recording import Record
from explainers.transformer.stage_paths import StageRecord, check_stage_paths, record_stage_paths


class PatchVectors(FunctionalMethod):
    """Base class of methods whose heatmaps are products v · c_z. Subclasses compute the vectors in `_vectors`.

    All classes and functionals share one forward pass, and there is no backward pass.
    """

    linear = True

    @torch.no_grad()
    def decompose(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Compute c_z of the patches of the grid, (B, N, D), and the embeddings (B, D) of uint8 images (B, C, H, W)."""
        self.grid.check(images)
        embeddings, vectors = self._vectors(images)
        with torch.autocast(images.device.type, enabled=False):
            return self.patches_on_grid(vectors.float().mT).flatten(2).mT, embeddings.float()

    def _vectors(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the embeddings (B, D) of uint8 images, and c_z of the model's own patches, (B, N', D)."""
        raise NotImplementedError

    def _build_scores(self, images: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The embeddings (B, D) of uint8 images, and a function of functionals (B, V, D) → scores (B, V, N')."""
        embeddings, vectors = self._vectors(images)
        return embeddings, lambda functionals: functionals @ vectors.float().mT

    def explain_all(self, images: Tensor, functionals_of: Callable[[Tensor], Tensor]) -> Tensor:
        self.grid.check(images)
        with torch.no_grad():
            embeddings, scores_of = self._build_scores(images)
        functionals = functionals_of(embeddings)
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            return self.patches_on_grid(scores_of(functionals.float()))


class CAM(PatchVectors):
    """Class activation mapping (Zhou et al., 2016): v · f_z / N for position z of the last feature map, of N positions.

    The embedding is the mean of the f_z, so the scores of all positions sum to v · G(x). Between two images, f_z · f'_w
    decomposes the product of their embeddings (Stylianou et al., 2019).
    """

    def __init__(self, target: TargetModel, grid: PatchGrid, output: Output = "logit") -> None:
        super().__init__(target, grid, output)
        shape, generator = (1, target.channels, *grid.size), torch.Generator().manual_seed(0)
        noise = torch.rand(shape, generator=generator, dtype=torch.float32).to(target.mean.device)
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


class PathVectors(PatchVectors):
    """Base class of methods whose vectors are sums of paths through `blocks`, which `recorder` records in one pass."""

    blocks: list[int]
    recorder: Callable[[TargetModel, Sequence[int]], AbstractContextManager[Record]]

    @torch.no_grad()
    def decompose_lazily(self, images: Tensor) -> Decomposition:
        """Decompose images as `decompose` does, but compute only what a caller asks for; few patches are faster."""
        self.grid.check(images)
        embeddings, record = self._read(images)

        def products(functionals: Tensor) -> Tensor:
            return self.patches_on_grid(self._paths(record, functionals).mT).flatten(2)

        def vectors(patches: Tensor) -> Tensor:
            if count_patches(self.target, record) != self.grid.num_patches:
                return at_patches(self.patches_on_grid(self._paths(record).mT).flatten(2).mT, patches)
            return sum_paths(self.target, record, patches).float()

        return embeddings, products, vectors

    @torch.no_grad()
    def _read(self, images: Tensor) -> tuple[Tensor, Record | StageRecord]:
        """The embeddings (B, D) of uint8 images, and the record of their pass."""
        with self.recorder(self.target, self.blocks) as record:
            embeddings = self.target.embed(self.target.normalise(images))
        return embeddings, record

    def _paths(self, record: Record | StageRecord, functionals: Tensor | None = None) -> Tensor:
        """The sum of the paths of all blocks: c_z (B, N', D), or v · c_z (B, N', V)."""
        return read_paths(self.target, record, functionals).float().sum(1)

    def _vectors(self, images: Tensor) -> tuple[Tensor, Tensor]:
        embeddings, record = self._read(images)
        return embeddings, self._paths(record)

    def _build_scores(self, images: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        embeddings, record = self._read(images)
        return embeddings, lambda functionals: self._paths(record, functionals).mT


class DirectPaths(PathVectors):
    """What attention moves directly from each patch into the score of a class, summed over the blocks from `start` on.

    For CLIP, it is the decomposition over patches of Gandelsman et al. (ICLR 2024).

    Args:
        start: index of the first block; negative from the last; `None` for the middle one, as in SkipPLUS.
    """

    recorder = staticmethod(record_direct)

    def __init__(
        self, target: TargetModel, grid: PatchGrid, output: Output = "logit", start: int | None = None
    ) -> None:
        super().__init__(target, grid, output)
        self.blocks = list_blocks(target, start)
        check_direct(target, self.blocks)


class PathFlow(PathVectors):
    """Paths from each patch into the score of a class, also through later MLPs and other patches (this project's own).

    `explainers.transformer.path_flow` has the formulas, and says for which models paths lead through MLPs.

    Args:
        start: index of the first block; negative from the last; `None` for the middle one, as in SkipPLUS.
    """

    recorder = staticmethod(record_flow)

    def __init__(
        self, target: TargetModel, grid: PatchGrid, output: Output = "logit", start: int | None = None
    ) -> None:
        super().__init__(target, grid, output)
        self.blocks = list_blocks(target, start)
        check_flow(target, self.blocks)


class StagePaths(PathVectors):
    """Class activation mapping relative to a blank image, shared out to patches by earlier stages (this project's own).

    `explainers.transformer.stage_paths` has the formulas.

    Args:
        start: index of the first of the stages, negative from the last; `None` for the last three.
    """

    def __init__(
        self, target: TargetModel, grid: PatchGrid, output: Output = "logit", start: int | None = None
    ) -> None:
        super().__init__(target, grid, output)
        count = len(list(getattr(target.backbone, "feature_info", [])))
        self.start = start
        self.stages = list(range(count))[-3 if start is None else start :]
        check_stage_paths(target, self.stages, grid.size)

    def _read(self, images: Tensor) -> tuple[Tensor, StageRecord]:
        embeddings, _, record = record_stage_paths(self.target, self.target.normalise(images), self.stages)
        return embeddings, record


def list_blocks(target: TargetModel, start: int | None) -> list[int]:
    """Return the indices of the blocks from `start` on; `None` is the middle one."""
    return list(range(layer_index(target, start), len(find_blocks(target))))

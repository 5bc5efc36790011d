"""Computes the exact attribution that TVE learns to predict, as an upper bound of its quality."""

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor, nn

from explainers.errors import check_positive
from explainers.masking import PatchGrid, neighbourhoods
from explainers.models import TargetModel
from explainers.models.inputs import validate_classes
from explainers.models.scores import check_probabilities
from explainers.saved.identity import recipe
from explainers.saved.weights import read_tensors, save_tensors
from explainers.tve.tve import meta_attribution, transfer


class Oracle(nn.Module):
    """Computes Equation 6 exactly, with 2·N masked forward passes of the target for each image.

    Args:
        target: the model to explain.
        grid: the patches that are explained.
        hops: radius of N(z), in patches.
        cache_dir: folder that stores the meta-attributions of every image, which serve all heads of the backbone.
        chunk_size: maximum number of masked images in memory.
    """

    signed = False  # see `TVE`
    near: Tensor

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        hops: int = 2,
        cache_dir: str | Path | None = None,
        chunk_size: int = 256,
    ) -> None:
        super().__init__()
        check_positive(chunk_size=chunk_size)
        check_probabilities(target, "the oracle", "leave it out")
        target.check_grid(grid)
        self.target = target.in_eval_mode()
        self.grid = grid
        self.hops = hops
        self.chunk_size = chunk_size
        self.forward_passes = 2 * grid.num_patches
        self.cache_dir = None if cache_dir is None else Path(cache_dir)
        self.timed = cache_dir is None
        self.register_buffer("near", neighbourhoods(grid, hops), persistent=False)

    @torch.no_grad()
    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        self.grid.check(images)
        classes = validate_classes(classes, images, self.target.num_classes)
        meta = self.meta(images) if self.cache_dir is None else self._load_or_compute(images, self.cache_dir)
        heatmaps = transfer(self.target.classify, meta, classes=classes, outputs=self.target.score)  # (B, N)
        return heatmaps.unflatten(-1, self.grid.shape)

    def meta(self, images: Tensor) -> Tensor:
        """The meta-attributions of every patch, (B, N, 2, D)."""
        self.grid.check(images)
        near = self.near.expand(len(images), -1, -1)
        return meta_attribution(self.target.embed, self.target.normalise(images), near, self.grid, self.chunk_size)

    def key(self, device: torch.device) -> str:
        """Describe everything that meta-attributions on this device depend on, except the images."""
        own = {"target": self.target.backbone_identity(), **recipe(self, without=("target", "cache_dir"))}
        autocast = torch.is_autocast_enabled(device.type)
        precision = torch.get_autocast_dtype(device.type) if autocast else self.target.mean.dtype
        return json.dumps(own | {"precision": str(precision)})

    def _load_or_compute(self, images: Tensor, cache_dir: Path) -> Tensor:
        """The result of `meta`, from a cache with one file per image, named by its content; computes missing files."""
        key = self.key(images.device).encode()
        names = [hashlib.sha256(key + image.cpu().numpy().tobytes()).hexdigest()[:32] for image in images]
        paths = [cache_dir / f"{name}.safetensors" for name in names]
        missing = torch.tensor([i for i, path in enumerate(paths) if not path.exists()], dtype=torch.long)
        # As many images as fill a chunk: a killed run loses no more
        for some in missing.split(max(1, self.chunk_size // self.forward_passes)):
            for i, meta in zip(some.tolist(), self.meta(images[some]) if len(some) else (), strict=True):
                save_tensors({"meta": meta}, paths[i])
        return torch.stack([read_tensors(path, "meta-attributions")[1]["meta"] for path in paths]).to(images.device)

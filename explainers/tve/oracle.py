"""Computes the exact attribution that TVE learns to predict, as an upper bound of its quality."""

import hashlib
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from explainers.masking import PatchGrid, neighbourhoods
from explainers.target import TargetModel
from explainers.tve.meta_attribution import meta_attribution, transfer


class Oracle(nn.Module):
    """Computes Equation 6 exactly, with 2·N masked forward passes of the target for each image.

    Args:
        target: the model to explain.
        grid: the patches that are explained.
        hops: radius of N(z), in patches.
        cache_dir: folder that stores the meta-attributions of every image. They serve all heads of the backbone, and an
            interrupted evaluation continues from them. `None` stores nothing.
        chunk_size: maximum number of masked images in memory.
    """

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
        self.target, self.grid, self.chunk_size = target.eval(), grid, chunk_size
        self.forward_passes = 2 * grid.num_patches
        self.cache_dir = None if cache_dir is None else Path(cache_dir)
        self.timed = cache_dir is None
        self.register_buffer("near", neighbourhoods(grid, hops), persistent=False)
        self.key = f"{sorted(target.identity().items())} {grid} {hops}"

    @torch.no_grad()
    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        meta = self.meta(images) if self.cache_dir is None else self._cached(images, self.cache_dir)
        heatmaps = transfer(self.target.classify, meta, classes=classes)  # (B, N)
        return heatmaps.unflatten(-1, (self.grid.side, -1))

    def meta(self, images: Tensor) -> Tensor:
        """The meta-attributions of every patch, (B, N, 2, D)."""
        near = self.near.expand(len(images), -1, -1)
        return meta_attribution(self.target.embed, self.target.normalise(images), near, self.grid, self.chunk_size)

    def _cached(self, images: Tensor, cache_dir: Path) -> Tensor:
        """The result of `meta`, from a cache with one file per image, named by its content; computes missing files."""
        cache_dir.mkdir(parents=True, exist_ok=True)
        key = f"{self.key} {torch.is_autocast_enabled(images.device.type)}".encode()
        names = [hashlib.sha256(key + image.cpu().numpy().tobytes()).hexdigest()[:32] for image in images]
        paths = [cache_dir / f"{name}.safetensors" for name in names]
        for i, path in enumerate(paths):
            if not path.exists():
                unfinished = path.with_suffix(f".{os.getpid()}")
                save_file({"meta": self.meta(images[i : i + 1])[0].cpu().contiguous()}, unfinished)
                unfinished.replace(path)
        return torch.stack([load_file(path)["meta"] for path in paths]).to(images.device)

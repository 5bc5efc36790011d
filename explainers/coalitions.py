"""What a model says when only a coalition of patches is visible: v(S), the game whose Shapley values explain it."""

import torch
from torch import Tensor

from explainers.exchange import weights_hash
from explainers.masking import PatchGrid, masked_forward
from explainers.sampling import shapley_coalitions, stream
from explainers.target import TargetModel


class CoalitionValues:
    """A source (see `explainers`): what the model says when only some patches are visible, the others 0.

    Rows: `keep` (B, M, N), coalitions drawn anew every epoch as `shapley_coalitions` does; `values` (B, M, K), their
    probabilities; `null` and `grand`, (B, K), those of nothing and of the whole image.

    Args:
        count: M. paired: see `shapley_coalitions`. chunk_size: masked images in memory at a time. seed: of the draws.
    """

    provides = "values"

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        count: int,
        seed: int = 0,
        paired: bool = True,
        chunk_size: int = 256,
    ) -> None:
        self.target, self.grid, self.count, self.seed = target, grid, count, seed
        self.paired, self.chunk_size = paired, chunk_size

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        seed = stream("coalitions", self.seed, epoch)
        keep = shapley_coalitions(batch["index"], self.grid.num_patches, self.count, seed, self.paired)
        with torch.no_grad():
            normalised = self.target.normalise(batch["image"])
            seen = torch.cat([keep, torch.ones_like(keep[:, :1])], 1)
            values = masked_forward(
                self.target.probabilities, normalised, seen, self.grid, chunk_size=self.chunk_size
            )  # (B, M + 1, K)
            null = self.target.probabilities(torch.zeros_like(normalised[:1]))  # the same of every image
        return {"keep": keep, "values": values[:, :-1], "null": null.expand(len(keep), -1), "grand": values[:, -1]}

    def key(self) -> dict[str, str]:
        return self.target.identity() | {
            "source": "coalition values",
            "head_sha256": weights_hash(self.target.head),
            "patches_per_side": str(self.grid.side),
            "coalitions": str(self.count),
            "paired": str(self.paired),
            "seed": str(self.seed),
        }

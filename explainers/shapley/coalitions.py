"""What a model says when only a coalition of patches is visible: v(S), the game whose Shapley values explain it."""

from typing import Literal

import torch
from torch import Tensor

from explainers.masking import PatchGrid, masked_forward
from explainers.sampling import shapley_coalitions, stream
from explainers.target import TargetModel, weights_hash

Score = Literal["probability", "log_probability", "logit"]


class CoalitionValues:
    """A source (see `sources`): what the model says when only some patches are visible, the others 0.

    Rows: `keep` (B, M, N), coalitions drawn anew every epoch as `shapley_coalitions` does; `values` (B, M, K), their
    scores; `null` and `grand`, (B, K), those of nothing and of the whole image.

    Args:
        count: M. paired: see `shapley_coalitions`. chunk_size: masked images in memory at a time. seed: of the draws.
        score: what the model says of a class: its probability, the logarithm of it, or its logit.
    """

    provides = ("keep", "values", "null", "grand")

    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        count: int,
        seed: int = 0,
        paired: bool = True,
        chunk_size: int = 256,
        score: Score = "probability",
    ) -> None:
        self.target, self.grid, self.count, self.seed = target, grid, count, seed
        self.paired, self.chunk_size, self.score = paired, chunk_size, score
        self.forward_passes = count + 1

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        seed = stream("coalitions", self.seed, epoch)
        keep = shapley_coalitions(batch["index"], self.grid.num_patches, self.count, seed, self.paired)
        with torch.no_grad():
            normalised = self.target.normalise(batch["image"])
            seen = torch.cat([keep, torch.ones_like(keep[:, :1])], 1)
            values = masked_forward(
                self._scores, normalised, seen, self.grid, chunk_size=self.chunk_size
            )  # (B, M + 1, K)
            null = self._scores(torch.zeros_like(normalised[:1]))  # the same of every image
        return {"keep": keep, "values": values[:, :-1], "null": null.expand(len(keep), -1), "grand": values[:, -1]}

    def _scores(self, normalised: Tensor) -> Tensor:
        logits = self.target.classify(self.target.embed(normalised))
        if self.score == "logit":
            return logits
        return logits.softmax(-1) if self.score == "probability" else logits.log_softmax(-1)

    def key(self) -> dict[str, str]:
        return (
            self.target.identity()
            | {
                "source": "coalition values",
                "head_sha256": weights_hash(self.target.head),
                "patches_per_side": str(self.grid.side),
                "coalitions": str(self.count),
                "paired": str(self.paired),
                "seed": str(self.seed),
            }
            | ({} if self.score == "probability" else {"score": self.score})
        )

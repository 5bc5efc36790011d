"""The value v(S) of a coalition S of patches: the scores of a model when only S is visible."""

from typing import Literal

import torch
from torch import Tensor

from explainers.errors import check_positive, checks_choices
from explainers.masking import PatchGrid, Removal
from explainers.models import TargetModel
from explainers.models.removal import masked_outputs
from explainers.models.scores import check_probabilities, log_probabilities
from explainers.runtime.sampling import stream
from explainers.saved.identity import Identity, recipe
from explainers.shapley.coalition_draws import shapley_coalitions

CoalitionScore = Literal["probability", "log_probability", "logit"]


class CoalitionValues:
    """A source (see `sources`) of v(S) for random coalitions S; all other patches are removed.

    Rows: `keep` (B, M, N), coalitions that `shapley_coalitions` draws anew every epoch; `values` (B, M, K), their v(S);
    `null` and `grand`, both (B, K), v of the empty coalition and of the whole image.

    Args:
        target: the model that scores the images.
        grid: the patches.
        count: M, number of coalitions of each image.
        seed: seed of the draws.
        paired: make every second coalition the complement of the one before, which lowers the variance.
        chunk_size: maximum number of masked images in memory.
        score: score of a class: its probability (of a model of values, its value), log-probability or logit.
        removal: what replaces the patches outside S, see `Removal`.
    """

    provides = ("keep", "values", "null", "grand")
    entries = ("image",)

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        count: int,
        seed: int = 0,
        paired: bool = True,
        chunk_size: int = 256,
        score: CoalitionScore = "probability",
        removal: Removal = "zero",
    ) -> None:
        check_positive(count=count, chunk_size=chunk_size)
        if score == "log_probability":
            check_probabilities(target, "score=log_probability", "take score=logit")
        self.target = target.eval()
        self.grid = grid
        self.count = count
        self.seed = seed
        self.paired = paired
        self.chunk_size = chunk_size
        self.score = score
        self.removal = removal
        self.forward_passes = count + 1

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        seed = stream("coalitions", self.seed, epoch)
        keep = shapley_coalitions(batch["index"], self.grid.num_patches, self.count, seed, self.paired)
        with torch.no_grad():
            normalised = self.target.normalise(batch["image"])
            visible = torch.cat([keep, torch.ones_like(keep[:, :1])], 1)  # with the whole image
            values = self._values(normalised, visible)  # (B, M + 1, K)
            null = self._values(normalised[:1], torch.zeros_like(visible[:1, :1]))[0]  # (1, K), equal for all images
        return {"keep": keep, "values": values[:, :-1], "null": null.expand(len(keep), -1), "grand": values[:, -1]}

    def _values(self, normalised: Tensor, keep: Tensor) -> Tensor:
        return masked_outputs(self.target, self._scores, normalised, keep, self.grid, self.removal, self.chunk_size)

    def _scores(self, embeddings: Tensor) -> Tensor:
        logits = self.target.classify(embeddings)
        if self.score == "logit":
            return logits
        if self.score == "probability":
            return self.target.scores(logits)
        return log_probabilities(logits, self.target.score)

    def key(self) -> Identity:
        return {"source": "coalition values"} | recipe(self)

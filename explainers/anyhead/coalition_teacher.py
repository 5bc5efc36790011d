"""Embeddings of masked images, and the least-squares fit of their differences by sums over patches."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from explainers.anyhead.functionals import FunctionalSampler, Kind, TextHeadBuilder
from explainers.errors import InputError, check_positive, checks_choices
from explainers.masking import PatchGrid, Removal
from explainers.models import TargetModel
from explainers.models.removal import check_removal, masked_outputs
from explainers.posthoc import build
from explainers.refinement.coalitions import NOISE, POWER, TEMPERATURE, rank_coalitions, region_coalitions
from explainers.runtime.sampling import stream
from explainers.saved.identity import Identity, recipe
from explainers.shapley.coalition_draws import shapley_coalitions, shapley_weights
from explainers.shapley.shapley import make_efficient

Fit = Literal["regions", "ranking", "uniform", "mixed", "shapley"]
RANKED_BY = "PathFlow"  # the method whose heatmaps are ranked


@checks_choices
def coalition_errors(vectors: Tensor, rows: dict[str, Tensor], fit: Fit) -> tuple[Tensor, Tensor]:
    """Compare Σ_{z ∈ S} c_z − Σ_{z ∉ S} c_z with G(x_S) − G(x_S̄), where S̄ is the complement of S.

    The common part of G(x_S) and G(x_S̄) cancels, because no sum over patches explains it. With the weights of
    `shapley`, the vectors with the least squared error over all coalitions are the Shapley values of the embedding
    (Charnes et al., 1988). Shapley values are linear in the game: v · c_z are the Shapley values of v · G.

    Args:
        vectors: c_z, (B, N, D).
        rows: the rows of `CoalitionTeacher`, and `embedding`, G(x).
        fit: `shapley`: c_z are first shifted to sum to G(x) − G(x_∅), and errors have weights.

    Returns:
        Errors, and differences of embeddings, (B, M, D) each, times the square root of the weight of each coalition.
    """
    keep = rows["keep"]
    difference = rows["difference"]
    signs = 2 * keep.to(vectors.dtype) - 1
    if fit != "shapley":
        return difference - signs @ vectors, difference
    errors = difference - signs @ make_efficient(vectors, rows["blank"], rows["embedding"].to(vectors.dtype))
    root = shapley_weights(keep, POWER).to(vectors.dtype).sqrt()[..., None]
    return root * errors, root * difference


def coalition_sums(errors: Tensor, difference: Tensor, rows: Tensor, functionals: Tensor) -> tuple[Tensor, Tensor]:
    """Sum squared errors and differences of scores over images and coalitions: for all functionals, and for one of each
    image, (2,) each. The loss is the mean of their two ratios, the unexplained part of the differences.

    So an image that no mask changes has no effect, and vectors of 0, if they are not shifted, have a loss of 1.

    Args:
        errors: (B, M, D), see `coalition_errors`.
        difference: (B, M, D).
        rows: functionals W, such as those of the classes, relative to their mean, (K, D).
        functionals: v, (B, D).
    """
    products = rows.mT @ rows  # |W e|² = e · (Wᵀ W e), for D × D instead of K × D numbers
    sums = []
    for each in (errors, difference):
        of_rows = ((each @ products) * each).sum()
        of_functionals = (each @ functionals[..., None]).square().sum()
        sums.append(torch.stack([of_rows, of_functionals]))
    return sums[0], sums[1].clamp(min=1e-8)


class CoalitionTeacher:
    """A teacher: a source (see `sources`) of embeddings G(x_S) of images with only a coalition S of patches.

    It needs no backward pass, and works with any backbone. One embedding teaches the attributions of all functionals.
    Rows: `keep` (B, M, N), coalitions, drawn anew every epoch; `difference` (B, M, D), their embeddings minus those of
    their complements; `blank` (B, D), the embedding of no patch.

    Args:
        target: the model whose backbone is G.
        grid: the patches.
        pairs: M, the number of coalitions of each image; each costs two forward passes.
        fit: how coalitions are drawn and weighed. `regions`: coherent regions of all sizes, see `region_coalitions`.
            `ranking`: the most important patches of heatmaps with noise, see `rank_coalitions`, because evaluations
            of heatmaps hide such patches. Three of four heatmaps are of the predicted class, or of the text that fits
            best, one is of another likely one; with `isotropic` all are of random functionals. It needs a transformer.
            `uniform`: patches one by one; all sizes are equally likely. `mixed`: half of them regions, half `uniform`.
            `shapley`: patches one by one; the vectors with the least error are the Shapley values.
        removals: what replaces hidden patches, see `Removal`. The coalitions of an image use them in turn; `blank` is
            the mean over all of them.
        functionals: whose errors the loss counts. `head`: those of the classes of the head. For models without classes:
            `texts`: those of the texts of a vocabulary. `images`: likeness to the other images of the batch.
            `isotropic`: all directions alike. See `FunctionalSampler.of`.
        vocabulary: with `texts`, texts, or the path of a text file with one a line; `None` for the names of the classes
            of ImageNet.
        text_head: with `texts`, builds a text head from the target; `None` for `clip_text_head`.
        chunk_size: maximum number of masked images in memory.
        seed: seed of the draws.
    """

    ratios = 2
    provides = ("keep", "difference", "blank")
    entries = ("image",)

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        pairs: int = 4,
        fit: Fit = "regions",
        removals: Sequence[Removal] = ("zero",),
        functionals: Kind = "head",
        vocabulary: Sequence[str] | str | None = None,
        text_head: TextHeadBuilder | None = None,
        chunk_size: int = 256,
        seed: int = 0,
    ) -> None:
        check_positive(pairs=pairs, chunk_size=chunk_size)
        if not 0 < len(removals) <= pairs:
            raise InputError(
                f"expected at least one removal, and a pair of coalitions for each, got {len(removals)} removals and"
                f" pairs={pairs}"
            )
        for removal in removals:
            check_removal(target, removal)
        if fit == "ranking" and functionals == "images":
            raise InputError("expected fit=regions with functionals=images, which rank no patches, got fit=ranking")
        self.learned = FunctionalSampler(functionals, target, vocabulary, text_head, stream("functionals", seed, 0))
        if fit == "ranking" and functionals == "head" and target.num_classes < 2:
            raise InputError(f"expected a head of at least 2 classes for fit=ranking, got {target.num_classes}")
        self.ranker: Any = build(RANKED_BY, target, grid) if fit == "ranking" else None
        self.target = target.eval()
        self.grid = grid
        self.pairs = pairs
        self.fit = fit
        self.removals = tuple(removals)
        self.functionals = functionals
        self.vocabulary = vocabulary
        self.text_head = text_head
        self.chunk_size = chunk_size
        self.seed = seed
        self.forward_passes = 2 * pairs + 2 * (fit == "ranking")  # the embedding, and the heatmaps

    def __call__(self, batch: dict[str, Tensor], epoch: int = 0) -> dict[str, Tensor]:
        with torch.no_grad():
            keep = self._draw(batch, epoch)
            normalised = self.target.normalise(batch["image"])
            difference = torch.empty(*keep.shape[:2], self.target.embed_dim, device=keep.device)
            blanks = []
            for turn, removal in enumerate(self.removals):
                turns = slice(turn, None, len(self.removals))
                both = torch.stack([keep[:, turns], ~keep[:, turns]], 2).flatten(1, 2)
                seen = self._embed(normalised, both, removal).unflatten(1, (-1, 2))
                difference[:, turns] = seen[:, :, 0] - seen[:, :, 1]
                blanks.append(self._embed(normalised[:1], torch.zeros_like(keep[:1, :1]), removal)[0])
        return {"keep": keep, "difference": difference, "blank": torch.stack(blanks).mean(0).expand(len(keep), -1)}

    def _draw(self, batch: dict[str, Tensor], epoch: int) -> Tensor:
        """The first coalition of each pair, (B, M, N)."""
        index = batch["index"]
        seed = stream("coalitions", self.seed, epoch)
        shape, num_patches = self.grid.shape, self.grid.num_patches
        if self.fit == "regions":
            return region_coalitions(index, shape, self.pairs, seed)
        if self.fit == "ranking":
            # In an epoch, an image has the sizes that the next one had in the epoch before
            numbers = (index[:, None] + epoch) * self.pairs + torch.arange(self.pairs, device=index.device)
            return rank_coalitions(numbers, self._score_patches(batch, epoch), shape, NOISE, seed)
        power = POWER if self.fit == "shapley" else 0
        regions = self.pairs // 2 if self.fit == "mixed" else 0
        single = shapley_coalitions(index, num_patches, self.pairs - regions, seed, paired=False, power=power)
        return torch.cat([single, region_coalitions(index, shape, regions, seed)], 1) if regions else single

    def _score_patches(self, batch: dict[str, Tensor], epoch: int) -> Tensor:
        """The scores of the patches that each coalition ranks, (B, M, N)."""
        embeddings = self.target.embed(self.target.normalise(batch["image"]))
        seed = stream("functionals", self.seed, epoch)
        functionals = self.learned.likely(embeddings, batch["index"], self.pairs, seed)
        return self.ranker.explain(batch["image"], functionals).flatten(2)

    def _embed(self, normalised: Tensor, keep: Tensor, removal: Removal) -> Tensor:
        outputs = masked_outputs(self.target, nn.Identity(), normalised, keep, self.grid, removal, self.chunk_size)
        return outputs.float()

    def compute(self, vectors: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """The error of predicted vectors c_z (B, N, D), see `coalition_sums`."""
        errors, differences = self.compute_sums(vectors, rows)
        return (errors / differences).mean()

    def compute_sums(self, vectors: Tensor, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.autocast(vectors.device.type, enabled=False):  # sums over all patches
            errors, difference = coalition_errors(vectors.float(), rows, self.fit)
            return coalition_sums(errors, difference, *self.learned.of(rows["embedding"], rows["index"]))

    def unit(self, rows: dict[str, Tensor]) -> Tensor:
        """The standard deviation of the entries of c_z with which their sums vary as much as the embeddings."""
        return rows["difference"].square().mean().sqrt() / self.grid.num_patches**0.5

    def key(self) -> Identity:
        ranked = self.fit == "ranking"  # then functionals decide which patches are hidden
        target = self.learned.identity() if ranked else {"target": self.target.backbone_identity()}
        own: Identity = {"source": "embeddings of coalitions"} | target
        if ranked:
            own |= {"ranked_by": RANKED_BY, "noise": NOISE, "temperature": TEMPERATURE}
        learned = ("functionals", "vocabulary", "text_head")  # in `own`, if rows depend on them
        return recipe(self, without=(*own, *learned)) | own

"""Refining the explanations of any explainer: a function, and an explainer for evaluations."""

from functools import partial
from typing import Any, Literal, TypedDict, Unpack

from torch import Tensor, nn

from explainers import Explainer, VectorExplainer
from explainers.errors import (
    InputError,
    check_choices,
    check_integers,
    check_keywords,
    check_positive,
    check_range,
    checks_choices,
)
from explainers.masking import PatchGrid, Removal
from explainers.models import TargetModel
from explainers.models.removal import check_removal
from explainers.posthoc import build
from explainers.refinement.again import Again, check_seen
from explainers.refinement.coalitions import TEMPERATURE, check_passes
from explainers.refinement.prior import Prior, check_explainer, find_target
from explainers.refinement.refinement import MaskedPairs, Refinement
from explainers.runtime.modes import ordinary_tensors

Fit = Literal["again", "ranking", "regions", "shapley"]
"""How passes refine a heatmap: they explain again, or embed pairs of masked images."""


class Masking(TypedDict, total=False):
    """Keyword arguments of `refine` about its masked passes."""

    removal: Removal
    fit: Fit | None
    temperature: float | None
    chunk_size: int
    seed: int


FEW = 32
"""Number of passes from which pairs of masked images are better than explaining again (AnyHead on ViT-Tiny, zero)."""


@ordinary_tensors()
@checks_choices
def refine(
    explainer: Any,
    images: Tensor,
    classes: Tensor | None = None,
    passes: int = 64,
    *,
    functionals: Tensor | None = None,
    target: TargetModel | None = None,
    grid: PatchGrid | None = None,
    **masking: Unpack[Masking],
) -> Refinement:
    """Refine the heatmaps of any explainer by masked forward passes.

    Two masked images, one with a coalition S of patches and one with all others, give the difference of two embeddings.
    Ridge regression fits attributions of the patches to these differences, towards the explainer's own heatmap, see
    `fit_pairs`. The embeddings do not depend on a class or a head: one set of passes refines all of them. Few passes
    explain again instead, see `explain_again`: ranks of the patches for one class, without vectors and errors. Another
    class then takes as many passes again, and `more` draws pairs around the ranks.

    Args:
        explainer: the prior: an explainer of classes, or one with vectors, such as AnyHead; `None` for no prior.
        images: uint8, (B, C, H, W).
        classes: the class to explain in each image, (B,); `None` for the predicted ones.
        passes: number of masked forward passes of each image, even and at least 8; `Refinement.until` makes as many as
            it takes. With `again`, the number of explanations, from 2 to 2N − 1, the first of the whole image.
        functionals: v · G(x) to explain instead of a class, one v for each image, (B, D). The head may then be of any
            kind, or missing.
        target: the model to explain; by default the explainer's.
        grid: the patches; by default those of the explainer, or of the model.
        removal: what replaces hidden patches, see `Removal`.
        fit: how coalitions are drawn and weighed; `None`: `again` for fewer than 32 passes of an explainer, if the
            removal is not `drop`; otherwise `ranking`. `again`: see above. `ranking`: regions
            around the ranking of patches that the passes so far give. `regions`: coherent regions, see
            `region_coalitions`. `shapley`: patches one by one; the heatmap converges to the Shapley values of the
            explained score.
        temperature: t of the score of a class that is explained, see `score_functionals`.
        chunk_size: maximum number of masked images in memory.
        seed: seed of the coalitions.

    Raises:
        InputError: for numbers that make no sense, a removal that the model lacks, a head that is not linear, an
            explainer of another model, or one whose heatmaps do not fit.
    """
    check_keywords("refine", masking, Masking)
    check_choices(masking, Masking.__annotations__)
    removal, temperature = masking.get("removal", "zero"), masking.get("temperature", TEMPERATURE)
    chunk_size, seed = masking.get("chunk_size", 256), masking.get("seed", 0)
    _check_numbers(temperature, chunk_size, seed)
    if classes is not None and functionals is not None:
        raise InputError("expected classes or functionals, got both: read the classes with of(classes) afterwards")
    if functionals is not None and functionals.dim() != 2:
        raise InputError(
            f"expected one functional for each image, of shape [{len(images)}, D], got {list(functionals.shape)}: read"
            " others with explain(functionals) afterwards"
        )
    check_explainer(explainer)
    target = find_target(explainer, target).in_eval_mode()
    check_removal(target, removal)
    patches: PatchGrid = getattr(explainer, "grid", target.grid) if grid is None else grid
    target.check_grid(patches)
    patches.check(images)
    fit = masking.get("fit") or choose_fit(passes, explainer, patches, removal)
    pairs = MaskedPairs(target, target.normalise(images), patches, removal, chunk_size)
    of_prior = partial(Refinement, temperature=temperature, seed=seed)
    if fit == "again":
        _check_again(explainer, passes, patches, removal)
        prior = Prior(Again(explainer, target, patches, passes, removal), target, patches, images, passes)
        return of_prior(prior, pairs, classes, functionals, "ranking")
    check_passes(passes=passes)
    return of_prior(Prior(explainer, target, patches, images), pairs, classes, functionals, fit).more(passes)


@checks_choices
def choose_fit(passes: int, explainer: Any, grid: PatchGrid, removal: Removal) -> Fit:
    """The default fit: `again` for fewer than 32 passes of an explainer of classes, where it can, else `ranking`."""
    check_integers(passes=passes)
    few = passes < min(FEW, 2 * grid.num_patches)
    return "again" if few and callable(explainer) and removal in ("zero", "black") else "ranking"


@checks_choices
def _check_again(explainer: Any, passes: int, grid: PatchGrid, removal: Removal) -> None:
    if not callable(explainer):
        got = None if explainer is None else type(explainer).__name__
        raise InputError(f"expected an explainer of classes for fit=again, got {got}: give one, or take fit=ranking")
    check_seen(removal)
    check_integers(passes=passes)
    check_range(2, 2 * grid.num_patches - 1, passes=passes)


class Refined(nn.Module):
    """Explains classes by an explainer whose heatmaps masked forward passes refine.

    For other arguments see `refine`.

    Args:
        target: the model to explain.
        grid: the patches that are explained.
        prior: an explainer of this model, such as AnyHead; the name of a method, see `posthoc.build`; `None` for none.
        passes: number of masked forward passes of each image, besides those of the prior and one of the whole image;
            with `again`, the number of its explanations by the prior, see `refine`.
    """

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        prior: str | Explainer | None = "DecompX-PLUS",
        passes: int = 64,
        removal: Removal = "zero",
        fit: Fit | None = None,
        temperature: float | None = TEMPERATURE,
        chunk_size: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_numbers(temperature, chunk_size, seed)
        check_removal(target, removal)
        target.check_grid(grid)
        self.target = target.in_eval_mode()
        self.grid = grid
        self.prior: Any = build(prior, target, grid) if isinstance(prior, str) else prior
        check_explainer(self.prior)
        again = (fit or choose_fit(passes, self.prior, grid, removal)) == "again"
        if again:
            _check_again(self.prior, passes, grid, removal)
        else:
            check_passes(passes=passes)
        self.signed = not again  # ranks have no sign
        self.passes = passes
        self.removal = removal
        self.fit = fit
        self.temperature = temperature
        self.chunk_size = chunk_size
        self.seed = seed
        of_prior = 0 if prior is None else getattr(self.prior, "forward_passes", 1)
        embeds = again or not isinstance(self.prior, VectorExplainer)  # whose vectors come with the embeddings
        self.forward_passes = embeds + (passes * of_prior if again else passes + of_prior)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Explain one class (B,) of each uint8 image (B, C, H, W): heatmaps (B, rows, columns)."""
        return refine(
            self.prior,
            images,
            classes,
            self.passes,
            target=self.target,
            grid=self.grid,
            removal=self.removal,
            fit=self.fit,
            temperature=self.temperature,
            chunk_size=self.chunk_size,
            seed=self.seed,
        ).heatmaps


def _check_numbers(temperature: float | None, chunk_size: int, seed: int) -> None:
    check_integers(chunk_size=chunk_size, seed=seed)
    check_positive(chunk_size=chunk_size)
    if temperature is not None:
        check_positive(temperature=temperature)

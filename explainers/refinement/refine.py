"""Refining the explanations of any explainer: a function, and an explainer for evaluations."""

from typing import Any

from torch import Tensor, nn

from explainers.errors import InputError, check_positive, check_range, checks_choices
from explainers.masking import PatchGrid, Removal
from explainers.posthoc import build
from explainers.refinement.pairs import MaskedPairs
from explainers.refinement.refinement import Refinement
from explainers.refinement.rounds import Draw, check_passes
from explainers.target import TargetModel
from explainers.target.removal import check_removal


@checks_choices
def refine(
    explainer: Any,
    images: Tensor,
    classes: Tensor | None = None,
    passes: int = 64,
    *,
    target: TargetModel | None = None,
    grid: PatchGrid | None = None,
    removal: Removal = "zero",
    fit: Draw = "ranking",
    noise: float = 1.5,
    tolerance: float | None = None,
    temperature: float | None = 2.0,
    chunk_size: int = 256,
    seed: int = 0,
) -> Refinement:
    """Refine the heatmaps of any explainer by masked forward passes.

    Two masked images, one with a coalition S of patches and one with all others, give the difference of two embeddings.
    Ridge regression fits attributions of the patches to these differences, towards the explainer's own heatmap, see
    `fit_pairs`. The embeddings do not depend on a class or a head: one set of passes refines all of them.

    Args:
        explainer: the prior: an explainer of classes, or one with vectors, such as AnyHead; `None` for no prior.
        images: uint8, (B, C, H, W).
        classes: the class to explain in each image, (B,); `None` for the predicted ones.
        passes: number of masked forward passes of each image, even; with `tolerance`, the largest number.
        target: the model to explain; by default that of the explainer.
        grid: the patches; by default those of the explainer, or of the model.
        removal: what replaces hidden patches, see `Removal`.
        fit: how coalitions are drawn and weighed. `ranking`: regions around the ranking of patches that the passes so
            far give. `regions`: coherent regions, see `region_coalitions`. `shapley`: patches one by one; the heatmap
            converges to the Shapley values of the explained score.
        noise: with `ranking`, how far coalitions deviate from the ranking, see `ranked_coalitions`.
        tolerance: stop when the median standard error of the patches of every image, relative to the standard deviation
            of its heatmap, is below it, see `Refinement.precision`; `None` makes all passes.
        temperature: t of the score of a class that is explained, see `score_functionals`.
        chunk_size: maximum number of masked images in memory.
        seed: seed of the coalitions.

    Raises:
        InputError: for passes that are not pairs, a removal that the model lacks, a head that is not linear, or an
            explainer of another model.
    """
    check_passes(passes)
    _check_numbers(noise, temperature, chunk_size)
    target = _target_of(explainer, target)
    check_removal(target, removal)
    patches: PatchGrid = getattr(explainer, "grid", target.grid) if grid is None else grid
    target.check_grid(patches)
    patches.check(images)
    pairs = MaskedPairs(target, target.normalise(images), patches, removal, chunk_size)
    refinement = Refinement(explainer, pairs, images, classes, fit, noise, temperature, seed)
    if tolerance is None:
        return refinement.more(passes)
    check_positive(tolerance=tolerance)
    return refinement.until(tolerance, passes)


class Refined(nn.Module):
    """Explains with a method without training that masked forward passes refine; see `refine`.

    Args:
        target: the model to explain, with a linear head.
        grid: the patches that are explained.
        prior: name of a method without training, see `posthoc.build`; `None` for no prior.
        passes: number of masked forward passes of each image, besides those of the prior and one of the whole image.
        removal: see `refine`.
        fit: see `refine`.
        noise: see `refine`.
        temperature: see `refine`.
        chunk_size: see `refine`.
        seed: see `refine`.
    """

    @checks_choices
    def __init__(
        self,
        target: TargetModel,
        grid: PatchGrid,
        prior: str | None = "DecompX-PLUS",
        passes: int = 64,
        removal: Removal = "zero",
        fit: Draw = "ranking",
        noise: float = 1.5,
        temperature: float | None = 2.0,
        chunk_size: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_passes(passes)
        _check_numbers(noise, temperature, chunk_size)
        check_removal(target, removal)
        target.check_grid(grid)
        self.target = target.eval()
        self.grid = grid
        self.prior: Any = None if prior is None else build(prior, target, grid)
        self.passes = passes
        self.removal = removal
        self.fit = fit
        self.noise = noise
        self.temperature = temperature
        self.chunk_size = chunk_size
        self.seed = seed
        self.forward_passes = passes + 1 + (0 if prior is None else getattr(self.prior, "forward_passes", 1))

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return refine(
            self.prior,
            images,
            classes,
            self.passes,
            target=self.target,
            grid=self.grid,
            removal=self.removal,
            fit=self.fit,
            noise=self.noise,
            temperature=self.temperature,
            chunk_size=self.chunk_size,
            seed=self.seed,
        ).heatmaps


def _check_numbers(noise: float, temperature: float | None, chunk_size: int) -> None:
    """Raise an InputError for a number that makes no sense."""
    check_positive(chunk_size=chunk_size)
    check_range(0, noise=noise)
    if temperature is not None:
        check_positive(temperature=temperature)


def _target_of(explainer: Any, target: TargetModel | None) -> TargetModel:
    """The model to explain: that of the explainer, unless it is given."""
    own = getattr(explainer, "target", None)
    if not isinstance(own, TargetModel):
        if target is None:
            raise InputError(
                f"expected an explainer with the model that it explains, got {type(explainer).__name__}: give the model"
                " as target=..."
            )
        return target
    if target is not None and own is not target and own.identity() != target.identity():
        raise InputError(
            f"expected an explainer of this model, got one of {own.name} with other weights: leave out target=..."
        )
    return own if target is None else target

"""Explanations of any explainer, refined by masked forward passes: as many as the user can afford, for every head."""

from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from explainers.errors import InputError, check_positive, checks_choices
from explainers.masking import PatchGrid, Removal
from explainers.models import TargetModel
from explainers.models.functionals import choose_temperature, head_functionals
from explainers.models.inputs import check_functionals, validate_classes
from explainers.models.removal import masked_outputs
from explainers.refinement.coalitions import (
    EARLIEST,
    Draw,
    check_pairs,
    check_passes,
    draw_coalitions,
    find_round,
    weigh_pairs,
)
from explainers.refinement.fit import Regression, fit_pairs
from explainers.refinement.prior import COMPUTING, Prior, products
from explainers.runtime.modes import ordinary_tensors


class Estimate(NamedTuple):
    """Heatmaps, and the standard error of every patch: (B, rows, columns) each, or (B, V, rows, columns).

    Standard errors are those of differences between patches: they do not include an offset that all patches share.
    1.96 of them are a 95 % interval for what endless passes give, see docs/how_to/refine.md. They are infinite
    where nothing was fitted, as with `fit="again"`, and where few patches gave less than four different pairs.
    """

    heatmaps: Tensor
    errors: Tensor


class MaskedPairs:
    """Pairs of masked images, a coalition of patches and its complement, and the difference of their embeddings.

    Attributes:
        keep: one coalition S of each pair, boolean (B, M, N).
        differences: G(x_S) − G(x_S̄), where S̄ is the complement of S: float32, (B, M, D).
    """

    @checks_choices
    def __init__(
        self, target: TargetModel, normalised: Tensor, grid: PatchGrid, removal: Removal, chunk_size: int
    ) -> None:
        check_positive(chunk_size=chunk_size)
        self.target = target
        self.normalised = normalised
        self.grid = grid
        self.removal = removal
        self.chunk_size = chunk_size
        self.keep = torch.zeros(len(normalised), 0, grid.num_patches, dtype=torch.bool, device=normalised.device)
        self.differences = normalised.new_zeros(len(normalised), 0, target.embed_dim)

    def __len__(self) -> int:
        return self.keep.shape[1]

    def add(self, keep: Tensor) -> None:
        """Embed the pairs of further coalitions, boolean (B, M, N)."""
        keep = keep.to(self.keep.device)
        both = torch.stack([keep, ~keep], 2).flatten(1, 2)
        embeddings = self._embed(self.normalised, both).unflatten(1, (-1, 2))
        self.keep = torch.cat([self.keep, keep], 1)
        self.differences = torch.cat([self.differences, embeddings[:, :, 0] - embeddings[:, :, 1]], 1)

    def blank(self) -> Tensor:
        """Embed an image without any patch: (1, D), equal for all images."""
        return self._embed(self.normalised[:1], self.keep.new_zeros(1, 1, self.grid.num_patches))[:, 0]

    @torch.no_grad()
    def _embed(self, normalised: Tensor, keep: Tensor) -> Tensor:
        settings = normalised, keep, self.grid, self.removal, self.chunk_size
        with COMPUTING:
            return masked_outputs(self.target, nn.Identity(), *settings).float()


class Refinement:
    """What masked forward passes tell about images; see `refine`, which builds it, for its arguments.

    Attributes:
        classes: of `heatmaps`, (B,); missing if there are functionals.
        functionals: v of what `heatmaps` explains, (B, 1, D).
        total: G(x) minus the embedding of no patch, (B, D), for `fit="shapley"`; otherwise `None`.
    """

    @checks_choices
    def __init__(
        self,
        prior: Prior,
        pairs: MaskedPairs,
        classes: Tensor | None,
        functionals: Tensor | None,
        fit: Draw,
        temperature: float | None,
        seed: int,
    ) -> None:
        self.prior = prior
        self.pairs = pairs
        self.target: TargetModel = pairs.target
        self.grid: PatchGrid = pairs.grid
        self.fit = fit
        self.temperature = temperature
        self.seed = seed
        self.total = prior.embeddings - pairs.blank() if fit == "shapley" else None
        if functionals is None:
            if classes is None:
                classes = self.target.classify(prior.embeddings).argmax(-1)
            self.classes = classes
            self.functionals, self._heatmaps = self._of_classes(self.classes)
        else:
            self.functionals, self._heatmaps = self._of_functionals(functionals)
        self._estimate: tuple[int, Estimate] | None = None
        self._fitted: tuple[int, Regression] | None = None

    @property
    def passes(self) -> int:
        """Number of passes of each image so far: those that explained it again, and masked ones."""
        return 2 * len(self.pairs) + self.prior.passes

    @property
    def heatmaps(self) -> Tensor:
        """The refined heatmaps of the classes or functionals that `refine` was given, (B, rows, columns)."""
        return self._current().heatmaps

    @property
    def errors(self) -> Tensor:
        """The standard error of every patch of `heatmaps`, (B, rows, columns), see `Estimate`.

        Raises:
            InputError: if nothing was fitted, as with `fit="again"`.
        """
        if not len(self.pairs):
            raise InputError("expected errors of a fit, got fit=again, which ranks patches: call more(64)")
        return self._current().errors

    @property
    def vectors(self) -> Tensor:
        """The refined vectors c_z, float32 (B, N, D): v · c_z attributes v · G(x) for every v.

        Raises:
            InputError: if the explainer has heatmaps alone.
        """
        if self.prior.vectors is None:
            name = type(self.prior.explainer).__name__
            if self.prior.passes:
                raise InputError("expected vectors of a fit, got fit=again, which ranks patches: take fit=ranking")
            raise InputError(
                f"expected an explainer with vectors, such as AnyHead, or none, got {name}, which has heatmaps: use"
                " of(classes) or explain(functionals)"
            )
        return self._fit_vectors(self.prior.vectors, len(self.pairs)).values.to(self.prior.vectors)

    def more(self, passes: int) -> Self:
        """Refine by an even number of further masked passes of each image: 64 and 64 more give what 128 at once give.

        After `fit="again"`, they draw pairs around its ranks, towards which the fit shrinks.
        """
        check_pairs(passes=passes)
        wanted = len(self.pairs) + passes // 2
        while len(self.pairs) < wanted:
            start, end = find_round(len(self.pairs))
            ranked = start if self.fit == "ranking" else 0  # other draws do not read the scores
            scores = self._attribute(self.functionals, self._heatmaps, ranked)[0][:, 0]
            first, last = len(self.pairs), min(end, wanted)
            self.pairs.add(draw_coalitions(self.fit, first, last, scores, self.grid.shape, self.seed))
        return self

    def until(self, tolerance: float, passes: int) -> Self:
        """Refine until `precision` is below a tolerance for every image, or until there are this many passes in all.

        It is checked after every round, which doubles the number of passes, from 64 passes on.
        """
        check_positive(tolerance=tolerance)
        check_passes(passes=passes)
        wanted = len(self.pairs) + (passes - self.passes) // 2
        while len(self.pairs) < wanted:
            if 2 * len(self.pairs) >= EARLIEST and self.precision().max() < tolerance:
                break
            _, end = find_round(len(self.pairs))
            self.more(2 * (min(end, wanted) - len(self.pairs)))
        return self

    def of(self, classes: Tensor) -> Estimate:
        """Explain other classes (B,) from the same passes; an InputError if the head is not linear."""
        return self._read(*self._of_classes(classes), several=False)

    def explain(self, functionals: Tensor) -> Estimate:
        """Explain linear functionals v · G(x) of the embedding, such as classes of other heads, from the same passes.

        Args:
            functionals: v, (B, D), or (B, V, D) for several of each image.
        """
        return self._read(*self._of_functionals(functionals), several=functionals.dim() == 3)

    def precision(self) -> Tensor:
        """The median standard error of the patches, relative to the standard deviation of the heatmap: (B,)."""
        heatmaps, errors = self.heatmaps.flatten(1), self.errors.flatten(1)
        return errors.median(-1).values / heatmaps.std(-1).clamp(min=1e-30)

    @ordinary_tensors()
    def _of_classes(self, classes: Tensor) -> tuple[Tensor, Tensor]:
        """v (B, 1, D) of the explained score of classes (B,) at the images, and the prior heatmaps (B, 1, N)."""
        classes = validate_classes(classes, self.prior.images, self.target.num_classes)
        temperature = choose_temperature(self.target.score, self.temperature)
        functionals = head_functionals(self.target.head, self.prior.embeddings, temperature, classes)[:, None]
        return functionals, self.prior.of_classes(classes, functionals)

    def _of_functionals(self, functionals: Tensor) -> tuple[Tensor, Tensor]:
        """v (B, V, D) of functionals (B, D) or (B, V, D), and the prior heatmaps (B, V, N)."""
        check_functionals(functionals, self.prior.images, self.target.embed_dim)
        every = functionals if functionals.dim() == 3 else functionals[:, None]
        return every, self.prior.of_functionals(functionals).view(*every.shape[:2], -1)

    def _current(self) -> Estimate:
        """The estimate for `classes` from all pairs, kept until there are more."""
        if self._estimate is None or self._estimate[0] != len(self.pairs):
            estimate = self._read(self.functionals, self._heatmaps, several=False)
            self._estimate = len(self.pairs), estimate
        return self._estimate[1]

    def _read(self, functionals: Tensor, priors: Tensor, several: bool) -> Estimate:
        """Attribute functionals (B, V, D), whose prior heatmaps are (B, V, N), to patches on the grid."""
        parts = self._attribute(functionals, priors, len(self.pairs))
        on_grid = [each.to(self.prior.embeddings).unflatten(-1, self.grid.shape) for each in parts]
        return Estimate(*(on_grid if several else [each[:, 0] for each in on_grid]))

    def _attribute(self, functionals: Tensor, priors: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Attributions and standard errors, (B, V, N) each, from the first `count` pairs."""
        if not count:
            return priors, torch.full_like(priors, torch.inf)
        if self.prior.vectors is not None:
            return self._fit_vectors(self.prior.vectors, count).heatmaps(functionals)
        keep = self.pairs.keep[:, :count]
        weights = weigh_pairs(self.fit, keep)
        one = functionals.new_ones(len(functionals), 1)
        parts = []
        for v, prior in zip(functionals.split(1, 1), priors.split(1, 1), strict=True):  # one at a time saves memory
            observed = products(v, self.pairs.differences[:, :count]).mT
            total = None if self.total is None else products(v, self.total[:, None])[:, 0]
            parts.append(fit_pairs(keep, observed, prior.mT, one, total, weights).heatmaps(one[:, None]))
        values, errors = zip(*parts, strict=True)
        return torch.cat(values, 1), torch.cat(errors, 1)

    def _fit_vectors(self, vectors: Tensor, count: int) -> Regression:
        """The fit of the vectors to the first `count` pairs, kept until another number is asked for."""
        if self._fitted is None or self._fitted[0] != count:
            keep = self.pairs.keep[:, :count]
            observed = self.pairs.differences[:, :count]
            weights = weigh_pairs(self.fit, keep)
            fitted = fit_pairs(keep, observed, vectors, self.functionals[:, 0], self.total, weights)
            self._fitted = count, fitted
        return self._fitted[1]

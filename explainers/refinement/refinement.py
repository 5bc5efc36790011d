"""Explanations of any explainer, refined by masked forward passes: as many as the user can afford, for every head."""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from explainers import FunctionalExplainer, VectorExplainer
from explainers.errors import InputError, checks_choices
from explainers.masking import PatchGrid
from explainers.refinement.fit import Fit, fit_pairs
from explainers.refinement.pairs import MaskedPairs
from explainers.refinement.rounds import Draw, check_passes, draw_coalitions, pair_weights, round_of
from explainers.target import TargetModel
from explainers.target.functionals import class_rows, score_functionals
from explainers.target.inputs import check_functionals, checked_classes


class Estimate(NamedTuple):
    """Heatmaps, and the standard error of every patch: (B, P, P) each, or (B, V, P, P)."""

    heatmaps: Tensor
    errors: Tensor


class Refinement:
    """What masked forward passes tell about images; see `refine`, which builds it.

    Args:
        explainer: the prior, or `None`.
        pairs: the masked images, without any yet.
        images: uint8, (B, C, H, W).
        classes: the classes whose ranking decides which patches are masked, (B,); `None` for the predicted ones.
        fit: see `refine`.
        noise: see `refine`.
        temperature: see `refine`.
        seed: see `refine`.
    """

    @checks_choices
    def __init__(
        self,
        explainer: Any,
        pairs: MaskedPairs,
        images: Tensor,
        classes: Tensor | None,
        fit: Draw,
        noise: float,
        temperature: float | None,
        seed: int,
    ) -> None:
        self.explainer = explainer
        self.pairs = pairs
        self.images = images
        self.target: TargetModel = pairs.target
        self.grid: PatchGrid = pairs.grid
        self.fit = fit
        self.noise = noise
        self.temperature = temperature
        self.seed = seed
        self._rows = class_rows(self.target.head, self.target.embed_dim, self.target.mean)
        self._vectors, self._embeddings = self._start()
        self._logits = self.target.classify(self._embeddings).detach()
        self.classes = self._checked(self._logits.argmax(-1) if classes is None else classes)
        self._total = self._embeddings - pairs.blank() if fit == "shapley" else None
        self.functionals = self._functionals(self.classes)
        self._prior = self._prior_of(self.functionals, self.classes)
        self._estimate: tuple[int, Estimate] | None = None

    @property
    def passes(self) -> int:
        """Number of masked forward passes of each image so far."""
        return 2 * len(self.pairs)

    @property
    def heatmaps(self) -> Tensor:
        """The refined heatmaps of `classes`, (B, P, P)."""
        return self._current().heatmaps

    @property
    def errors(self) -> Tensor:
        """The standard error of every patch of `heatmaps`, (B, P, P)."""
        return self._current().errors

    @property
    def vectors(self) -> Tensor:
        """The refined vectors c_z, float32 (B, N, D): v · c_z attributes v · G(x) for every v.

        Raises:
            InputError: if the explainer has heatmaps alone.
        """
        if self._vectors is None:
            raise InputError(
                f"expected an explainer with vectors, such as AnyHead, or none, got {type(self.explainer).__name__},"
                " which has heatmaps: use of(classes) or explain(functionals)"
            )
        return self._fit_vectors(self._vectors, len(self.pairs)).values.float()

    def more(self, passes: int) -> Self:
        """Refine further by an even number of masked forward passes of each image.

        64 and 64 more passes give what 128 passes at once give.
        """
        check_passes(passes)
        wanted = len(self.pairs) + passes // 2
        while len(self.pairs) < wanted:
            start, end = round_of(len(self.pairs))
            scores = self._attributed(self.functionals, self._prior, start)[0][:, 0]
            first, last = len(self.pairs), min(end, wanted)
            self.pairs.add(draw_coalitions(self.fit, first, last, scores, self.noise, self.seed))
        return self

    def until(self, tolerance: float, passes: int) -> Self:
        """Refine until `precision` is below a tolerance for every image, or until there are this many passes.

        It is checked after every round, whose number of passes doubles.
        """
        check_passes(passes)
        while self.passes < passes:
            _, end = round_of(len(self.pairs))
            self.more(min(2 * end, passes) - self.passes)
            if self.precision().max() < tolerance:
                break
        return self

    def of(self, classes: Tensor) -> Estimate:
        """Explain other classes (B,), from the same passes."""
        classes = self._checked(classes)
        functionals = self._functionals(classes)
        return self._read(functionals, self._prior_of(functionals, classes), several=False)

    def explain(self, functionals: Tensor) -> Estimate:
        """Explain linear functionals v · G(x) of the embedding, such as classes of other heads, from the same passes.

        Args:
            functionals: v, (B, D), or (B, V, D) for several of each image.

        Raises:
            InputError: for an explainer that explains classes alone.
        """
        check_functionals(functionals, self.images, self.target.embed_dim)
        several = functionals.dim() == 3
        every = functionals if several else functionals[:, None]
        if self._vectors is not None:
            return self._read(every, products(every, self._vectors), several)
        if not isinstance(self.explainer, FunctionalExplainer):
            raise InputError(
                f"expected an explainer of functionals, such as AnyHead or DecompX-PLUS, got"
                f" {type(self.explainer).__name__}: use of(classes)"
            )
        return self._read(every, self.explainer.explain(self.images, every).detach().flatten(2), several)

    def precision(self) -> Tensor:
        """The median standard error of the patches, relative to the standard deviation of the heatmap: (B,)."""
        heatmaps, errors = (each.flatten(1) for each in self._current())
        return errors.median(-1).values / heatmaps.std(-1).clamp(min=1e-30)

    @torch.no_grad()
    def _start(self) -> tuple[Tensor | None, Tensor]:
        """The vectors of the prior, if it has vectors, and the embeddings of the images."""
        if isinstance(self.explainer, VectorExplainer):
            vectors, embeddings = self.explainer.decompose(self.images)
            return vectors.float(), embeddings.float()
        embeddings = self.target.embed(self.pairs.normalised).float()
        if self.explainer is not None:
            return None, embeddings
        return embeddings.new_zeros(len(embeddings), self.grid.num_patches, embeddings.shape[-1]), embeddings

    def _checked(self, classes: Tensor) -> Tensor:
        return checked_classes(classes, self.images, self.target.num_classes)

    def _functionals(self, classes: Tensor) -> Tensor:
        """v of the explained score of classes (B,) at the images, (B, 1, D)."""
        return score_functionals(self._rows, self._logits, self.temperature, classes)[:, None]

    def _prior_of(self, functionals: Tensor, classes: Tensor) -> Tensor:
        """The explainer's heatmaps of classes (B,), whose functionals are (B, 1, D): (B, 1, N)."""
        if self._vectors is not None:
            return products(functionals, self._vectors)
        return self.explainer(self.images, classes).detach().flatten(1)[:, None]

    def _current(self) -> Estimate:
        """The estimate for `classes` from all pairs, kept until there are more."""
        if self._estimate is None or self._estimate[0] != len(self.pairs):
            estimate = self._read(self.functionals, self._prior, several=False)
            self._estimate = len(self.pairs), estimate
        return self._estimate[1]

    def _read(self, functionals: Tensor, priors: Tensor, several: bool) -> Estimate:
        """Attribute functionals (B, V, D), whose prior heatmaps are (B, V, N), to patches on the grid."""
        parts = self._attributed(functionals, priors, len(self.pairs))
        on_grid = [each.float().unflatten(-1, (self.grid.side, -1)) for each in parts]
        return Estimate(*(on_grid if several else [each[:, 0] for each in on_grid]))

    def _attributed(self, functionals: Tensor, priors: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Attributions and standard errors, (B, V, N) each, from the first `count` pairs."""
        if not count:
            return priors, torch.full_like(priors, torch.inf)
        if self._vectors is not None:
            return self._fit_vectors(self._vectors, count).heatmaps(functionals)
        several = functionals.shape[1]
        keep = self.pairs.keep[:, :count].repeat_interleave(several, 0)
        observed = products(functionals, self.pairs.differences[:, :count]).flatten(0, 1)[..., None]
        total = None if self._total is None else products(functionals, self._total[:, None]).flatten(0, 1)
        one = torch.ones_like(observed[:, :1, 0])
        fit = fit_pairs(keep, observed, priors.flatten(0, 1)[..., None], one, total, pair_weights(self.fit, keep))
        values, errors = fit.heatmaps(one[:, None])
        return values.view(-1, several, values.shape[-1]), errors.view(-1, several, errors.shape[-1])

    def _fit_vectors(self, vectors: Tensor, count: int) -> Fit:
        keep = self.pairs.keep[:, :count]
        observed = self.pairs.differences[:, :count]
        weights = pair_weights(self.fit, keep)
        return fit_pairs(keep, observed, vectors, self.functionals[:, 0], self._total, weights)


def products(functionals: Tensor, vectors: Tensor) -> Tensor:
    """v · c of functionals (B, V, D) and vectors (B, N, D): float64, (B, V, N), even under autocast."""
    return functionals.double() @ vectors.double().mT

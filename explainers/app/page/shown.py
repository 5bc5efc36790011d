"""An image that somebody looks at: its heatmaps, and what the model says when patches are hidden."""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor

from explainers import Explainer
from explainers.app.photos import photos_of
from explainers.app.session import Session
from explainers.errors import InputError, checks_choices
from explainers.images.decoding import middle_square
from explainers.metrics.curves import QUANTITIES
from explainers.metrics.perturbation import importance_order, perturbation_sweep
from explainers.target.removal import masked_outputs

Side = Literal["most", "least"]
"""Which patches are hidden first: the most or the least important ones."""

CHANCE = "chance"
"""Label of random orders, beside which the orders of explainers are tested."""

DRAWS = 3
"""Number of random orders, whose curves are averaged."""

LEVELS = 11
"""Number of points of a curve: 0, 10, ..., 100 % of the patches are hidden."""

PICTURE_SIZE = 448
"""Side of the pictures of the page, in pixels; the model sees the same square in its own size."""

CHUNK = 10
"""Number of masked images in one call of the model, between which other visitors get their turn."""

REMEMBERED = 4_000_000
"""Largest number of logits of masked copies of an image that are kept."""


class Shown:
    """One image of one visitor. What was computed once is kept: heatmaps, and logits of masked images.

    Args:
        session: the model, and the explainer that the page starts with.
        image: what `photos_of` reads, such as a path.
        explainers: the other methods by their names; all visitors share them.
        computing: held while the model computes, because methods change it for the time of a call.

    Raises:
        InputError: if the image cannot be read.
    """

    def __init__(self, session: Session, image: Any, explainers: Mapping[str, Explainer], computing: Lock) -> None:
        photo = photos_of(image)[0]
        decoded = photo.decode()
        self.name = photo.name
        self.session = session
        self.explainers = explainers
        self.target = session.target
        self.grid = session.target.grid
        self.computing = computing
        with computing:
            self.explanation = session.explain([decoded])[0]
        size = max(PICTURE_SIZE // self.grid.side, 1) * self.grid.side
        self.picture = middle_square(decoded, size, session.resampling)
        with torch.no_grad():
            self.normalised = self.target.normalise(self.explanation.image[None].to(self.target.mean.device))
        self._heatmaps: dict[tuple[str, int], Tensor] = {}
        self._logits: dict[bytes, Tensor] = {}

    def heatmap(self, method: str, index: int) -> Tensor:
        """The heatmap (P, P) of a class by a method.

        Args:
            method: the session's own method, which may know all classes already, or one of `posthoc`.
            index: index of the class.
        """
        key = method, index
        if key not in self._heatmaps:
            with self.computing:
                self._heatmaps[key] = self._explained(method, index).detach().float().cpu()
        return self._heatmaps[key]

    def _explained(self, method: str, index: int) -> Tensor:
        if method == self.session.method:
            return self.explanation.of(index).heatmap
        device = self.target.mean.device
        return self.explainers[method](self.explanation.image[None].to(device), torch.tensor([index], device=device))[0]

    def orders(self, method: str, index: int) -> Tensor:
        """The patches in the order of a heatmap, the most important first, (1, N); several random orders of chance."""
        if method == CHANCE:
            return importance_order(torch.zeros(DRAWS, self.grid.num_patches), torch.arange(DRAWS))
        return importance_order(self.heatmap(method, index).reshape(1, -1), torch.tensor([0]))

    @checks_choices
    def curve(self, method: str, index: int, side: Side = "most") -> list[float]:
        """The probability of a class at `LEVELS` fractions of hidden patches.

        With `most`, it is the deletion curve of the metrics; with `least`, their insertion curve from its end.
        """
        orders = self.orders(method, index)
        classes = torch.full((len(orders),), index)
        number = 1 if side == "least" and method != CHANCE else 0
        sides = (number == 0, number == 1)
        outputs = perturbation_sweep(self._predict, orders, classes, LEVELS, sides=sides)
        probabilities = outputs[:, QUANTITIES.index("probability"), number].mean(0)
        return (probabilities.flip(0) if number else probabilities).tolist()

    def probabilities(self, index: int, hidden: Sequence[Sequence[int]]) -> list[float]:
        """The probability of a class under several masks, each given by the numbers of its hidden patches."""
        keep = torch.ones(len(hidden), self.grid.num_patches, dtype=torch.bool)
        for mask, patches in zip(keep, hidden, strict=True):
            if not all(isinstance(patch, int) and 0 <= patch < len(mask) for patch in patches):
                raise InputError(f"expected patches from 0 to {len(mask) - 1}, got {patches!s:.60}")
            mask[torch.tensor(patches, dtype=torch.long)] = False
        return self.logits(keep).softmax(-1)[:, index].tolist()

    def logits(self, keep: Tensor) -> Tensor:
        """Logits (M, K) of this image under masks (M, N), True at visible patches; the model sees no mask twice."""
        keys = [mask.numpy().tobytes() for mask in keep]
        known = dict(self._logits)  # other threads may drop what this one reads
        if len(known) * self.target.num_classes > REMEMBERED:
            self._logits.clear()
        new = {key: number for number, key in enumerate(keys) if key not in known}
        for start in range(0, len(new), CHUNK):
            chunk = list(new)[start : start + CHUNK]
            masks = keep[None, [new[key] for key in chunk]].to(self.normalised.device)
            with self.computing, torch.no_grad():
                logits = masked_outputs(self.target, self.target.classify, self.normalised, masks, self.grid)
            of_chunk = dict(zip(chunk, logits[0].float().cpu(), strict=True))
            known |= of_chunk
            self._logits.update(of_chunk)
        return torch.stack([known[key] for key in keys])

    def _predict(self, keep: Tensor) -> Tensor:
        """Logits (B, M, K) under masks (B, M, N) of this image."""
        return self.logits(keep.flatten(0, 1)).unflatten(0, keep.shape[:2])

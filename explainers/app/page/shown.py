"""An image that somebody looks at: its heatmaps, and what the model says when patches are hidden."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from explainers import Explainer
from explainers.app.explanation import Explanation
from explainers.app.photos import photos_of
from explainers.app.session import Session
from explainers.app.texts import PreparedTexts
from explainers.errors import InputError, check_range, checks_choices
from explainers.images.decoding import middle_square
from explainers.likeness import Likeness, likeness
from explainers.metrics.curves import QUANTITIES
from explainers.metrics.perturbation import importance_order, perturbation_sweep
from explainers.target.names import class_index
from explainers.target.removal import masked_outputs
from explainers.text.encoders import checked_texts

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

MOST_TEXTS = 50
"""Number of texts that a page lists."""

REMEMBERED = 4_000_000
"""Largest number of values in the embeddings of masked copies of an image that are kept."""


class Text(NamedTuple):
    """A text, and the others that it is told apart from, if any."""

    text: str
    against: tuple[str, ...] = ()


Index = int | Text
"""What is explained: a class, by its index, or a text."""


class Shown:
    """One image of one visitor. What was computed once is kept: heatmaps, and embeddings of masked images.

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
        self.decoded = photo.decode()
        self.name = photo.name
        self.session = session
        self.explainers = explainers
        self.target = session.target
        self.grid = session.target.grid
        self.computing = computing
        self.explanation: Explanation | None = None
        if session.names:
            with computing:
                self.explanation = session.explain([self.decoded])[0]
        size = max(PICTURE_SIZE // self.grid.side, 1) * self.grid.side
        self.picture = middle_square(self.decoded, size, session.resampling)
        seen = middle_square(self.decoded, self.grid.image_size, session.resampling)
        self.image = torch.from_numpy(np.array(seen)).permute(2, 0, 1)[None].to(self.target.mean.device)
        with torch.no_grad():
            self.normalised = self.target.normalise(self.image)
        self._heatmaps: dict[tuple[str, Index], Tensor] = {}
        self._embeddings: dict[bytes, Tensor] = {}
        self._texts: dict[str, PreparedTexts] = {}

    def checked(self, index: Any, against: Sequence[str] = ()) -> Index:
        """The class, or text, that a browser asks for; an InputError if there is none, or it is empty."""
        if isinstance(index, str) and self.session.takes_texts:
            check_range(0, MOST_TEXTS, texts=len(against))
            return Text(checked_texts(index)[0], tuple(checked_texts(against)) if against else ())
        return class_index(index, self.session.names)

    def title(self, index: Index) -> str:
        """The name of a class; a text as it is."""
        return index.text if isinstance(index, Text) else self.session.names[index]

    def score(self, index: Index) -> float:
        """The probability of a class, or the similarity of a text."""
        if self.explanation is not None and isinstance(index, int):
            return self.explanation.scores[index].item()
        return self.scores(index, [[]])[0]

    def heatmap(self, method: str, index: Index) -> Tensor:
        """The heatmap (P, P) of a class or text by a method.

        Args:
            method: the session's own method, which may know all classes already, or one of `posthoc`.
            index: see `Index`.
        """
        key = method, index
        if key not in self._heatmaps:
            with self.computing:
                self._heatmaps[key] = self._explained(method, index).detach().float().cpu()
        return self._heatmaps[key]

    def signed(self, method: str) -> bool | None:
        """Whether the heatmaps of a method are signed, see `Explainer`."""
        return getattr(self.explainers.get(method, self.session.explainer), "signed", None)

    def _explained(self, method: str, index: Index) -> Tensor:
        if isinstance(index, Text):
            if method not in self._texts:
                explainer = self.explainers.get(method, self.session.explainer)
                self._texts[method] = PreparedTexts(explainer, self.session.text_head, self.image)
            return self._texts[method].told_apart(index.against or None).heatmaps([index.text])[0]
        if method == self.session.method and self.explanation is not None:
            return self.explanation.of(index).heatmap
        return self.explainers[method](self.image, torch.tensor([index], device=self.image.device))[0]

    def alike(self, other: "Shown") -> tuple[Likeness, str]:
        """Why this image is like another one, and what explains it."""
        with self.computing, torch.no_grad():
            explainer, method = self.session.with_vectors
            found = likeness(explainer, self.image, other.image)
        parts = {name: getattr(found, name).cpu() for name in ("similarity", "pairs", "rest")}
        return replace(found, **parts), method

    def orders(self, method: str, index: Index) -> Tensor:
        """The patches in the order of a heatmap, the most important first, (1, N); several random orders of chance."""
        if method == CHANCE:
            return importance_order(torch.zeros(DRAWS, self.grid.num_patches), torch.arange(DRAWS))
        return importance_order(self.heatmap(method, index).reshape(1, -1), torch.tensor([0]))

    @checks_choices
    def curve(self, method: str, index: Index, side: Side = "most") -> list[float]:
        """The probability of a class, or the similarity of a text, at `LEVELS` fractions of hidden patches.

        With `most`, it is the deletion curve of the metrics; with `least`, their insertion curve from its end.
        """
        orders = self.orders(method, index)
        number = 1 if side == "least" and method != CHANCE else 0
        sides = (number == 0, number == 1)

        def predict(keep: Tensor) -> Tensor:
            return self._scored(keep.flatten(0, 1), index).unflatten(0, keep.shape[:2])[..., None]

        outputs = perturbation_sweep(predict, orders, torch.zeros(len(orders), dtype=torch.long), LEVELS, sides=sides)
        values = outputs[:, QUANTITIES.index("logit"), number].mean(0)
        return (values.flip(0) if number else values).tolist()

    def scores(self, index: Index, hidden: Sequence[Sequence[int]]) -> list[float]:
        """The score of a class or text under several masks, each given by the numbers of its hidden patches."""
        keep = torch.ones(len(hidden), self.grid.num_patches, dtype=torch.bool)
        for mask, patches in zip(keep, hidden, strict=True):
            if not all(isinstance(patch, int) and 0 <= patch < len(mask) for patch in patches):
                raise InputError(f"expected patches from 0 to {len(mask) - 1}, got {patches!s:.60}")
            mask[torch.tensor(patches, dtype=torch.long)] = False
        return self._scored(keep, index).tolist()

    @torch.no_grad()
    def _scored(self, keep: Tensor, index: Index) -> Tensor:
        """The probability of a class, or the similarity of a text, under masks (M, N): (M,)."""
        embeddings = self.embeddings(keep).to(self.image.device)
        if isinstance(index, Text):
            return self.session.text_head(embeddings, [index.text])[:, 0].cpu()
        return self.target.classify(embeddings).softmax(-1)[:, index].cpu()

    def embeddings(self, keep: Tensor) -> Tensor:
        """Embeddings (M, D) of this image under masks (M, N), True at visible patches; the model sees each once."""
        keys = [mask.numpy().tobytes() for mask in keep]
        known = dict(self._embeddings)  # other threads may drop what this one reads
        if len(known) * self.target.embed_dim > REMEMBERED:
            self._embeddings.clear()
        new = {key: number for number, key in enumerate(keys) if key not in known}
        for start in range(0, len(new), CHUNK):
            chunk = list(new)[start : start + CHUNK]
            masks = keep[None, [new[key] for key in chunk]].to(self.image.device)
            with self.computing, torch.no_grad():
                embedded = masked_outputs(self.target, nn.Identity(), self.normalised, masks, self.grid)
            of_chunk = dict(zip(chunk, embedded[0].float().cpu(), strict=True))
            known |= of_chunk
            self._embeddings.update(of_chunk)
        return torch.stack([known[key] for key in keys])

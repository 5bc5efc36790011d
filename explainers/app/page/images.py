"""The images that visitors have opened: their heatmaps, and what the model says when patches are hidden."""

import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from explainers import Explainer
from explainers.app.batches import PreparedClasses, PreparedTexts, check_scores, is_signed
from explainers.app.choosing import estimate_passes
from explainers.app.session import Session
from explainers.errors import InputError, check_range, checks_choices
from explainers.images.bands import see_pixels
from explainers.likeness import Likeness, likeness
from explainers.metrics.curves import QUANTITIES
from explainers.metrics.perturbation import importance_order, perturbation_sweep
from explainers.models.names import class_index, find_other_classes
from explainers.models.removal import masked_outputs
from explainers.report.overlays import fit_photo, scale_box
from explainers.text.encoders import validate_texts

Side = Literal["most", "least"]
"""Which patches are hidden first: the most or the least important ones."""

CHANCE = "chance"
"""Label of random orders, beside which the orders of explainers are tested."""

DRAWS = 3
"""Number of random orders, whose curves are averaged."""

LEVELS = 11
"""Number of points of a curve: 0, 10, ..., 100 % of the patches are hidden."""

PICTURE_SIZE = 640
"""Longer side of the photo on the page, in pixels."""

CHUNK = 10
"""Number of masked images in one call of the model."""

MANY_PASSES = 10
"""Forward passes above which a method is slow, and its intermediate results are too large to keep."""

MOST_TEXTS = 50
"""Number of texts that a page lists, and of others from which a class or text is told apart."""

LONGEST_TEXT = 300
"""Number of characters of a text."""

TOP = 5
"""Number of most probable classes that are listed."""

REMEMBERED = 1_000_000
"""Largest number of values in the embeddings of masked copies of an image, or in its heatmaps, that are kept."""

MOST_IMAGES = 32
"""Number of images that are kept, with at most some 10 MB each."""


class Index(NamedTuple):
    """What is explained: a class, by its index, or a text; and the others that it is told apart from, if any."""

    wanted: int | str
    against: tuple[int | str, ...] = ()


class OpenedImage:
    """One image, as the model sees it. What was computed once is kept: heatmaps, and embeddings of masked images.

    The `image`, upright RGB, is not kept. All visitors share the session, and the other `explainers` by their names.
    """

    def __init__(self, session: Session, image: Image.Image, name: str, explainers: Mapping[str, Explainer]) -> None:
        self.name = name
        self.session = session
        self.explainers = {**explainers, session.method: session.explainer}
        self.target = session.target
        self.grid = session.target.grid
        self.picture = fit_photo(image, PICTURE_SIZE)
        self.box = scale_box(session.transform.box(*image.size), image, self.picture)
        pixels, _ = see_pixels(session.pixels.convert(image, name), session.transform)
        self.image = pixels[None].to(self.target.mean.device)
        self.probabilities: Tensor | None = None
        if session.names:
            with torch.no_grad():
                scores = self.target.scores(self.target(self.image).float()).cpu()
            check_scores(scores, [name], "scores", self.target.name)
            self.probabilities = scores[0]
        self._heatmaps: dict[tuple[str, Index], Tensor] = {}
        self._embeddings: dict[bytes, Tensor] = {}
        self._prepared: dict[tuple[str, bool], PreparedClasses | PreparedTexts] = {}

    @property
    def classes(self) -> list[tuple[int, str, float]]:
        """The most probable classes: index, name and probability; none for a model without classes."""
        if self.probabilities is None:
            return []
        most = self.probabilities.topk(min(TOP, len(self.probabilities)))
        return [(index, self.session.names[index], self.score(index)) for index in most.indices.tolist()]

    def parse_index(self, index: Any, against: Sequence[Any] = ()) -> Index:
        """The class, or text, that a browser asks for; an InputError if there is none, or it is empty."""
        check_range(0, MOST_TEXTS, against=len(against))
        if isinstance(index, str) and self.session.takes_texts:
            texts = [text.encode(errors="replace").decode() for text in validate_texts([index, *against])]
            longest = max(map(len, texts))
            if longest > LONGEST_TEXT:
                raise InputError(f"expected texts of at most {LONGEST_TEXT} characters, got {longest}: shorten them")
            return Index(texts[0], tuple(texts[1:]))
        chosen = class_index(index, self.session.names)
        return Index(chosen, tuple(find_other_classes(against, [chosen], self.session.names)))

    def title(self, wanted: int | str) -> str:
        """The name of a class; a text as it is."""
        return wanted if isinstance(wanted, str) else self.session.names[wanted]

    def score(self, wanted: int | str) -> float:
        """The score of a class, such as its probability, or the similarity of a text."""
        if self.probabilities is not None and isinstance(wanted, int):
            return self.probabilities[wanted].item()
        return self.scores(Index(wanted), [[]])[0]

    def heatmap(self, method: str, index: Index) -> Tensor:
        """The heatmap (rows, columns) of a class or text by one of the `explainers`."""
        key = method, index
        if key not in self._heatmaps:
            if len(self._heatmaps) * self.grid.num_patches > REMEMBERED:
                self._heatmaps.clear()
            self._heatmaps[key] = self._explain(method, index)
        return self._heatmaps[key]

    def signed(self, method: str, index: Index) -> bool | None:
        """Whether the heatmap of a method is signed, see `is_signed`."""
        return is_signed(self.explainers[method], index.against)

    @torch.no_grad()
    def _explain(self, method: str, index: Index) -> Tensor:
        """Explain by a method. Its intermediate results are kept once it has ended, except those of slow ones."""
        explainer, key = self.explainers[method], (method, isinstance(index.wanted, str))
        prepared: Any = self._prepared.pop(key, None)
        if prepared is None and isinstance(index.wanted, str):
            prepared = PreparedTexts(explainer, self.session.text_head, self.image)
        elif prepared is None:
            prepared = PreparedClasses(explainer, self.target, self.image)
        heatmap: Tensor = prepared.heatmaps([index.wanted], index.against)[0]
        if estimate_passes(explainer) <= MANY_PASSES:
            self._prepared[key] = prepared
        return heatmap

    @torch.no_grad()
    def compare(self, other: "OpenedImage") -> tuple[Likeness, str]:
        """Why this image is like another one, and what explains it."""
        explainer, method = self.session.with_vectors
        return likeness(explainer, self.image, other.image).take_row(0), method

    def orders(self, method: str, index: Index) -> Tensor:
        """The patches in the order of a heatmap, the most important first, (1, N); several random orders of chance."""
        if method == CHANCE:
            return importance_order(torch.zeros(DRAWS, self.grid.num_patches), torch.arange(DRAWS))
        return importance_order(self.heatmap(method, index).reshape(1, -1), torch.tensor([0]))

    @checks_choices
    def curve(self, method: str, index: Index, side: Side = "most") -> list[float]:
        """The score of a class or text, see `_score`, at `LEVELS` fractions of hidden patches.

        With `most`, it is the deletion curve of the metrics; with `least`, their insertion curve from its end.
        """
        orders = self.orders(method, index)
        number = 1 if side == "least" and method != CHANCE else 0
        sides = (number == 0, number == 1)

        def predict(keep: Tensor) -> Tensor:
            return self._score(keep.flatten(0, 1), index).unflatten(0, keep.shape[:2])[..., None]

        outputs = perturbation_sweep(predict, orders, torch.zeros(len(orders), dtype=torch.long), LEVELS, sides=sides)
        values = outputs[:, QUANTITIES.index("logit"), number].mean(0)
        return (values.flip(0) if number else values).tolist()

    def scores(self, index: Index, hidden: Sequence[Sequence[int]]) -> list[float]:
        """The score of a class or text, see `_score`, under masks, each given by the numbers of its hidden patches."""
        keep = torch.ones(len(hidden), self.grid.num_patches, dtype=torch.bool)
        for mask, patches in zip(keep, hidden, strict=True):
            if not all(isinstance(patch, int) and 0 <= patch < len(mask) for patch in patches):
                raise InputError(f"expected patches from 0 to {len(mask) - 1}, got {patches!s:.60}")
            mask[torch.tensor(patches, dtype=torch.long)] = False
        return self._score(keep, index).tolist()

    @torch.no_grad()
    def _score(self, keep: Tensor, index: Index) -> Tensor:
        """The score of a class, or the similarity of a text, minus the mean of the others, under masks (M, N): (M,)."""
        embeddings = self.embeddings(keep).to(self.image.device)
        asked: list[Any] = [index.wanted, *index.against]
        if isinstance(index.wanted, str):
            scores = self.session.text_head(embeddings, asked)
        else:
            scores = self.target.scores(self.target.classify(embeddings))[:, asked]
        own, others = scores[:, 0], scores[:, 1:]
        return (own - others.mean(-1) if index.against else own).cpu()

    @torch.no_grad()
    def embeddings(self, keep: Tensor) -> Tensor:
        """Embeddings (M, D) of this image under masks (M, N), True at visible patches; the model sees each once."""
        if len(self._embeddings) * self.target.embed_dim > REMEMBERED:
            self._embeddings.clear()
        keys = [mask.numpy().tobytes() for mask in keep]
        new = {key: number for number, key in enumerate(keys) if key not in self._embeddings}
        if new:
            masks = keep[None, list(new.values())].to(self.image.device)
            normalised = self.target.normalise(self.image)
            embedded = masked_outputs(self.target, nn.Identity(), normalised, masks, self.grid, chunk_size=CHUNK)
            self._embeddings.update(zip(new, embedded[0].float().cpu(), strict=True))
        return torch.stack([self._embeddings[key] for key in keys])


class OpenedImages:
    """The images that were opened or asked about last, each under a key that nobody can guess."""

    def __init__(self) -> None:
        self._images: OrderedDict[str, OpenedImage] = OrderedDict()

    def add(self, image: OpenedImage) -> str:
        """Keep an image in place of the one that was not used for longest, and return its key."""
        key = secrets.token_urlsafe(16)
        self._images[key] = image
        if len(self._images) > MOST_IMAGES:
            self._images.popitem(last=False)
        return key

    def find(self, key: str) -> OpenedImage:
        """Return the image with this key; an InputError if it was forgotten."""
        if key not in self._images:
            raise InputError("expected an opened image, got one that the server has forgotten: drop it again")
        self._images.move_to_end(key)
        return self._images[key]

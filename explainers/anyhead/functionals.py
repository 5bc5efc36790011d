"""The linear functionals v of the embedding that AnyHead learns to explain: of a head, of texts, or random ones."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from timm.data import ImageNetInfo
from torch import Tensor
from torch.nn import functional as F

from explainers.errors import REPEATED, InputError, checks_choices
from explainers.models import TargetModel
from explainers.models.functionals import choose_temperature, class_rows, score_functionals
from explainers.models.heads import NoHead
from explainers.models.names import readable_names
from explainers.refinement.coalitions import TEMPERATURE
from explainers.runtime.sampling import uniform
from explainers.saved.identity import Identity, weights_hash
from explainers.text.encoders import TEMPLATES
from explainers.text.heads import TextHead, clip_text_head

Functional = Literal["predicted", "other", "difference", "mixture", "isotropic"]
Functionals = Annotated[Sequence[Functional], REPEATED]  # every entry is a draw of its own
LIKELY = 20
"""Number of most probable classes after the predicted one, from which `other` is drawn."""


@checks_choices
def random_functionals(kinds: Functionals, rows: Tensor, logits: Tensor, index: Tensor, seed: int) -> Tensor:
    """Draw functionals of every image, which depend on its index and its predictions alone.

    Args:
        kinds: the kind of each of V functionals. `predicted`: W_y of the predicted class, relative to the mean of all
            rows W̄. `other`: W_k of another likely class, relative to W̄. `difference`: W_i − W_j of two random classes.
            `mixture`: a sum of all W_k − W̄ with normal weights, so that it has the covariance of the rows.
            `isotropic`: normal entries.
        rows: W, (K, D).
        logits: (B, K).
        index: index of each image in the data set, (B,).
        seed: a different one for every epoch, see `sampling.stream`.

    Returns:
        v of unit length, (B, V, D).
    """
    classes, width = rows.shape
    centred = rows - rows.mean(0)
    ranked = logits.argsort(-1, descending=True)
    places = torch.arange(max(classes, width), device=index.device)
    functionals = []
    for position, kind in enumerate(kinds):
        draws = uniform((index[:, None] * len(kinds) + position) * len(places) + places, seed)
        if kind == "predicted":
            functional = centred[ranked[:, 0]]
        elif kind == "other":
            place = 1 + draws[:, :1] * min(LIKELY, classes - 1)
            functional = centred[ranked.gather(1, place.long())[:, 0]]
        elif kind == "difference":
            first, second = draws[:, :classes].argsort(-1)[:, :2].unbind(1)
            functional = rows[first] - rows[second]
        elif kind == "mixture":
            functional = normal(draws[:, :classes]) @ centred
        else:
            functional = normal(draws[:, :width])
        functionals.append(functional)
    return F.normalize(torch.stack(functionals, 1).float(), dim=-1)


def likely_classes(logits: Tensor, index: Tensor, count: int, seed: int) -> Tensor:
    """Draw classes (B, count) of every image: the predicted one, and for every fourth one of the `LIKELY` next ones.

    >>> likely_classes(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([7]), count=4, seed=0)
    tensor([[1, 1, 1, 2]])

    Args:
        logits: (B, K).
        index: see `random_functionals`, as for `seed`.
        count: number of classes for each image.
    """
    places = torch.arange(count, device=index.device)
    draws = uniform(index[:, None] * count + places, seed)
    last = logits.shape[-1] - 1
    others = (1 + (draws * min(LIKELY, last)).long()).clamp(max=last)
    ranks = torch.where(places % 4 == 3, others, 0)
    return logits.argsort(-1, descending=True).gather(1, ranks)


def normal(draws: Tensor) -> Tensor:
    """Turn numbers that are uniform in [0, 1) into standard normal ones, float32.

    >>> normal(torch.tensor([0.5, 0.84134475], dtype=torch.double)).round(decimals=3).tolist()
    [0.0, 1.0]
    """
    return torch.special.ndtri(draws.clamp(min=2**-33)).float()


Kind = Literal["head", "texts", "images", "isotropic"]
TextHeadBuilder = Callable[[TargetModel], TextHead]


def build_vocabulary(given: Sequence[str] | str | None) -> list[str]:
    """The texts of a vocabulary: a list, the lines of a text file, or by default the names of ImageNet's 1000 classes.

    Raises:
        InputError: for a file that does not exist, or fewer than two texts.
    """
    if given is None:
        return readable_names(ImageNetInfo().label_names())
    if isinstance(given, str):
        if not Path(given).is_file():
            raise InputError(f"expected vocabulary as a list of texts, or a text file with one a line, got {given}")
        given = [line.strip() for line in Path(given).read_text(encoding="utf-8").splitlines() if line.strip()]
    texts = list(dict.fromkeys(given))
    if len(texts) < 2:
        raise InputError(f"expected a vocabulary of at least 2 texts, which are told apart, got {len(texts)}")
    return texts


class FunctionalSampler:
    """Draws the functionals v on which the loss compares predicted and true vectors, for a batch of images.

    Args:
        kind: see `functionals` of `CoalitionTeacher`, as for the other arguments.
        seed: seed of the draws of `isotropic`.
    """

    @checks_choices
    def __init__(
        self,
        kind: Kind,
        target: TargetModel,
        vocabulary: Sequence[str] | str | None = None,
        text_head: TextHeadBuilder | None = None,
        seed: int = 0,
    ) -> None:
        if kind != "texts" and (vocabulary is not None or text_head is not None):
            raise InputError(f"expected functionals=texts with a vocabulary or a text head, got functionals={kind}")
        if kind == "head" and isinstance(target.head, NoHead):
            raise InputError(
                f"expected a head for functionals=head, got {target.name}, a model without one: set functionals=images"
                " (with fit=regions) or isotropic, or for an image tower of CLIP or SigLIP texts"
            )
        self.kind = kind
        self.target = target
        self.seed = seed
        self.temperature = choose_temperature(target.score if kind == "head" else "softmax", TEMPERATURE)
        self.texts: Any = None
        if kind == "texts":
            build = partial(clip_text_head, templates=TEMPLATES) if text_head is None else text_head
            self.texts = build(target).head(build_vocabulary(vocabulary)).requires_grad_(False)

    def of(self, embeddings: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Functionals of a batch, and the one of each image that counts most.

        `head`: all classes, and the predicted one. `texts`: all texts, and the one that fits best. `images`: the images
        of the batch, and the nearest other one; for a batch of one image as `isotropic`. `isotropic`: all directions,
        and a random one.

        Returns:
            Rows (K, D), relative to their mean if classes compete, and v (B, D).
        """
        embeddings = embeddings.detach().float()
        if self.kind in ("head", "texts"):
            rows, logits = self._rows(embeddings)
            rows = rows if self.temperature is None else rows - rows.mean(0)
            return rows, score_functionals(rows, logits, self.temperature, logits.argmax(-1))
        if self.kind == "images" and len(embeddings) > 1:
            rows = embeddings - embeddings.mean(0)
            return rows, rows[nearest_others(embeddings)]
        width = embeddings.shape[-1]
        return torch.eye(width, device=embeddings.device), isotropic(index, 1, width, self.seed)[:, 0]

    def likely(self, embeddings: Tensor, index: Tensor, count: int, seed: int) -> Tensor:
        """Draw functionals (B, count, D) of each image alone: of the `likely_classes` or texts, or random ones."""
        if self.kind == "isotropic":
            return isotropic(index, count, embeddings.shape[-1], seed)
        rows, logits = self._rows(embeddings.detach().float())
        classes = likely_classes(logits, index, count, seed)
        return torch.stack([score_functionals(rows, logits, self.temperature, each) for each in classes.unbind(1)], 1)

    def identity(self) -> Identity:
        """What `likely` depends on: the whole model, or the backbone and the texts."""
        if self.kind == "head":
            return {"target": self.target.identity()}
        own: Identity = {"target": self.target.backbone_identity(), "functionals": self.kind}
        return own if self.texts is None else own | {"texts": weights_hash(self.texts)}

    def _rows(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """The rows (K, D) of classes or texts, up to a factor for cosines, and the logits (B, K)."""
        with torch.autocast(embeddings.device.type, enabled=False):
            if self.texts is not None:
                texts = self.texts.to(embeddings.device)
                return texts.directions(), texts(embeddings)
            rows = class_rows(self.target.head, embeddings.shape[-1], embeddings, directions=True)
            return rows, self.target.classify(embeddings).detach()


def nearest_others(embeddings: Tensor) -> Tensor:
    """For each embedding (B, D), the place (B,) of the other one with the highest cosine.

    >>> nearest_others(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.1, 3.0]])).tolist()
    [2, 2, 1]
    """
    units = F.normalize(embeddings, dim=-1)
    return (units @ units.mT).fill_diagonal_(-torch.inf).argmax(-1)


def isotropic(index: Tensor, count: int, width: int, seed: int) -> Tensor:
    """Draw functionals with normal entries, which depend on the index of the image alone: (B, count, D)."""
    numbers = index[:, None] * count * width + torch.arange(count * width, device=index.device)
    return normal(uniform(numbers, seed)).unflatten(1, (count, width))

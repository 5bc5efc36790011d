"""The functionals of the embedding that AnyHead learns to explain: classes of a head, texts, other images, or all."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from timm.data import ImageNetInfo
from torch import Tensor
from torch.nn import functional as F

from explainers.anyhead.functionals import likely_classes, normal
from explainers.errors import InputError, checks_choices
from explainers.models import TargetModel
from explainers.models.functionals import class_rows, score_functionals
from explainers.models.heads import NoHead
from explainers.models.names import readable_names
from explainers.refinement.rounds import TEMPERATURE
from explainers.sampling import uniform
from explainers.saved.identity import Identity, weights_hash
from explainers.text.encoders import TEMPLATES
from explainers.text.heads import TextHead, clip_text_head

Kind = Literal["head", "texts", "images", "isotropic"]
TextHeadBuilder = Callable[[TargetModel], TextHead]


def vocabulary_of(given: Sequence[str] | str | None) -> list[str]:
    """The texts of a vocabulary: a list, the lines of a text file, or by default the names of ImageNet's 1000 classes.

    Raises:
        InputError: unless there are two texts, at least.

    >>> vocabulary_of(["a cat", "a dog"])
    ['a cat', 'a dog']
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


class Learned:
    """The functionals for which errors of vectors c_z count, as far as they belong to a batch of images.

    Args:
        kind: see `CoalitionTeacher`.
        target: the model whose embeddings are explained.
        vocabulary: see `CoalitionTeacher`.
        text_head: see `CoalitionTeacher`.
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
        self.texts: Any = None
        if kind == "texts":
            build = partial(clip_text_head, templates=TEMPLATES) if text_head is None else text_head
            self.texts = build(target).head(vocabulary_of(vocabulary)).requires_grad_(False)

    def of(self, embeddings: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Functionals of a batch, and the one of each image that counts most.

        `head`: all classes, and the predicted one. `texts`: all texts, and the one that fits best. `images`: the images
        of the batch, and the nearest other one; for a batch of one image as `isotropic`. `isotropic`: all directions,
        and a random one.

        Args:
            embeddings: G(x), (B, D).
            index: index of each image in the data set, (B,).

        Returns:
            Rows (K, D), relative to their mean, and v (B, D).
        """
        embeddings = embeddings.detach().float()
        if self.kind in ("head", "texts"):
            rows, logits = self._rows(embeddings)
            rows = rows - rows.mean(0)
            return rows, score_functionals(rows, logits, TEMPERATURE, logits.argmax(-1))
        if self.kind == "images" and len(embeddings) > 1:
            rows = embeddings - embeddings.mean(0)
            return rows, rows[nearest_others(embeddings)]
        width = embeddings.shape[-1]
        return torch.eye(width, device=embeddings.device), isotropic(index, 1, width, self.seed)[:, 0]

    def likely(self, embeddings: Tensor, index: Tensor, count: int, seed: int) -> Tensor:
        """Draw functionals of each image alone: of the classes or texts of `likely_classes`, or random ones.

        Args:
            embeddings: G(x), (B, D).
            index: index of each image in the data set, (B,).
            count: number of functionals of each image.
            seed: see `random_functionals`.

        Returns:
            v, (B, count, D).
        """
        if self.kind == "isotropic":
            return isotropic(index, count, embeddings.shape[-1], seed)
        rows, logits = self._rows(embeddings.detach().float())
        classes = likely_classes(logits, index, count, seed)
        return torch.stack([score_functionals(rows, logits, TEMPERATURE, each) for each in classes.unbind(1)], 1)

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
    """Draw functionals with normal entries, which depend on the index of the image alone: (B, count, D).

    >>> isotropic(torch.tensor([7]), count=2, width=3, seed=0).shape
    torch.Size([1, 2, 3])
    """
    numbers = index[:, None] * count * width + torch.arange(count * width, device=index.device)
    return normal(uniform(numbers, seed)).unflatten(1, (count, width))

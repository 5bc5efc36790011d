"""Text heads: any text as a linear functional of a backbone's embedding."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from explainers.errors import InputError, check_positive, checks_choices
from explainers.models import TargetModel
from explainers.models.functionals import Length, cosine_functionals
from explainers.models.heads import ProjectedHead
from explainers.text.encoders import AS_IT_IS, Encoder, checked_texts, open_clip_encoder, text_embeddings
from explainers.text.towers import text_tower

Texts = str | Sequence[str] | Tensor
"""Texts, or their embeddings, unit vectors (V, D')."""

KNOWN = 10_000
"""Number of texts whose embeddings are kept, the last new ones."""


class TextHead(nn.Module):
    """Scores images by texts, which need not be known before. Texts that are used again are embedded once.

    The score of an embedding e and a text t is t · P e, or for CLIP and SigLIP t · P e / |P e|, times a scale.

    >>> def encode(texts: Sequence[str]) -> Tensor:
    ...     return torch.tensor([[1.0, 0.0] if "cat" in text else [0.0, 1.0] for text in texts])
    >>> head = TextHead(encode)
    >>> head(torch.tensor([[3.0, 4.0]]), ["a cat", "a dog"]).tolist()
    [[0.6..., 0.8...]]

    Args:
        encode: embeds texts, see `Encoder`.
        projection: P, (D', D); `None` for none, and then D' = D.
        centre: subtracted from every text embedding, (D',), such as the mean of a vocabulary; `None` for none.
        normalise: divide every embedding, after `projection`, by its length: scores are then cosines.
        scale: factor of the scores in `head` and in the weights of a contrast, such as CLIP's logit scale.
        templates: prompts with `{}` where a text belongs, whose embeddings are averaged.
    """

    projection: Tensor | None
    centre: Tensor | None

    def __init__(
        self,
        encode: Encoder,
        projection: Tensor | None = None,
        centre: Tensor | None = None,
        normalise: bool = True,
        scale: float = 1.0,
        templates: Sequence[str] = AS_IT_IS,
    ) -> None:
        super().__init__()
        check_positive(scale=scale)
        self.encode = encode
        self.register_buffer("projection", projection)
        self.register_buffer("centre", centre)
        self.normalise = normalise
        self.scale = scale
        self.templates = tuple(templates)
        self.known: dict[str, Tensor] = {}

    def embed(self, texts: Texts) -> Tensor:
        """The embeddings of texts, (V, D'), see `KNOWN`.

        Raises:
            InputError: for an empty text, or embeddings of another width.
        """
        width = next((len(part) for part in (self.projection, self.centre) if part is not None), None)
        if not isinstance(texts, Tensor):
            texts = checked_texts(texts)
            known = self.known
            new = list(dict.fromkeys(text for text in texts if text not in known))
            if new:
                known = known | dict(zip(new, text_embeddings(self.encode, new, self.templates), strict=True))
                self.known = dict(list(known.items())[-KNOWN:])  # another one: threads may read the last one
            texts = torch.stack([known[text] for text in texts])
        if texts.dim() != 2 or width not in (None, texts.shape[-1]):
            raise InputError(f"expected text embeddings of shape [V, {width or 'width'}], got {list(texts.shape)}")
        return texts.to(self.device)

    @property
    def device(self) -> torch.device:
        """Where projection and centre are; the CPU without them."""
        return next((part.device for part in self.buffers()), torch.device("cpu"))

    def directions(self, texts: Texts) -> Tensor:
        """The embeddings of texts relative to `centre`, (V, D'), with the arguments of `embed`."""
        embedded = self.embed(texts)
        return embedded if self.centre is None else embedded - self.centre

    def head(self, texts: Texts) -> ProjectedHead:
        """A head of a model whose classes are texts, such as a zero-shot classifier."""
        return ProjectedHead(self.directions(texts), self.projection, self.normalise, self.scale)

    def forward(self, embeddings: Tensor, texts: Texts) -> Tensor:
        """Score embeddings (B, D) by texts: (B, V); cosines for CLIP and SigLIP."""
        return self._scores(embeddings, self.directions(texts))

    def _scores(self, embeddings: Tensor, directions: Tensor) -> Tensor:
        with torch.autocast(embeddings.device.type, enabled=False):
            head = ProjectedHead(directions.to(embeddings.device), self.projection, self.normalise)
            check_width(head.in_features, embeddings.shape[-1])
            return head(embeddings.float())

    def check_fits(self, target: TargetModel) -> None:
        """Raise an InputError if this head was made for embeddings of another width, as far as that is known."""
        if self.projection is not None:
            check_width(self.projection.shape[1], target.embed_dim)

    @checks_choices
    def functionals(
        self,
        embeddings: Tensor,
        texts: Texts,
        against: Texts | None = None,
        temperature: float = math.inf,
        length: Length = "constant",
    ) -> Tensor:
        """Compute the functional v of each text, which explains its score, or by how much it exceeds others.

        Args:
            embeddings: e, (B, D).
            texts: V texts.
            against: other texts, from which each text is told apart: from their mean, because a text alone says
                little. A text is not compared with itself. `None` for no others.
            temperature: t. The score is s_y − t log Σ_k exp(scale · s_k / t) / scale for the scores s_k of the others;
                infinity takes their mean.
            length: see `Length`; has no effect on scores that are no cosines.

        Returns:
            v, (B, V, D), float32.
        """
        check_positive(temperature=temperature)
        wanted = self.directions(texts).to(embeddings.device)
        directions = wanted.expand(len(embeddings), -1, -1)
        if against is not None:
            others = self.directions(against).to(embeddings.device)
            # The faster way by products is not exact enough to find equal texts among more than 25
            same = torch.cdist(wanted, others, compute_mode="donot_use_mm_for_euclid_dist") < 1e-6  # (V, W)
            if same.all(1).any():
                raise InputError("expected other texts to compare each text with, got the same text alone")
            logits = self.scale * self._scores(embeddings, others)[:, None] / temperature  # (B, 1, W)
            directions = directions - logits.masked_fill(same, -torch.inf).softmax(-1) @ others
        else:
            self._scores(embeddings[:1], wanted)  # checks the width
        if self.normalise:
            return cosine_functionals(embeddings, directions, self.projection, length)
        return directions if self.projection is None else directions @ self.projection


def check_width(wanted: int, width: int) -> None:
    """Raise an InputError for embeddings of another width than a text head was made for."""
    if wanted != width:
        raise InputError(
            f"expected embeddings of width {wanted}, for which this text head was made, got {width}: take the text head"
            " of this backbone"
        )


def clip_text_head(
    target: TargetModel,
    model: str | None = None,
    pretrained: str | None = None,
    templates: Sequence[str] = AS_IT_IS,
    encode: Encoder | None = None,
) -> TextHead:
    """The text head of an image tower of CLIP or SigLIP.

    Args:
        target: the image tower. If texts have another width than its embeddings, its own head projects to theirs.
        model: open_clip's name of the text tower; `None` to find it, see `text_tower`.
        pretrained: open_clip's name of its weights, or a file; `None` to find them.
        templates: see `TextHead`.
        encode: another text tower, such as one of transformers (`transformers_encoder`), in place of open_clip's.

    Raises:
        InputError: if image and text tower are not of one model, or open_clip is not installed.
    """
    if encode is None:
        encode = open_clip_encoder(*text_tower(target, model, pretrained))
    width = encode(["a photo"]).shape[-1]
    own: Any = target.head
    projection = own.weight.detach() if getattr(own, "out_features", None) == width else None
    if projection is None and width != target.embed_dim:
        raise InputError(
            f"expected texts of width {target.embed_dim}, as {target.name} embeds images, or an image tower that"
            f" projects to {width}, got {width}: take towers of one model"
        )
    return TextHead(encode, projection, normalise=True, scale=100.0, templates=templates)

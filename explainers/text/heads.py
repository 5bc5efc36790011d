"""Text heads: any text as a linear functional of a backbone's embedding, and zero-shot classifiers made of texts."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from timm.data import ImageNetInfo
from torch import Tensor, nn

from explainers.errors import InputError, check_positive, checks_choices, needs
from explainers.masking import ImageSize
from explainers.models import TargetModel, as_target
from explainers.models.functionals import Length, cosine_functionals
from explainers.models.heads import ProjectedHead
from explainers.models.names import readable_names
from explainers.text.encoders import (
    AS_IT_IS,
    TEMPLATES,
    Encoder,
    clip_encoder,
    open_clip_encoder,
    text_embeddings,
    transformers_encoder,
    validate_texts,
)
from explainers.text.towers import require_open_clip, text_tower

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
        """The embeddings of texts, (V, D'), see `KNOWN`; an InputError for an empty text, or one of another width."""
        width = next((len(part) for part in (self.projection, self.centre) if part is not None), None)
        if not isinstance(texts, Tensor):
            texts = validate_texts(texts)
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
        """A head of a model whose classes are texts, see `zero_shot_head`."""
        return ProjectedHead(self.directions(texts), self.projection, self.normalise, self.scale)

    def forward(self, embeddings: Tensor, texts: Texts) -> Tensor:
        """Score embeddings (B, D) by texts: (B, V); cosines for CLIP and SigLIP."""
        return self._scores(embeddings, self.directions(texts))

    def _scores(self, embeddings: Tensor, directions: Tensor) -> Tensor:
        with torch.autocast(embeddings.device.type, enabled=False):
            head = ProjectedHead(directions.to(embeddings.device), self.projection, self.normalise)
            _check_width(head.in_features, embeddings.shape[-1])
            return head(embeddings.float())

    def check_fits(self, target: TargetModel) -> None:
        """Raise an InputError if this head was made for embeddings of another width, as far as that is known."""
        if self.projection is not None:
            _check_width(self.projection.shape[1], target.embed_dim)

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
                got = "got the same text alone"
                raise InputError(f"against= needs other texts to compare each text with, {got}", "against")
            logits = self.scale * self._scores(embeddings, others)[:, None] / temperature  # (B, 1, W)
            directions = directions - logits.masked_fill(same, -torch.inf).softmax(-1) @ others
        else:
            self._scores(embeddings[:1], wanted)  # checks the width
        if self.normalise:
            return cosine_functionals(embeddings, directions, self.projection, length)
        return directions if self.projection is None else directions @ self.projection


def _check_width(wanted: int, width: int) -> None:
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


def two_towers(
    model: Any,
    tokeniser: Callable[..., Any],
    templates: Sequence[str] = AS_IT_IS,
    image_size: ImageSize | None = None,
) -> tuple[TargetModel, TextHead]:
    """Make the two towers of CLIP, TinyCLIP or SigLIP a model to explain and its text head.

    The image tower is computed in timm's architecture, see `as_target`; the text tower stays the caller's. The score of
    an image and a text is the cosine that the model computes.

    Args:
        model: a `CLIPModel` or `SiglipModel` of transformers, or CLIP of OpenAI or open_clip; an InputError for others.
        tokeniser: its tokeniser or processor, from `AutoTokenizer.from_pretrained` or `open_clip.get_tokenizer` of the
            same name.
        templates: see `TextHead`.
        image_size: see `as_target`.
    """
    name = type(model).__name__
    if hasattr(model, "encode_text"):
        images, encode = model, clip_encoder(model, tokeniser)
    elif name in ("CLIPModel", "SiglipModel"):
        images = _with_projection(model) if name == "CLIPModel" else model.vision_model
        encode = transformers_encoder(model, tokeniser)
    else:
        raise InputError(
            f"expected a model of transformers with two towers, CLIPModel or SiglipModel, got {name}: for an image"
            " tower of timm take clip_text_head(target)"
        )
    target = as_target(images, image_size=image_size)
    head = clip_text_head(target, templates=templates, encode=encode)
    head.scale = model.logit_scale.exp().item()
    return target, head


def _with_projection(model: Any) -> nn.Module:
    """CLIP's image tower with its projection, made of the parts of a model."""
    from transformers import CLIPVisionModelWithProjection

    config = copy.deepcopy(model.config.vision_config)
    config.projection_dim = model.config.projection_dim
    tower: Any = CLIPVisionModelWithProjection(config)
    tower.vision_model = model.vision_model
    tower.visual_projection = model.visual_projection
    return tower


def hugging_face_text_head(target: TargetModel, name: str, templates: Sequence[str] = TEMPLATES) -> TextHead:
    """The text head of an image tower of timm, by the text tower of a model on the Hugging Face Hub.

    For towers that open_clip lacks, such as TinyCLIP's: `wkcn/TinyCLIP-ViT-8M-16-Text-3M-YFCC15M`.

    Args:
        target: the image tower; that it belongs to the text tower is not checked.
        name: name of a model with two towers, or its folder.
        templates: see `TextHead`.

    Raises:
        InputError: if transformers is not installed, or cannot load the model.
    """
    needs("transformers", "hub", f"the text tower of {name}")
    from transformers import AutoModel, AutoTokenizer

    try:
        model, tokeniser = (kind.from_pretrained(name) for kind in (AutoModel, AutoTokenizer))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"expected a model of the Hugging Face Hub, or a folder, got {name}: {reason:.200}") from error
    return clip_text_head(target, templates=templates, encode=transformers_encoder(model, tokeniser))


def zero_shot_head(
    target: TargetModel,
    classes: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    templates: Sequence[str] | None = None,
    text_head: Callable[[TargetModel], TextHead] | None = None,
) -> ProjectedHead:
    """Make the classes of a data set the classes of an image tower, by the texts of their names.

    The logits are 100 times the cosine of the image and the mean embedding of the prompts of each class. By default the
    classes are ImageNet's, with the names and the 80 templates of OpenAI, which open_clip has: 80,000 texts.

    Args:
        target: the image tower.
        classes: names of the classes in the data set, in the order of the labels; `None` for `names`, or without them
            for ImageNet's 1000.
        names: what stands for the classes in the prompts; `None` for `readable_names` of `classes`.
        templates: prompts, with `{}` where the name belongs; `None` for OpenAI's, such as `a bad photo of a {}.`
        text_head: builds the text head of the tower; `None` for `clip_text_head`. Its own templates are not read.

    Returns:
        The head, whose `class_names` are those of the data set.

    Raises:
        InputError: unless there is one name for each class, or if open_clip is needed and not installed.
    """
    if classes is None and names is None:
        classes = ImageNetInfo("imagenet-1k").label_names()  # numbers of WordNet, in the order of the labels
        names = require_open_clip().IMAGENET_CLASSNAMES
    classes = list(names or () if classes is None else classes)
    names = readable_names(classes) if names is None else list(names)
    if len(names) != len(classes) or len(names) < 2:
        raise InputError(
            f"expected a name for each of at least 2 classes, got {len(classes)} classes and {len(names)} names"
        )
    if templates is None:
        templates = [template("{}") for template in require_open_clip().OPENAI_IMAGENET_TEMPLATES]
    texts = clip_text_head(target) if text_head is None else text_head(target)
    head = texts.head(text_embeddings(texts.encode, names, templates))
    head.class_names = tuple(classes)
    return head

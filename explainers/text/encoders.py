"""What embeds texts: the text towers of open_clip and transformers, and stored embeddings of sentences."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explainers.errors import InputError, suggest_names
from explainers.runtime.progress import progress
from explainers.saved.weights import check_forms, read_weights
from explainers.text.towers import require_open_clip

Encoder = Callable[[Sequence[str]], Tensor]
"""Embeds V texts, as they are: unit vectors (V, D')."""

TEMPLATES = ("a photo of a {}.", "a photo of the {}.", "a close-up of a {}.", "a blurry picture of a {}.")
"""Prompts for names of classes."""

AS_IT_IS = ("{}",)
"""The template that leaves a text as it is."""

OPENAI_TOKENS = 49408, 77
"""Tokens that OpenAI's tokeniser of CLIP knows, and the length of a text."""

CHUNK = 256
"""Number of texts that a text tower embeds at once."""


def text_embeddings(encode: Encoder, texts: Sequence[str], templates: Sequence[str] = AS_IT_IS) -> Tensor:
    """The direction of the embedding of each text, averaged over templates: unit vectors (V, D').

    Args:
        encode: embeds prompts.
        texts: names of classes, or whole prompts.
        templates: prompts, with `{}` where the text belongs.

    Raises:
        InputError: if there is no text, a text is empty, a template has no place for it, or embeddings are not finite.

    >>> def encode(texts: Sequence[str]) -> Tensor:
    ...     return F.normalize(torch.tensor([[float(len(text)), 1.0] for text in texts]), dim=-1)
    >>> text_embeddings(encode, ["ant", "bee"], ["a {}.", "{}"]).shape
    torch.Size([2, 2])
    """
    texts = validate_texts(texts)
    without = [template for template in templates if "{}" not in template]
    if without or not templates:
        raise InputError(f"expected templates with {{}} for the name, as 'a photo of a {{}}.', got {without or 'none'}")
    embeddings = encode([template.replace("{}", text) for text in texts for template in templates])
    if not embeddings.isfinite().all():
        raise InputError(
            "expected finite embeddings of texts, got NaN or infinity: the weights of the text tower are those of a"
            " training that diverged, take another file"
        )
    means = F.normalize(embeddings.float(), dim=-1).unflatten(0, (len(texts), -1)).mean(1)
    return F.normalize(means, dim=-1)


def validate_texts(texts: str | Sequence[str]) -> list[str]:
    """A list of texts; an InputError if there is none, or one is empty or no text."""
    listed = [texts] if isinstance(texts, str) else list(texts)
    wrong = [text for text in listed if not isinstance(text, str) or not text.strip()]
    if wrong or not listed:
        got = f"{wrong[0]!r:.60}" if wrong else "none"
        raise InputError(f"expected texts that are not empty, such as 'a photo of a cat', got {got}")
    return listed


def open_clip_encoder(model: str, pretrained: str) -> Encoder:
    """A text tower of open_clip, on the CPU, built without its log; the arguments are those of a `TextTower`.

    Raises:
        InputError: if a package is not installed, or the weights cannot be loaded.
    """
    open_clip = require_open_clip()
    disabled = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        tokenise = open_clip.get_tokenizer(model)
        clip = open_clip.create_model(model, pretrained=pretrained or None).eval()
    except OSError as error:  # no network, or no such file
        reason = str(error).partition("\n")[0][:120]
        raise InputError(
            f"expected weights of the text tower {model} {pretrained} on this machine or a network, got neither"
            f" ({reason}): give a file as pretrained"
        ) from error
    except ImportError as error:  # SigLIP's tokenisers
        raise InputError(f"the tokeniser of {model} needs transformers: pip install transformers") from error
    finally:
        logging.disable(disabled)
    return _in_chunks(lambda texts: clip.encode_text(tokenise(texts)))


def transformers_encoder(model: Any, tokeniser: Callable[..., Any]) -> Encoder:
    """The text tower of a model of transformers, which embeds in eval mode and keeps its mode.

    Args:
        model: such as `CLIPModel` or `SiglipModel`; an InputError for one that embeds no texts.
        tokeniser: its tokeniser or processor, from `AutoTokenizer.from_pretrained` of the same name.
    """
    if not hasattr(model, "get_text_features"):
        raise InputError(
            f"expected a model of transformers that embeds texts, such as CLIPModel, got {type(model).__name__}"
        )
    longest = model.config.text_config.max_position_embeddings

    def encode(texts: list[str]) -> Tensor:
        # SigLIP was trained with texts that are padded to the full length
        tokens = tokeniser(texts, padding="max_length", max_length=longest, truncation=True, return_tensors="pt")
        with _in_eval_mode(model):
            features = model.get_text_features(**{name: ids.to(model.device) for name, ids in tokens.items()})
        return getattr(features, "pooler_output", features)

    return _in_chunks(encode)


def clip_encoder(model: Any, tokeniser: Callable[[list[str]], Tensor] | None = None) -> Encoder:
    """The text tower of a model of CLIP, of OpenAI or open_clip, which embeds in eval mode and keeps its mode.

    Args:
        model: has `encode_text`.
        tokeniser: such as `open_clip.get_tokenizer(name)`; `None` for OpenAI's, if the model has its vocabulary.
    """
    vocabulary, length = getattr(model, "vocab_size", None), getattr(model, "context_length", None)
    if tokeniser is None and (vocabulary, length) != OPENAI_TOKENS:
        raise InputError(
            f"text= needs the tokeniser of this {type(model).__name__}, which is not OpenAI's: build target, head ="
            " explainers.text.two_towers(model, tokeniser), and give explain(photo, target, text_head=head, text=...)"
        )
    tokenise: Any = tokeniser or require_open_clip().tokenize

    def encode(texts: list[str]) -> Tensor:
        device = next(model.parameters()).device
        with _in_eval_mode(model):
            features: Tensor = model.encode_text(tokenise(texts).to(device))
        return features

    return _in_chunks(encode)


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Inside, a model is without dropout; afterwards, each of its modules is in the mode of before."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _in_chunks(encode: Callable[[list[str]], Tensor]) -> Encoder:
    """An encoder of any number of texts, from one of a few."""

    def encoder(texts: Sequence[str]) -> Tensor:
        parts = []
        with torch.no_grad(), progress("text tower", len(texts), "text", delay=5) as bar:
            for start in range(0, len(texts), CHUNK):
                parts.append(F.normalize(encode(list(texts[start : start + CHUNK])).float().cpu(), dim=-1))
                bar.update(len(parts[-1]))
        return torch.cat(parts)

    return encoder


def stored_encoder(embeddings: str | Path, prompts: str | Path) -> Encoder:
    """Look embeddings of texts up in files, for encoders of sentences that are not installed.

    Args:
        embeddings: safetensors file of `embeddings`, (V, D').
        prompts: JSON file, a list of the V texts, or an object whose `prompts` are.

    Raises:
        InputError: if the files do not fit each other; when called, for a text that is not stored.
    """
    _, weights = read_weights(embeddings, "a file of text embeddings")
    check_forms(embeddings, {"embeddings": "floats V D"})
    texts = json.loads(Path(prompts).read_text(encoding="utf-8"))
    texts = texts["prompts"] if isinstance(texts, dict) else texts
    rows = F.normalize(weights["embeddings"].float(), dim=-1)
    if len(texts) != len(rows):
        raise InputError(f"expected {len(rows)} texts, one for each embedding, in {prompts}, got {len(texts)}")
    places = {text: place for place, text in enumerate(texts)}

    def encode(asked: Sequence[str]) -> Tensor:
        missing = [text for text in asked if text not in places]
        if missing:
            raise InputError(
                f"expected texts of {Path(prompts).name}, got {missing[0]!r:.60}: {suggest_names(missing[0], places)}"
            )
        return rows[[places[text] for text in asked]]

    return encode

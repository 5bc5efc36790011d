"""What a session is made of: the model, an explainer that fits it and its cost, and a text head."""

import copy
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from explainers import Explainer, FunctionalExplainer, posthoc
from explainers.errors import InputError, UnsupportedModel, checks_choices
from explainers.models import TargetModel, as_target
from explainers.models.heads import TextProjection
from explainers.models.plain import PlainBackbone
from explainers.models.wrappers import share_weights
from explainers.posthoc.defaults import DEFAULT_METHODS, Purpose
from explainers.posthoc.names import label_methods
from explainers.saved.identity import find_changes
from explainers.share import load
from explainers.share.catalogue import EXPLAINERS, FILE, available, for_target, not_shipped
from explainers.text import TextHead, clip_text_head
from explainers.text.encoders import clip_encoder
from explainers.transformer.blocks import find_blocks, is_transformer, num_prefix_tokens

Method = str | Path | Mapping[str, Mapping[str, Any]] | Explainer
"""What explains: `auto`, a method's name, one with options, the folder of a trained explainer, or an explainer."""

CHEAP = 25
"""Largest number of forward passes of an explainer that is chosen without a word on its cost."""

KNOWN = ("timm.", "torch.nn.", "explainers.")
"""Where layers are defined that have gradients."""

INSIDE = "; if it has a backbone of timm, TargetModel(backbone, head=head) explains better, with one pass"
"""What a line adds where a method by masks is taken for a model of no library."""

IMAGE_TOWERS = ("clip", "siglip")
"""Parts of timm's names of models that were trained with texts."""

LARGEST_BATCH = 16
"""Largest number of images that are explained at once."""

MEMORY = 4 * 2**30
"""Bytes that one batch may take, unless a single image takes more."""

MAPS = 4
"""Copies of the attention maps of each head that a method of attention keeps: weights, scores, gradients, products."""

TOKENS = 25
"""Activations of the width of a token that are kept for its gradient in each block: queries, keys, values, MLP."""


@checks_choices
def choose(target: TargetModel, method: Method = "auto", purpose: Purpose = "classes") -> tuple[Explainer, str]:
    """Build an explainer of a model.

    Args:
        target: the model to explain.
        method: `auto`: the trained explainer that is shipped for this backbone, else the first of `DEFAULT_METHODS`
            that explains the model; a line says which. Or the name of a shipped explainer, such as `anyhead`; a method
            of `explainers.posthoc`, such as `RISE`, or `{"RISE": {"masks": 500}}` with options; the folder of a trained
            explainer, or its name on the Hugging Face Hub, `hf://user/name`; or an explainer.
        purpose: what `auto` chooses an explainer for.

    Returns:
        The explainer, and its label.

    Raises:
        InputError: if there is no such method, or it cannot explain this model.
    """
    if isinstance(method, str) and method == "auto":
        return _choose_default(target, purpose)
    if isinstance(method, str) and method.lower() in EXPLAINERS:
        for known in for_target(target):
            if known.explainer == method.lower():
                return _load(known.folder, target)
        raise not_shipped(target, method.lower())
    if isinstance(method, Path) or isinstance(method, str) and ("/" in method or Path(method, FILE).is_file()):
        return _load(method, target)
    if isinstance(method, str | Mapping):
        entries = list(label_methods([method]).items())
        if len(entries) != 1:
            raise InputError(f"expected one method, got {len(entries)}: give one value for each option")
        ((label, (name, options)),) = entries
        return posthoc.build(name, target, target.grid, options), label
    if isinstance(method, type) or not callable(method):
        raise InputError(f"expected method auto, a name, a folder or an explainer, got {method!r:.80}")
    explained = getattr(method, "target", None)
    if isinstance(explained, TargetModel):
        identity = TargetModel.identity if purpose == "classes" else TargetModel.backbone_identity
        if identity(explained) != identity(target):
            raise InputError(
                f"expected an explainer of this model, got one of {explained.name} with other weights: give the model"
                " explainer.target"
            )
        if isinstance(method, nn.Module) and explained.mean.device != target.mean.device:
            method = copy.deepcopy(method).to(target.mean.device)
    return _add_label(method)


def estimate_passes(explainer: Explainer, against: Sequence[Any] = ()) -> int:
    """Forward passes of the model for one heatmap, at most; a difference of heatmaps takes those of all of them."""
    heatmaps = 1 if hasattr(explainer, "explain") else 1 + len(against)
    return heatmaps * getattr(explainer, "forward_passes", 1)


def choose_batch_size(explainer: Explainer, target: TargetModel) -> int:
    """Number of images that an explainer takes at once within `MEMORY`, at most `LARGEST_BATCH`."""
    if not is_transformer(target):
        return LARGEST_BATCH
    blocks: Any = find_blocks(target)
    tokens = target.grid.num_patches + num_prefix_tokens(target)
    floats = TOKENS * tokens * target.embed_dim
    if getattr(getattr(explainer, "reads", None), "attention", False):
        floats += MAPS * blocks[0].attn.num_heads * tokens**2
    return max(1, min(LARGEST_BATCH, MEMORY // (4 * len(blocks) * floats)))


def _load(folder: str | Path, target: TargetModel) -> tuple[Explainer, str]:
    """Load a trained explainer of a model, onto the model's device, with its label."""
    return _add_label(load(folder, target=target).to(target.mean.device))


def _add_label(explainer: Any) -> tuple[Explainer, str]:
    """An explainer and its label: the name of its class, or of a function."""
    return explainer, getattr(explainer, "__name__", type(explainer).__name__)


def _choose_default(target: TargetModel, purpose: Purpose) -> tuple[Explainer, str]:
    """The trained explainer of a backbone, or the first method that explains the model, which a line then says."""
    reasons = []
    for known in for_target(target):
        try:
            explainer, label = _load(known.folder, target)
            _check_fits(explainer, target, purpose)
            return explainer, label
        except InputError as error:
            reasons.append(f"the shipped {known.explainer} does not explain it ({error})")
    if changed := find_changes(target.backbone):
        shown = f"{', '.join(changed[:3])}{', ...' * (len(changed) > 3)}"
        reasons.append(f"hooks or replaced methods ({shown}) are no part of the model that a shipped explainer learned")
    other = target.name in {known.name.partition(".")[0] for known in available()}  # with other weights or positions
    size = f" at {target.grid.size[0]} × {target.grid.size[1]} pixels" if other else ""
    none = f"no trained explainer is shipped for this backbone{size} (explainers.available() says how to train one)"
    why, lacking = "; ".join(reasons) or none, ""
    for label, (name, options) in label_methods(DEFAULT_METHODS[purpose]).items():
        try:
            explainer = posthoc.build(name, target, target.grid, options)
            _check_fits(explainer, target, purpose)
        except InputError as error:
            reasons.append(f"{name}: {error}")
            lacking = f"; {reasons[-1]}"
            if isinstance(error, UnsupportedModel):
                lacking = f"; {name} needs {error.wanted.removesuffix(f' for {name}')}"
            continue
        passes = estimate_passes(explainer)
        cost = f", with {passes} forward passes for each image" if passes > CHEAP else ""
        if isinstance(explainer, FunctionalExplainer):
            lacking = ""
        elif isinstance(target.backbone, PlainBackbone):
            lacking += INSIDE
        print_once(f"{target.name}: explained by {label}{cost}, because {why}{lacking}")
        return explainer, label
    raise InputError(f"expected a model that can be explained, got {target.name}: {'; '.join(reasons)}")


def _check_fits(explainer: Explainer, target: TargetModel, purpose: Purpose) -> None:
    """Raise an InputError for an explainer of something else; what it needs of the model, it says when it is built.

    Only of layers that are neither PyTorch's nor timm's, such as quantised ones, it is not known whether they have
    gradients: with them, a cheap method explains a grey image.
    """
    if purpose != "classes" and not isinstance(explainer, FunctionalExplainer):
        raise InputError("it explains classes alone")
    known = all(type(part).__module__.startswith(KNOWN) for part in target.modules())
    if not known and estimate_passes(explainer) <= CHEAP:
        grey = torch.full((1, len(target.mean), *target.grid.size), 128, dtype=torch.uint8, device=target.mean.device)
        with torch.no_grad():
            if isinstance(explainer, FunctionalExplainer) and purpose != "classes":
                explainer.explain(grey, torch.ones(1, target.embed_dim, device=grey.device))
            else:
                explainer(grey, torch.zeros(1, dtype=torch.long, device=grey.device))


@cache
def print_once(line: str) -> None:
    """Print a line to the standard error, unless this process has printed it."""
    print(line, file=sys.stderr, flush=True)


def prepare_model(model: str | nn.Module) -> TargetModel:
    """Build the model to explain, in eval mode, on a GPU for a name; its weights need no gradients.

    The caller's model stays as it is; a `TargetModel` shares its weights.
    """
    device = "cuda" if isinstance(model, str) and torch.cuda.is_available() else None
    target = as_target(model, device=device)
    target = _share_weights(target) if target is model else target
    return target.eval().requires_grad_(False)


def _share_weights(target: TargetModel) -> TargetModel:
    """A model with modules of its own, whose mode and hooks can change, and with the tensors of another one.

    Weights that were made inside `torch.inference_mode`, which autograd refuses, are copied.
    """
    if any(weight.is_inference() for weight in [*target.parameters(), *target.buffers()]):
        return target.copied()
    shared = share_weights(target) | {id(buffer): buffer.detach() for buffer in target.buffers()}
    own = copy.deepcopy(target, shared)
    own.origin = target.origin
    return own


def own_text_head(model: Any, target: TargetModel) -> TextHead | None:
    """The text head of a model of CLIP whose image tower is the target; `None` for other models."""
    if not hasattr(model, "encode_text"):
        return None
    return clip_text_head(target, encode=clip_encoder(model))


def find_text_head(target: TargetModel, head: TextHead | None = None) -> TextHead:
    """The text head of a model, on the model's device: a given one, or the text tower of CLIP or SigLIP.

    Raises:
        InputError: for a model that was not trained with texts, and what `clip_text_head` refuses.
    """
    if head is None:
        if not has_texts(target):
            raise InputError(
                f"expected an image tower of CLIP or SigLIP for texts, got {target.name}: take one, such as"
                " vit_base_patch16_clip_quickgelu_224.openai, or in a program a text_head, such as that of"
                " explainers.text.fit_text_head"
            )
        return clip_text_head(target).to(target.mean.device)
    if not isinstance(head, TextHead):
        raise InputError(f"expected text_head as a TextHead, got {type(head).__name__}: see explainers.text")
    head.check_fits(target)
    return head if head.device == target.mean.device else copy.deepcopy(head).to(target.mean.device)


def has_texts(target: TargetModel) -> bool:
    """Whether timm's name of a model says that it was trained with texts, and not fine-tuned for classes."""
    name = f"{target.name}.{target.backbone.pretrained_cfg.get('tag') or ''}"
    return any(word in name for word in IMAGE_TOWERS) and "_ft_" not in name


def is_image_tower(target: TargetModel) -> bool:
    """Whether a model was trained with texts and has no classes: its head is none, or projects embeddings to texts."""
    if isinstance(target.head, TextProjection):
        return True
    outputs = getattr(target.head, "out_features", 0)
    return has_texts(target) and outputs == target.backbone.pretrained_cfg.get("num_classes", 0)

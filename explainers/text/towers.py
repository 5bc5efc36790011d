"""Finds the text tower, by open_clip's names, that was trained with an image tower of timm, and checks the pair."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from timm import get_pretrained_cfg, list_pretrained
from torch import nn

from explainers.errors import InputError, needs
from explainers.models import TargetModel


class TextTower(NamedTuple):
    """A text tower: open_clip's names of the architecture and of its weights; no name of weights: random ones."""

    model: str
    pretrained: str


def require_open_clip() -> Any:
    """Import open_clip, which is optional."""
    needs("open_clip", "clip", "text heads")
    import open_clip

    return open_clip


def text_tower(target: TargetModel, model: str | None = None, pretrained: str | None = None) -> TextTower:
    """The text tower of an image tower: the one that is named, or the one that follows from timm's names.

    Args:
        target: the image tower, a timm model.
        model: open_clip's name of the architecture; `None` to find it.
        pretrained: open_clip's name of its weights, or a file; empty for random weights; `None` to find them.

    Raises:
        InputError: if no tower, or several, follow from timm's names, or if image and text tower are not of one model.
    """
    if model is None or pretrained is None:
        towers = list_towers(target)
        if model is not None:
            towers = [tower for tower in towers if tower.model == model]
        if pretrained is not None:
            towers = list(dict.fromkeys(TextTower(tower.model, pretrained) for tower in towers))
        if len(towers) != 1:
            raise _ambiguous(target, towers)
        model, pretrained = towers[0]
    check_towers(target, TextTower(model, pretrained))
    return TextTower(model, pretrained)


def list_towers(target: TargetModel) -> list[TextTower]:
    """Text towers that were trained with an image tower, as far as timm's names tell.

    They are those whose weights open_clip has from the same page of the Hugging Face Hub; else those of the same
    layout, whose weights have timm's name or a longer one: timm's `laion2b` may be open_clip's `laion2b_s34b_b88k`.
    """
    open_clip = require_open_clip()
    named = [TextTower(*pair) for pair in open_clip.list_pretrained()]
    page = target.backbone.pretrained_cfg.get("hf_hub_id")
    known = [tower for tower in named if page and _weights_config(tower).get("hf_hub", "").strip("/") == page]
    tag = target.backbone.pretrained_cfg.get("tag") or ""
    if not known:
        own = tag.removeprefix("v2_").removesuffix("_i18n").replace("_", "")
        alike = [tower for tower in named if own and tower.pretrained.replace("_", "").startswith(own)]
        known = [tower for tower in alike if _may_belong_to(target, tower.model)]
    image = computes_quick_gelu(target.backbone)  # also weights for which open_clip does not say so
    known = [t for t in known if _quick_gelu(t.model) == bool(_weights_config(t).get("quick_gelu", image))]
    return [tower for tower in known if tower.pretrained == tag] or known


def check_towers(target: TargetModel, tower: TextTower) -> None:
    """Raise an InputError unless image and text tower are of one model: by name, width, activation and layout."""
    open_clip = require_open_clip()
    model, weights = tower
    if model not in open_clip.list_models():
        near = get_close_matches(model, open_clip.list_models(), 3, 0)
        raise InputError(
            f"expected a model of open_clip for the text tower's model, such as {', '.join(near)}, got {model}"
        )
    tags = open_clip.list_pretrained_tags_by_model(model)
    if weights and weights not in tags and not Path(weights).is_file():
        near = get_close_matches(weights, tags, 3, 0)
        raise InputError(
            f"expected weights of {model} for the text tower's pretrained, a file or a name such as"
            f" {', '.join(near)}, got {weights}"
        )
    _check_width(target, model)
    _check_activation(target, tower)
    known = list_towers(target)
    if known and weights in tags and tower not in known:
        raise InputError(
            f"expected the text tower of {target.timm_name}, which is {' '.join(known[0])}, got {model} {weights}:"
            " leave out model and pretrained of the text tower"
        )
    if not _has_layout(target, model):
        raise InputError(
            f"expected a text tower that was trained with {target.name}, got {model}, whose image tower has another"
            " layout: set the text tower's model"
        )


def _check_width(target: TargetModel, model: str) -> None:
    """Compare the widths of the space that images and texts share."""
    shared = require_open_clip().get_model_config(model)["embed_dim"]
    projects = target.backbone.pretrained_cfg.get("num_classes") == shared
    own = getattr(target.head, "out_features", None)
    if projects and shared == target.embed_dim:
        raise InputError(
            f"expected an image tower that projects its embeddings to another width, got {target.name}, which projects"
            f" {shared} to {shared}: that is not supported; take another"
        )
    if shared not in (own, target.embed_dim):
        raise InputError(
            f"expected image and text embeddings of one width, got {own} of {target.name} and {shared} of {model}: take"
            " towers of one model"
        )


def _check_activation(target: TargetModel, tower: TextTower) -> None:
    """Compare what both towers compute: GELU, or QuickGELU, with which OpenAI trained."""
    image, text = computes_quick_gelu(target.backbone), _quick_gelu(tower.model)
    if _weights_config(tower).get("quick_gelu") and not image:
        name = f"{target.name.replace('_clip_', '_clip_quickgelu_')}.{target.backbone.pretrained_cfg.get('tag')}"
        known = name in list_pretrained()
        advice = f"set target.model.model_name={name}" if known else "take the image tower of these weights"
        raise InputError(
            f"expected an image tower that computes QuickGELU, with which {' '.join(tower)} was trained, got"
            f" {target.name}, which computes GELU: {advice}"
        )
    if image != text:
        names = ("GELU", "QuickGELU")
        other = f"{tower.model}-quickgelu" if image else tower.model.removesuffix("-quickgelu")
        raise InputError(
            f"expected one activation in image and text tower, got {names[image]} in {target.name} and {names[text]} in"
            f" {tower.model}: set the text tower's model={other}, if it was trained with this image tower"
        )


def computes_quick_gelu(model: nn.Module) -> bool:
    """Whether a model of timm or open_clip computes QuickGELU, x · σ(1.702 x), instead of GELU."""
    return any(type(part).__name__ == "QuickGELU" for part in model.modules())


def _quick_gelu(model: str) -> bool:
    """Whether a model of open_clip computes QuickGELU."""
    return bool(require_open_clip().get_model_config(model).get("quick_gelu"))


def _weights_config(tower: TextTower) -> dict[str, Any]:
    """What open_clip says of weights: their page, and whether they need QuickGELU; empty if it does not know them."""
    return require_open_clip().get_pretrained_cfg(*tower) or {}


def _has_layout(target: TargetModel, model: str) -> bool:
    """Whether the image tower of a model of open_clip has the blocks, width and patches of a target."""
    config = require_open_clip().get_model_config(model)
    vision = config["vision_cfg"]
    if "timm_model_name" in vision:
        return bool(vision["timm_model_name"] == target.name)
    if not isinstance(vision["layers"], int) or not hasattr(target.backbone, "blocks"):
        return not isinstance(vision["layers"], int) and not hasattr(target.backbone, "blocks")  # ResNets
    own = (len(target.backbone.blocks), target.embed_dim, target.backbone.patch_embed.patch_size[0])
    return own == (vision["layers"], vision["width"], vision["patch_size"])


def _may_belong_to(target: TargetModel, model: str) -> bool:
    """Whether a target may be the image tower of a model of open_clip: by layout, image size, language and version."""
    config = require_open_clip().get_model_config(model)
    tag = target.backbone.pretrained_cfg.get("tag") or ""
    known = target.timm_name in list_pretrained(target.name)
    trained: Any = vars(get_pretrained_cfg(target.timm_name)) if known else target.backbone.pretrained_cfg
    size = config["vision_cfg"]["image_size"] == trained["input_size"][-1]  # not the size of a target that was resized
    plain = "hf_model_name" not in config["text_cfg"] and "multimodal_cfg" not in config
    version = ("SigLIP2" in model) == tag.startswith("v2_") and ("i18n" in model) == tag.endswith("i18n")
    return plain and size and version and _has_layout(target, model)


def _ambiguous(target: TargetModel, towers: list[TextTower]) -> InputError:
    """The error where no text tower follows, or several."""
    alike = [name for name in require_open_clip().list_models() if _may_belong_to(target, name)]
    listed = " or ".join(" ".join(tower) for tower in towers)
    advice = listed or f"models of its layout are {', '.join(alike) or 'none'}"
    return InputError(
        f"expected an image tower with one known text tower, as target=clip_vit_b32 has, got {target.timm_name}: set"
        f" the text tower's model and pretrained to open_clip's names of it ({advice})"
    )

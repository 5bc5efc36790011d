"""Models of timm by name, with weights from a file, from the cache of the Hugging Face Hub, or from a download.

No connection is opened for weights that are on this machine; a download is announced in one line.
"""

import copy
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from timm.models import PretrainedCfg, get_pretrained_cfg, load_checkpoint, load_state_dict
from torch import Tensor, nn

from explainers.errors import InputError, suggest_names
from explainers.models.heads import DistilledHead
from explainers.models.model import TargetModel
from explainers.saved.weights import check_floating, save_weights

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar", ".pkl")
"""Files of weights that can be read without running what they hold."""
POOLED = " (weights with fc_norm belong to global_pool='avg', those with norm to 'token')"
"""What to say of weights of a model that pools otherwise."""
FOLDER = "local-dir:"
"""Begins timm's name of a model that it saved to a folder."""
ON_THE_HUB = ("model.safetensors", "pytorch_model.bin")
"""Names of a model's weights on the Hub, in the order in which timm looks for them."""


def timm_model(name: str, weights: str | Path | None = None) -> nn.Module:
    """Build a model of timm with its weights, in eval mode.

    Args:
        name: name in timm, with or without the tag of its weights. The tag also decides the normalisation of images;
            without one it is timm's default tag. Or `local-dir:FOLDER` or `hf-hub:USER/NAME`, as in timm.
        weights: file of weights, .safetensors or .pth, or a checkpoint of Lightning, whose classification layer decides
            the number of classes; a file without that layer gives a model without a head. `None` takes the weights that
            timm names: from the cache, or downloaded.

    Raises:
        InputError: if timm has no model of this name or no weights for it, if there is no connection to download them,
            or if the file is missing, damaged, or of another model.
    """
    name = _find_folder(name)
    config = pretrained_config(name)
    if weights is None:
        if name.startswith(FOLDER):
            return _build(name, name, {})
        file = pretrained_file(name)
        return _build(name, file, {"file": str(file), "num_classes": config.num_classes})
    file = _check_file(weights)
    tensors = read_checkpoint(file)
    try:
        return _build(name, file, {"state_dict": tensors, "num_classes": count_classes(tensors, config.classifier)})
    except InputError:
        below = strip_prefix(tensors, _skeleton(name).state_dict().keys(), file)
        if not below:
            raise
    return _build(name, file, {"state_dict": below, "num_classes": count_classes(below, config.classifier)})


def _build(name: str, file: Path | str, overlay: dict[str, Any]) -> nn.Module:
    """Build a model of timm in eval mode with the weights that an `overlay` of its config names, those of a file."""
    settings = {"num_classes": overlay["num_classes"]} if overlay else {}
    overlay = {"source": "", "custom_load": False} | overlay if overlay else {}
    try:
        model: Any = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **settings)
    except Exception as error:  # timm converts foreign formats, and fails in many ways on those it does not know
        raise InputError(
            f"expected weights of {name} in {file}, got others: {difference(error)}; name the model that they belong"
            " to, or give another file"
        ) from error
    model.pretrained_cfg.pop("state_dict", None)
    built: nn.Module = model.eval()
    return built


def create_model(model_name: str, pretrained: bool = False, checkpoint_path: str = "", **settings: Any) -> nn.Module:
    """Build a model by the arguments of `timm.create_model`, but without a connection for weights in the cache.

    A checkpoint may be one of Lightning, or one whose names have a prefix, see `strip_prefix`.
    """
    overlay: dict[str, Any] = dict(settings.pop("pretrained_cfg_overlay", None) or {})
    if pretrained and not checkpoint_path and not overlay.get("file") and is_in_timm(model_name):
        overlay |= {"file": str(pretrained_file(model_name)), "custom_load": False}
    try:
        model = timm.create_model(model_name, pretrained=pretrained, pretrained_cfg_overlay=overlay, **settings)
        if checkpoint_path:
            _load(model, Path(checkpoint_path))
    except (RuntimeError, SafetensorError) as error:
        file = checkpoint_path or overlay.get("file")
        raise InputError(
            f"weights: expected those of {model_name}, got {file}: {difference(error)}", "weights"
        ) from error
    return model


def _load(model: nn.Module, file: Path) -> None:
    """Load a checkpoint as timm does, or else without the prefix of its names."""
    try:
        load_checkpoint(model, str(file))
    except RuntimeError:
        weights = read_checkpoint(file)
        model.load_state_dict(strip_prefix(weights, model.state_dict().keys(), file) or weights)


def is_in_timm(name: str) -> bool:
    """Whether timm has a model of this name, with or without the tag of its weights.

    >>> is_in_timm("vit_small_patch16_224"), is_in_timm("vit_small_patch16_224.augreg_in1k"), is_in_timm("vit_tiny")
    (True, True, False)
    """
    return timm.is_model(name) and ("." not in name or timm.models.is_model_pretrained(name))


def similar_targets(name: str, files: Sequence[str] = ()) -> str:
    """Suggest the names of files and of timm's models that are most similar to another name, or say which there are."""
    tags = timm.list_pretrained(f"{name.partition('.')[0]}.*")
    if tags:  # the model exists, and its weights do not
        return suggest_names(name, tags)
    suggestion = suggest_names(name, [*files, *timm.list_models(), *timm.list_pretrained()])
    if suggestion.startswith("did you mean"):
        return suggestion
    return f"there are {', '.join([*files, 'all names of timm.list_models()'])}"


def pretrained_file(name: str) -> Path:
    """The file of the weights that timm names for a model: from the cache, or downloaded into it."""
    config = pretrained_config(name)
    if not config.hf_hub_id and not config.url:
        got = "none: timm has none to download; give weights=FILE"
        raise InputError(f"expected weights of {name}, got {got}", "weights")
    try:
        return _from_hub(name, config.hf_hub_id) if config.hf_hub_id else _from_url(name, str(config.url))
    except Exception as error:  # whatever the layers of a connection raise; there is no common class
        site = "huggingface.co" if config.hf_hub_id else str(config.url).split("/")[2]
        raise _no_download(name, site, error) from error


def pretrained_config(name: str) -> PretrainedCfg:
    """What timm knows of a model's weights: where they are, how images are normalised, the number of classes."""
    if name.startswith(FOLDER):
        return PretrainedCfg(**_skeleton(name).pretrained_cfg)
    if not is_in_timm(name):
        raise InputError(f"expected the name of a model of timm, got {name}: {similar_targets(name)}")
    return get_pretrained_cfg(name) or PretrainedCfg(architecture=name.partition(".")[0])


def _skeleton(name: str) -> Any:
    """A model of timm without values of its weights: its config, and the names of its weights."""
    try:
        with torch.device("meta"):
            return timm.create_model(name)
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise InputError(
            f"expected a folder with config.json and weights, as timm saves a model, got {name}: {error}"
        ) from error


def _find_folder(name: str) -> str:
    """The folder in the cache of a model on the Hub, downloaded if it is not there, in place of its name."""
    source, _, repository = name.partition(":")
    if source not in ("hf-hub", "hf_hub"):
        return name
    try:
        _from_hub(name, repository)
        return f"{FOLDER}{_from_hub(name, repository, ('config.json',)).parent}"
    except Exception as error:  # whatever the layers of a connection raise
        raise _no_download(name, "huggingface.co", error) from error


def _no_download(name: str, site: str, error: Exception) -> InputError:
    """The error for weights that are not on this machine, and could not be downloaded."""
    return InputError(
        f"expected weights of {name} in the cache or from {site}, got no download ({type(error).__name__}:"
        f" {' '.join(str(error).split())[:120]}): give weights=FILE, or connect this machine",
        "weights",
    )


def _from_hub(name: str, repository: str, files: Sequence[str] = ON_THE_HUB) -> Path:
    """The first of the files that a repository of the Hub has, from the cache or downloaded."""
    import huggingface_hub  # timm brings it
    from huggingface_hub.errors import EntryNotFoundError

    for file in files:
        cached = huggingface_hub.try_to_load_from_cache(repository, file)
        if isinstance(cached, str):
            return Path(cached)
    for file in files:
        address = huggingface_hub.hf_hub_url(repository, file)
        try:
            size = huggingface_hub.get_hf_file_metadata(address).size
        except EntryNotFoundError:
            continue
        _announce(name, f"huggingface.co/{repository}", size)
        return Path(huggingface_hub.hf_hub_download(repository, file))
    raise FileNotFoundError(f"{repository} has none of {', '.join(files)}")


def _from_url(name: str, address: str) -> Path:
    """The file of an address, from torch's cache or downloaded into it."""
    file = Path(torch.hub.get_dir(), "checkpoints", address.rpartition("/")[2])
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        _announce(name, address, None)
        torch.hub.download_url_to_file(address, str(file))
    return file


def _announce(name: str, source: str, size: int | None) -> None:
    shown = f" ({size / 1e6:.1f} MB)" if size else ""
    print(f"downloading the weights of {name}{shown} from {source}", file=sys.stderr, flush=True)


def _check_file(weights: str | Path) -> Path:
    """The path of a file of weights that can be read safely."""
    if "://" in str(weights):
        raise InputError(f"expected a file of weights, got the address {weights}: download it, and give the file")
    file = Path(weights)
    if not file.is_file():
        raise InputError(f"expected a file of weights, got {file}: there is no such file; correct the path")
    if file.suffix not in SUFFIXES:
        raise InputError(f"expected weights as {', '.join(SUFFIXES)}, got {file}: convert it, or give another file")
    return file


def difference(error: Exception) -> str:
    """The first tensors that differ, from the message of PyTorch."""
    text = str(error)
    sizes = re.findall(r"size mismatch for (\S+): .*?Size\((\[[\d, ]*\])\) from.*?Size\((\[[\d, ]*\])\)", text)
    if sizes:
        name, got, expected = sizes[0]
        return f"{name} has the shape {got} and not {expected}"
    for label, said in (("Missing", "it lacks"), ("Unexpected", "it also has")):
        names = re.findall(rf"{label} key\(s\) in state_dict: (.*?)\.?\s*(?:\n|$)", text)
        if names:
            keys = re.findall(r'"([^"]+)"', names[0])
            more = f" and {len(keys) - 2} more tensors" * (len(keys) > 2)
            return f"{said} {', '.join(keys[:2])}{more}" + POOLED * ("fc_norm." in text and len(keys) <= 4)
    return f"{type(error).__name__}: {' '.join(text.split())[:120]}"


def save_target(target: TargetModel, path: Path) -> None:
    """Write backbone and head, linear or distilled, to one file, which timm can load as a checkpoint of its model."""
    weights, head = target.backbone.state_dict(), target.head
    layers = target.backbone.pretrained_cfg.get("classifier")
    if layers is None or not isinstance(head, nn.Linear | DistilledHead):
        raise InputError(
            f"expected a model of timm with a linear head to write to {path}, got {target.name} with a"
            f" {type(head).__name__}: take such a model, or save its state_dict"
        )
    layers = (layers,) if isinstance(layers, str) else layers
    if isinstance(head, DistilledHead):
        parts: list[Any] = [(part.weight, part.bias) for part in (head.head, head.head_dist)]
    else:  # a factor of 2 for a distilled DeiT, because timm averages the logits of its two classifiers
        parts = [(weight * len(layers), head.bias) for weight in head.weight.chunk(len(layers), -1)]
    for layer, (weight, bias) in zip(layers, parts, strict=True):
        weights |= {f"{layer}.weight": weight, f"{layer}.bias": 0 * weight[:, 0] if bias is None else bias.clone()}
    save_weights(weights, path)


def load_target(target: TargetModel, path: str | Path) -> TargetModel:
    """Load the backbone and head that `save_target` wrote as a new model, in eval mode.

    Args:
        target: a model of the same architecture and number of classes; it is not changed.
        path: the file to read.

    Raises:
        InputError: if the file does not exist, or holds another model or another number of classes.
    """
    if not Path(path).is_file():
        raise InputError(f"no model at {path}: train one with train.py, or give another path")
    model = copy.deepcopy(target.backbone)
    model.reset_classifier(target.num_classes)
    try:
        load_checkpoint(model, str(path))
    except RuntimeError as error:
        raise InputError(
            f"expected weights of {target.name} for {target.num_classes} classes in {path}, got others: "
            f"{str(error).splitlines()[-1].strip()}"
        ) from error
    return TargetModel(model, score=target.score).eval()


def read_checkpoint(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a file of weights, .safetensors, or of PyTorch or Lightning; programs in it do not run.

    Raises:
        InputError: for a damaged file, one that holds programs, and weights that are no floating-point numbers.
    """
    try:
        below, weights = find_weights(load_state_dict(str(file)))
    except Exception as error:  # bytes that are no weights raise nearly any error
        raise InputError(
            f"expected weights in {file}, got a damaged file, or one that holds programs: write"
            " model.state_dict() again, as .safetensors"
        ) from error
    if below:
        print(f"{file}: the weights are those of {below}", file=sys.stderr, flush=True)
    check_floating({name: str(value.dtype) for name, value in weights.items()}, file)
    return weights


def find_weights(checkpoint: Mapping[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """Find the most tensors that a checkpoint holds together, and what leads to them, also to others as many.

    >>> find_weights({"epoch": 3, "net": {"bias": torch.ones(1)}, "ema": {"bias": torch.ones(1)}})
    ('net, not those of ema', {'bias': tensor([1.])})
    """
    found = {"": {name: value for name, value in checkpoint.items() if isinstance(value, Tensor)}}
    for key, value in checkpoint.items():
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):  # others are of an optimiser
            below, weights = find_weights(value)
            found[f"{key}.{below}" if below else key] = weights
    most = max(map(len, found.values()))
    first, *others = (key for key, weights in found.items() if len(weights) == most)
    return first + f", not those of {', '.join(others)}" * bool(first and others), found[first]


def find_prefix(names: Iterable[str], wanted: Collection[str]) -> str | None:
    """Find the beginning of names below which more than half of the `wanted` names are; `None` if there is none.

    >>> find_prefix(["net.encoder.cls", "net.encoder.norm.bias", "loss.bias"], ["cls", "norm.bias"])
    'net.encoder.'
    """
    parts = ((name, start) for name in names for start in range(len(name)) if name[start - 1 : start] in ("", "."))
    count = Counter(name[:start] for name, start in parts if name[start:] in wanted)
    prefix, found = max(count.items(), key=lambda item: item[1], default=(None, 0))
    return prefix if found > len(wanted) / 2 else None


def strip_prefix(weights: Mapping[str, Tensor], wanted: Collection[str], file: Path) -> dict[str, Tensor]:
    """Take the prefix of `find_prefix` off the names of weights, and say it in one line; empty if nothing changes.

    Tensors that are no part of the model, such as those of a loss, are left out, which the line says, too.
    """
    prefix, parts = find_prefix(weights, wanted), {name.partition(".")[0] for name in wanted}
    if prefix is None:
        return {}
    below = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    below = {name: value for name, value in below.items() if name.partition(".")[0] in parts}
    others = [name for name in weights if name.removeprefix(prefix) not in below]
    if not prefix and (not others or not below.keys() >= set(wanted)):
        return {}
    left = f", without {', '.join(others[:3])}{', ...' * (len(others) > 3)}" * bool(others)
    print(f"{file}: {len(below)} weights{f' below {prefix}' * bool(prefix)}{left}", file=sys.stderr, flush=True)
    return below


def count_classes(weights: Mapping[str, Tensor], classifier: str | Iterable[str] | None) -> int:
    """The number of classes of weights, by their `classifier`, one layer or several; 0 without that layer."""
    layer = classifier if isinstance(classifier, str) else next(iter(classifier or ("head",)))
    weight = weights.get(f"{layer}.weight", torch.zeros(0))
    return weight.shape[0] if weight.dim() else 0

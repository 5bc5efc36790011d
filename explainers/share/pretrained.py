"""Trained explainers as files: loaded from a run, a folder or the Hugging Face Hub, and saved for others to load.

One file is an explainer: the header of its safetensors names one of `LEARNED`, its network, its grid, the backbone and
how heatmaps are read. The header is data from elsewhere: it names classes of this project and plain numbers and words,
and nothing that runs. `config.yaml` and `versions.json` beside it are the record of a run, which is kept and not read.
"""

import inspect
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import timm
import torch
from huggingface_hub import HfApi, snapshot_download

from explainers.errors import InputError, needs
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.models.fetching import create_model, is_in_timm
from explainers.runtime.modes import keep_random_state, ordinary_tensors
from explainers.saved.files import write_atomically
from explainers.saved.identity import Identity
from explainers.saved.weights import check_forms, describe_tensors, quote, read_header, read_weights, save_weights
from explainers.share.catalogue import available, shipped
from explainers.share.model_cards import model_card

LEARNED = {
    "AnyHead": "explainers.anyhead",
    "SelfExplaining": "explainers.vectors",
    "Shapley": "explainers.shapley",
    "TVE": "explainers.tve",
}
"""Class of a learned explainer → the room that exports it."""

HUB = "hf://"
CARD = "README.md"
FILES = ("explainer.safetensors", "model.safetensors")
"""Names of the file of an explainer, and of a model that explains itself, in its folder."""

RECORD = ("config.yaml", "versions.json")
"""Names of the files that a run leaves beside its weights."""

LARGEST = 4096
"""Largest integer of a header, such as a width or a number of layers."""

NOT_IN_HEADERS = {"target", "grid", "network", "weights", "allow_finetuned_backbone", "surrogate"}
"""Arguments of explainers that no header sets."""


class Pretrained:
    """Saves a learned explainer; its methods have the names that other libraries of the Hub use."""

    record: Mapping[str, str] = {}
    """Name → text of the files in `RECORD`; `load` keeps them."""

    identity: Any  # of the explainer
    export: Any

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        target: TargetModel | None = None,
        revision: str | None = None,
        network: Callable[..., Any] | None = None,
    ) -> Self:
        """Load an explainer of this class, see `load`; a name that is no path is looked up on the Hugging Face Hub."""
        known = Path(source).exists() or str(source).startswith(HUB)
        explainer = load(source if known else f"{HUB}{source}", target, revision, network)
        if not isinstance(explainer, cls):
            raise InputError(
                f"expected {cls.__name__} in {source}, got {type(explainer).__name__}: use explainers.load, which reads"
                " the class from the file"
            )
        return explainer

    def save_pretrained(
        self, folder: str | Path, evaluation: str | Path | None = None, license: str | None = None, half: bool = False
    ) -> Path:
        """Write a folder that `load` reads, with a model card and the record of the training; returns its path.

        Args:
            folder: the folder, which may not exist yet.
            evaluation: folder of a run of eval.py, whose table goes into the model card; `None` for no table.
            license: licence of the weights, as the Hub names it, such as `apache-2.0`; `None` to name none.
            half: write weights of 16 bits, half as large; `load` makes 32 bits of them.
        """
        folder = Path(folder)
        table = "" if evaluation is None else read_text(Path(evaluation) / "table.md", "the table of a run of eval.py")
        path = self.export(folder)
        if half:
            halve(path)
        for name, text in self.record.items():
            write_atomically(folder / name, text)
        what = (type(self).__doc__ or "").partition("\n")[0]
        versions = _parse(self.record.get("versions.json", "{}"))
        card = model_card(type(self).__name__, what, read_header(path), versions, table, license)
        write_atomically(folder / CARD, card)
        return folder

    def push_to_hub(
        self, repository: str, private: bool = False, evaluation: str | Path | None = None, license: str | None = None
    ) -> str:
        """Upload what `save_pretrained` writes to a repository of the Hugging Face Hub; returns the commit's address.

        Args:
            repository: its id, such as `user/name`; it is made if there is none.
            private: make a repository that others cannot see.
        """
        hub = HfApi()
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, evaluation, license)
            hub.create_repo(repository, private=private, exist_ok=True)
            return hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="A trained explainer")


def halve(path: Path) -> None:
    """Replace the weights in a file by those of 16 bits. Single numbers, and what 16 bits cannot hold, keep 32."""
    identity, weights = read_weights(path)
    largest = torch.finfo(torch.half).max
    for name, value in weights.items():
        if value.is_floating_point() and value.numel() > 1 and value.abs().max() <= largest:
            weights[name] = value.half()
    save_weights(weights, path, identity)


@keep_random_state()
@ordinary_tensors()
def load(
    source: str | Path,
    target: TargetModel | None = None,
    revision: str | None = None,
    network: Callable[..., Any] | None = None,
) -> Any:
    """Load a trained explainer: one that learned to explain a target, or a model that explains itself.

    Args:
        source: name of a model of timm for which an explainer is shipped, see `explainers.available`; a file
            `explainer.safetensors` or `model.safetensors`, or the folder that holds one, such as that of a run of
            train.py; or `hf://user/name`, a repository on the Hugging Face Hub.
        target: the model to explain; `None` takes the model of timm that the file names, with timm's weights.
        revision: branch, tag or commit of the repository; `None` for the latest.
        network: a network of your own, which gets the target, the grid and the arguments in the file; `None` for one of
            this project.

    Returns:
        The explainer, a module on the CPU in eval mode, whose weights need no gradients. `explainer(images)` explains
        the predicted classes of uint8 images (B, C, H, W) and `explainer(images, classes)` others: (B, rows, columns).

    Raises:
        InputError: if there is no trained explainer, the model to explain is missing, it is not the one that the
            explainer was trained for, or the file is not one that this project writes.
    """
    file = _file(source, revision)
    header = read_header(file)
    kind = _find_class(header.get("class"), file)
    learned = issubclass(kind, Pretrained)
    try:
        grid = PatchGrid(**_plain(header.get("grid"), f"{file}: grid"), differs=True)
        model = _model(header, grid, file, pretrained=learned) if target is None else target.frozen()
        if learned:
            settings = _settings(kind, header, file)
            arguments = _plain(header.get("network"), f"{file}: network")
            built = partial(network or _network(kind, header["network"], file), **arguments)
            with torch.device("meta"):
                check_forms(file, describe_tensors(built(model, grid).state_dict()))
            explainer = kind(target=model, grid=grid, network=built, weights=str(file), **settings)
            explainer.record = _record(file.parent) if file.name in FILES else {}
        else:
            explainer = kind(target=model, grid=grid, weights=str(file))
    except Exception as error:  # whatever timm and torch say of sizes that do not fit
        if isinstance(error, InputError) and str(file) in str(error):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise InputError(f"{file}: expected settings of an explainer, got {reason}") from error
    return explainer.eval().requires_grad_(False)


def _file(source: str | Path, revision: str | None) -> Path:
    """The file of weights that a source of `load` stands for."""
    on_hub = isinstance(source, str) and source.startswith(HUB)
    if revision is not None and not on_hub:
        raise InputError(f"expected hf://user/name for revision={revision}, got {source}: folders have no revisions")
    known = shipped(source) if isinstance(source, str) and not on_hub else None
    path = download_repository(str(source), revision) if on_hub else Path(source) if known is None else known.folder
    if os.path.isfile(path) or os.path.islink(path):  # pathlib raises an error for a name that is too long
        return _check_file(path)
    if not os.path.isdir(path):
        names = ", ".join(dict.fromkeys(each.name for each in available()))
        raise InputError(
            f"expected the folder of a run, or hf://user/name of the Hugging Face Hub, got {source}: there is no such"
            f" folder{f', and explainers are shipped for {names} alone' if names else ''}; train with"
            " train.py, or correct the path"
        )
    files = [path / name for name in FILES if (path / name).exists()]
    if not files:
        raise InputError(
            f"expected a trained explainer in {path}, got no {' or '.join(FILES)}: a run that has not ended goes on"
            " with its command"
        )
    return _check_file(files[0])


def _check_file(path: Path) -> Path:
    """The path of a file that is not a link to another place: `save_pretrained` would give that away."""
    folder, file = path.parent.resolve(), path.resolve()
    if file.parent != folder and file.parent != folder.parent.parent / "blobs":  # of the Hub's cache
        raise InputError(f"expected a file at {path}, got a link to {file}: copy the file there")
    return path


def download_repository(source: str, revision: str | None) -> Path:
    """Download what `load` reads of a repository on the Hugging Face Hub; returns the local folder."""
    repository = source.removeprefix(HUB)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise InputError(f"expected a repository of the Hugging Face Hub as hf://user/name, got {source}")
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=[*FILES, *RECORD]))
    except (OSError, ValueError) as error:  # no repository, no network, no permission, no such name
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"expected a repository of the Hub, got {source:.99}, and the Hub says: {reason:.200}"
        ) from error


def read_text(path: Path, expected: str) -> str:
    """Read a small text file beside weights, which may be given away with them."""
    if not path.is_file():
        raise InputError(f"expected {expected} at {path}, got no file: give the folder of another run")
    if _check_file(path).stat().st_size > 2**18:
        raise InputError(f"expected {expected} at {path}, got {path.stat().st_size} bytes: delete it")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"expected {expected} at {path}, got bytes that are no text: delete it") from error


def _record(folder: Path) -> dict[str, str]:
    """The texts of the files that a run has left beside its weights."""
    return {name: read_text(folder / name, "the record of a run") for name in RECORD if (folder / name).exists()}


def _parse(text: str) -> dict[str, Any]:
    """The content of versions.json; empty if it is not what a run writes."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _find_class(name: Any, file: Path) -> Any:
    """The class of `LEARNED` that a header names."""
    if not isinstance(name, str) or name not in LEARNED:
        raise InputError(
            f"{file}: expected one of {', '.join(LEARNED)} as the class, got {quote(name)}: give another file"
        )
    try:
        return getattr(import_module(LEARNED[name]), name)
    except ModuleNotFoundError as error:  # self-explaining models are LightningModules
        needs(error.name or "lightning", "train", name)
        raise


def _network(kind: Any, named: dict[str, Any], file: Path) -> Any:
    """The class of a network of this project, whose name and arguments a header has."""
    networks = {each.__name__: each for each in kind.networks}
    name = named.get("class")
    if name not in networks:
        raise InputError(
            f"{file}: expected {' or '.join(networks)} as the network, got {quote(name)}: give your own network, as"
            " in load(..., network=MyNetwork)"
        )
    not_in_headers = {"target", "grid", *getattr(networks[name], "initial", ())}
    _check_known({*named} - {"class"}, {*inspect.signature(networks[name]).parameters} - not_in_headers, file)
    return networks[name]


def _settings(kind: Any, header: Identity, file: Path) -> dict[str, Any]:
    """The arguments of an explainer in a header, besides its network and grid."""
    own = {
        name: value for name, value in header.items() if name not in ("network", "grid", "target", "model", "sketch")
    }
    reading = own.pop("reading", {})
    settings = _plain(own, str(file)) | _plain(reading, f"{file}: reading")
    _check_known({*settings}, {*inspect.signature(kind).parameters} - NOT_IN_HEADERS, file)
    return settings


def _check_known(names: set[str], known: set[str], file: Path) -> None:
    for name in sorted(names - known):
        raise InputError(f"{file}: expected settings {', '.join(sorted(known))}, got {quote(name)}: give another file")


def _plain(settings: Any, where: str) -> dict[str, Any]:
    """Settings of a header without their class: numbers, words, lists of them, or sizes, as of a transformer."""
    if not isinstance(settings, dict):
        raise InputError(f"{where}: expected settings, got {quote(settings)}: give another file")
    for name, value in settings.items():
        sizes = isinstance(value, dict) and all(type(size) is int for size in value.values())
        several = [*value, *value.values()] if sizes else value
        for each in several if isinstance(several, list) and len(several) <= LARGEST else [several]:
            word = isinstance(each, str) and re.fullmatch(r"[\w.-]{0,100}", each)
            number = isinstance(each, int | float) and (abs(each) <= LARGEST or each == float("inf"))
            if not word and not number and each is not None:
                raise InputError(f"{where}: expected a number or a word for {quote(name)}, got {quote(each)}")
    return {name: value for name, value in settings.items() if name != "class"}


def _model(header: Identity, grid: PatchGrid, file: Path, pretrained: bool) -> TargetModel:
    """The model of timm that a header names, with timm's weights, or `pretrained=False` with random ones."""
    name = header.get("model")
    advice = "give the model as target="
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,200}", name) or not is_in_timm(name):
        raise InputError(f"{file}: expected the name of a model of timm, got {quote(name)}: {advice}", "target")
    config = timm.get_pretrained_cfg(name)
    resized = config is not None and tuple(config.input_size[1:]) != grid.size and "patch" in name
    size: dict[str, Any] = {"img_size": grid.image_size} if resized else {}
    try:
        model = create_model(name, pretrained, **size)
    except InputError as error:
        raise InputError(f"{file} explains {name}, whose weights are not here: {advice} ({error})", "target") from error
    return TargetModel(model).eval()

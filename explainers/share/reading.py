"""Reads the folders of trained explainers, whose authors are not trusted: content is checked, and nothing is run."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import snapshot_download
from yaml.events import CollectionEndEvent, CollectionStartEvent

from explainers.errors import InputError
from explainers.saved.records import leaves

CONFIG = "config.yaml"
VERSIONS = "versions.json"
HUB = "hf://"
FILES = [CONFIG, VERSIONS, "explainer.safetensors", "model.safetensors"]
"""Files that are fetched from the Hub."""

MAX_BYTES = 2**18
"""Size of the largest config that is read; configs of train.py have a tenth of it."""

DEPTH = 50
"""Deepest nesting of a config that is read; configs of train.py have a tenth of it."""


def read_record(folder: Path) -> dict[str, str]:
    """The texts of the config and of the versions, if there are any."""
    record = {CONFIG: read_text(folder / CONFIG, "the config of a run of train.py")}
    if (folder / VERSIONS).exists():
        record[VERSIONS] = read_text(folder / VERSIONS, "the versions of a run of train.py")
        try:
            versions = json.loads(record[VERSIONS])
        except (ValueError, RecursionError):
            versions = None
        if not isinstance(versions, dict):
            raise InputError(f"{folder / VERSIONS}: expected a dictionary, got a damaged file: delete it")
    return record


def read_text(path: Path, expected: str) -> str:
    """Read a small text file of a folder. Links must stay in it, or in its download's cache: the text may be shared."""
    if not path.is_file():
        raise InputError(f"expected {expected} at {path}, got no file: give the folder of another run")
    if not _is_inside(path):
        raise InputError(f"expected {expected} at {path}, got a link to {path.resolve()}: copy the file there")
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"expected {expected} at {path}, got {path.stat().st_size} bytes: give another folder")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"expected {expected} at {path}, got bytes that are no text: give another folder") from error


def _is_inside(path: Path) -> bool:
    """Whether a file lies in its folder, or where the Hub's cache keeps the files of its downloads."""
    folder = path.parent.resolve()
    file = path.resolve()
    return file.parent == folder or file.parent == folder.parent.parent / "blobs"


def downloaded(source: str, revision: str | None) -> Path:
    """The local copy of a repository on the Hugging Face Hub."""
    repository = source.removeprefix(HUB)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise InputError(f"expected a repository of the Hugging Face Hub as hf://user/name, got {source}")
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=FILES))
    except OSError as error:  # no repository, no network, no permission
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"expected a repository of the Hugging Face Hub, got {source}, of which it says: {reason}"
        ) from error


def _parsed(text: str) -> Any:
    """Parse a config; `None` for text that is no YAML, or whose aliases or nesting could fill the memory."""
    depth = 0
    try:
        for event in yaml.parse(text):
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > DEPTH:
                return None
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def explainer_settings(text: str, folder: Path) -> dict[str, Any]:
    """The settings of the explainer in the text of a config; `folder` is for messages."""
    config = _parsed(text)
    settings = config.get("explainer") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(settings, dict | None):
        raise InputError(f"{folder / CONFIG}: expected the config of the run, got a damaged file: fetch it again")
    if not settings:
        module = config.get("module")
        trained = module.get("_target_") if isinstance(module, dict) else "something else"
        shown = " ".join(str(trained).split())[:80]
        raise InputError(f"expected the run of an explainer in {folder}, got one of {shown}: give another folder")
    absent = [name for name in ("target", "grid") if not isinstance(settings.get(name), dict)]
    if absent:
        raise InputError(f"{folder / CONFIG}: expected settings of explainer.{absent[0]}, got none: fetch it again")
    return settings


def check_files(settings: Any, folder: Path) -> None:
    """Raise an InputError if a file that the model to explain is read from is missing."""
    for key, path in leaves(settings):
        is_file = key.rpartition(".")[2] in ("checkpoint_path", "head") and isinstance(path, str) and path
        if is_file and not Path(path).is_file():
            raise InputError(
                f"expected the model that {folder} explains at {path}, got no file: run where it is, or give the model,"
                " as in load(..., target=TargetModel(...))"
            )

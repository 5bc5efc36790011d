"""Trained explainers as folders: loaded from a run or from the Hugging Face Hub, and saved for others to load.

A folder holds the weights with their identity (`explainer.safetensors`), the run's config (`config.yaml`) and versions
(`versions.json`), and in a repository a model card (`README.md`). `save_pretrained` and its kin are our own, because
huggingface_hub's ModelHubMixin would save constructor arguments a second time, as a config.json.
"""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import timm
import yaml
from huggingface_hub import HfApi, ModelCardData, snapshot_download

from explainers.errors import InputError
from explainers.files import write_atomically
from explainers.identity import Identity
from explainers.records import leaves
from explainers.target import TargetModel

CONFIG, VERSIONS, CARD = "config.yaml", "versions.json", "README.md"
EXPLAINER, MODEL = "explainer.safetensors", "model.safetensors"
"""Files of weights: of an explainer of a target, and of a model that explains itself, which is its own target."""

INITIAL_WEIGHTS = {"mae": None, "pretrained": False}
"""Arguments of networks that choose their initial weights, which trained weights replace, and how to choose none."""

TRAINING_ONLY = ("optimizer", "scheduler", "teacher")
"""Arguments of explainers that only training needs; `None` leaves them out."""


class Pretrained:
    """Saves a learned explainer that `load` has built; the methods are named as those of other libraries on the Hub."""

    record: Mapping[str, str] = {}
    """Name → text of the files beside the weights, `config.yaml` and `versions.json`; `load` reads them."""

    identity: Any  # of the LightningModule
    export: Any

    @classmethod
    def from_pretrained(
        cls, source: str | Path, target: TargetModel | None = None, revision: str | None = None
    ) -> Self:
        """Load an explainer of this class, see `load`."""
        explainer = load(source, target, revision)
        if not isinstance(explainer, cls):
            raise InputError(
                f"expected {cls.__name__} in {source}, got {type(explainer).__name__}: use explainers.load, which reads"
                " the class from the config"
            )
        return explainer

    def save_pretrained(
        self, folder: str | Path, evaluation: str | Path | None = None, license: str = "apache-2.0"
    ) -> Path:
        """Write a folder that `load` reads, with a model card; returns its path.

        Args:
            folder: the folder, which may not exist yet.
            evaluation: folder of a run of eval.py, whose table goes into the model card; `None` for no table.
            license: licence of the weights, as the Hub names it; by default that of this project.

        Raises:
            InputError: for an explainer that was not built by `load`, because its config is not known.
        """
        folder = Path(folder)
        if CONFIG not in self.record:
            raise InputError(
                f"expected an explainer that explainers.load has built, got {type(self).__name__} without the config of"
                " its run: load the run's folder"
            )
        table = "" if evaluation is None else _read(Path(evaluation) / "table.md", "the table of a run of eval.py")
        config, versions = yaml.safe_load(self.record[CONFIG]), json.loads(self.record.get(VERSIONS, "{}"))
        self.export(folder)
        for name, text in self.record.items():
            write_atomically(folder / name, text)
        what = (type(self).__doc__ or "").partition("\n")[0]
        card = model_card(type(self).__name__, what, self.identity(), config, versions, table, license)
        write_atomically(folder / CARD, card)
        return folder

    def push_to_hub(
        self,
        repository: str,
        private: bool = False,
        evaluation: str | Path | None = None,
        license: str = "apache-2.0",
    ) -> str:
        """Upload what `save_pretrained` writes to a repository of the Hugging Face Hub; returns the commit's address.

        Args:
            repository: its id, such as `user/name`; it is made if there is none.
            private: make a repository that others cannot see.
            evaluation: see `save_pretrained`.
            license: see `save_pretrained`.
        """
        hub = HfApi()
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, evaluation, license)
            hub.create_repo(repository, private=private, exist_ok=True)
            return hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="A trained explainer")


def load(source: str | Path, target: TargetModel | None = None, revision: str | None = None) -> Any:
    """Load a trained explainer: one that learned to explain a target, or a model that explains itself.

    Args:
        source: folder of a run of train.py, or of `save_pretrained`; or the id of a repository on the Hugging Face Hub,
            such as `user/name`.
        target: the model to explain; `None` builds the one of the config, which may need files of other runs.
        revision: branch, tag or commit of the repository; `None` for the latest.

    Returns:
        The explainer, a module on the CPU in eval mode, whose weights need no gradients. `explainer(images)` explains
        the predicted classes of uint8 images (B, C, H, W) and `explainer(images, classes)` others: (B, P, P).

    Raises:
        InputError: if there is no trained explainer, the model to explain is missing, or it is not the one that the
            explainer was trained for.
    """
    folder = Path(source) if Path(source).is_dir() else _downloaded(str(source), revision)
    record = {CONFIG: _read(folder / CONFIG, "the config of a run of train.py")}
    if (folder / VERSIONS).is_file():
        record[VERSIONS] = (folder / VERSIONS).read_text()
    settings, weights = _settings(record[CONFIG], folder)
    if target is None:
        target = _target(settings["target"], folder)
    del settings["target"]
    explainer = _instantiate(settings | {"_partial_": True})(target=target, weights=str(weights))
    if isinstance(explainer, Pretrained):
        explainer.record = record
    return explainer.eval().requires_grad_(False)


def model_card(
    kind: str,
    what: str,
    identity: Identity,
    config: Mapping[str, Any],
    versions: Mapping[str, Any],
    table: str = "",
    license: str = "apache-2.0",
) -> str:
    """Describe a trained explainer: Markdown with the front matter of the Hugging Face Hub.

    Args:
        kind: class of the explainer.
        what: what it does, in one sentence.
        identity: what its weights belong to.
        config: the resolved config of its run.
        versions: content of the run's `versions.json`; it may be empty.
        table: results in Markdown; empty for none.
        license: licence of the weights, as the Hub names it.

    >>> identity = {"target": {"backbone": "resnet50", "backbone_sha256": "c0ffee"}}
    >>> config = {"explainer": {"grid": {"image_size": 64, "patch_size": 8}}, "data": {"root": "images"}}
    >>> print(model_card("TVE", "Learns.", identity, config, {"command": ["train.py"]}).partition("## Use")[0])
    ---
    library_name: transferable-explainers
    license: apache-2.0
    tags:
    - explainability
    - image-classification
    - tve
    ---
    <BLANKLINE>
    # TVE of resnet50
    <BLANKLINE>
    Learns. It explains `resnet50` with backbone weights of SHA-256 `c0ffee`,
    for 8 × 8 patches of images of 64 × 64 pixels.
    <BLANKLINE>
    <BLANKLINE>
    """
    model, grid = identity["target"], config["explainer"]["grid"]
    tags = ["explainability", "image-classification", kind.lower()]
    matter = ModelCardData(
        base_model=_base_model(config), library_name="transferable-explainers", license=license, tags=tags
    )
    side, size = grid["image_size"] // grid["patch_size"], grid["image_size"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.get("packages", {}).items() if version)
    parts = [
        f"---\n{matter.to_yaml()}\n---",
        f"# {kind} of {model['backbone']}",
        f"{what} It explains `{model['backbone']}` with backbone weights of SHA-256 `{model['backbone_sha256']}`,\n"
        f"for {side} × {side} patches of images of {size} × {size} pixels.",
        "## Use",
        "```python\nimport explainers\n\n"
        'explainer = explainers.load("user/name")  # the id of this repository, or its folder\n'
        "heatmaps = explainer(images)  # uint8 (B, 3, H, W) → (B, P, P): the predicted classes\n```",
        "## Training",
        f"```\n{shlex.join(['python', *versions.get('command', ['train.py'])])}\n```",
        f"```yaml\n{yaml.safe_dump({'data': config.get('data')}, sort_keys=False).strip()}\n```",
        packages,
        f"## Evaluation\n\n{table.strip()}" if table else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _base_model(config: Mapping[str, Any]) -> str | None:
    """The repository of the weights that timm fetched for the target; `None` for others."""
    model = config["explainer"].get("target", {}).get("model", {})
    if not model.get("pretrained"):
        return None
    known = timm.get_pretrained_cfg(model.get("model_name", ""))
    return known.hf_hub_id if known is not None else None


def _read(path: Path, expected: str) -> str:
    if not path.is_file():
        raise InputError(f"expected {expected} at {path}, got no file: give the folder of another run")
    return path.read_text()


def _downloaded(source: str, revision: str | None) -> Path:
    """The local copy of a repository on the Hugging Face Hub."""
    absent = f"expected the folder of a run, or the id of a repository on the Hugging Face Hub, got {source}: "
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise InputError(f"{absent}there is no such folder; train with train.py, or correct the path")
    try:
        files = [CONFIG, VERSIONS, EXPLAINER, MODEL]
        return Path(snapshot_download(source, revision=revision, allow_patterns=files))
    except OSError as error:  # no repository, no network, no permission
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"{absent}there is no such folder, and the Hub says: {reason}") from error


def _settings(text: str, folder: Path) -> tuple[dict[str, Any], Path]:
    """The arguments of the explainer, `target` among them, without those that only training needs; and its weights."""
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:
        config = None
    if not isinstance(config, dict):
        raise InputError(f"{folder / CONFIG}: expected the config of the run, got a damaged file: fetch it again")
    settings = config.get("explainer")
    if not settings:
        trained = (config.get("module") or {}).get("_target_", "something else")
        raise InputError(f"expected the run of an explainer in {folder}, got one of {trained}: give another folder")
    weights = next((folder / name for name in (EXPLAINER, MODEL) if (folder / name).is_file()), None)
    if weights is None:
        raise InputError(
            f"expected a trained explainer in {folder}, got a run without {EXPLAINER}, which has not ended: run its"
            " command again, which goes on from its last checkpoint"
        )
    if weights.name == MODEL:  # of a training, or of a transfer by an explainability vector
        own = {"_target_": "explainers.vectors.SelfExplaining", "alpha": 1}
        return own | {name: settings[name] for name in ("target", "grid")}, weights
    network = settings["network"]
    network |= {name: none for name, none in INITIAL_WEIGHTS.items() if name in network}
    return settings | {name: None for name in TRAINING_ONLY if name in settings} | {"network": network}, weights


def _target(settings: Mapping[str, Any], folder: Path) -> TargetModel:
    """Build the model to explain, unless a file that it is read from is missing."""
    for key, path in leaves(settings):
        is_file = key.rpartition(".")[2] in ("checkpoint_path", "head") and isinstance(path, str) and path
        if is_file and not Path(path).is_file():
            raise InputError(
                f"expected the model that {folder} explains at {path}, got no file: run where it is, or give the model,"
                " as in load(..., target=TargetModel(...))"
            )
    return _instantiate(settings)


def _instantiate(settings: Mapping[str, Any]) -> Any:
    """Build what a resolved config names."""
    from hydra.errors import InstantiationException  # only those who load a config need Hydra
    from hydra.utils import instantiate

    try:
        return instantiate(dict(settings))
    except InstantiationException as error:
        cause: BaseException | None = error
        while isinstance(cause, InstantiationException):
            cause = cause.__cause__
        if isinstance(cause, InputError):
            raise InputError(str(cause)) from error
        raise

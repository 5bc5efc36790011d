"""Trained explainers as folders: loaded from a run or from the Hugging Face Hub, and saved for others to load.

A folder holds the weights with their identity (`explainer.safetensors`), the run's config (`config.yaml`) and versions
(`versions.json`), and in a repository a model card (`README.md`). `save_pretrained` and its kin are our own, because
huggingface_hub's ModelHubMixin would save constructor arguments a second time, as a config.json.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import yaml
from huggingface_hub import HfApi, snapshot_download

from explainers.errors import InputError
from explainers.files import write_atomically
from explainers.model_cards import model_card
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

"""Trained explainers as folders: loaded from a run or from the Hugging Face Hub, and saved for others to load.

A folder holds the weights with their identity (`explainer.safetensors`), the run's config (`config.yaml`) and versions
(`versions.json`), and in a repository a model card (`README.md`). Whoever made a folder is not trusted: none of these
files can run a program, see `building`. `save_pretrained` and its kin are our own, because huggingface_hub's
ModelHubMixin would save constructor arguments a second time, as a config.json.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
import yaml
from huggingface_hub import HfApi

from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.runtime.modes import keep_random_state, ordinary_tensors
from explainers.saved.files import write_atomically
from explainers.saved.weights import read_weights, save_weights
from explainers.share.building import build, check_arguments, check_permitted
from explainers.share.catalogue import available, shipped
from explainers.share.loadable import Loadable, learned_explainer
from explainers.share.model_cards import model_card
from explainers.share.reading import (
    CONFIG,
    HUB,
    VERSIONS,
    check_files,
    downloaded,
    explainer_settings,
    read_record,
    read_text,
)

CARD = "README.md"


class Pretrained(Loadable):
    """Saves an explainer that `load` has built; its methods have the names that other libraries of the Hub use."""

    record: Mapping[str, str] = {}
    """Name → text of the files beside the weights, `config.yaml` and `versions.json`; `load` reads them."""

    identity: Any  # of the explainer
    export: Any

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        target: TargetModel | None = None,
        revision: str | None = None,
        trust_config: bool = False,
    ) -> Self:
        """Load an explainer of this class, see `load`; what is no folder is looked up on the Hugging Face Hub."""
        known = Path(source).is_dir() or str(source).startswith(HUB)
        explainer = load(source if known else f"{HUB}{source}", target, revision, trust_config)
        if not isinstance(explainer, cls):
            raise InputError(
                f"expected {cls.__name__} in {source}, got {type(explainer).__name__}: use explainers.load, which reads"
                " the class from the config"
            )
        return explainer

    def save_pretrained(
        self,
        folder: str | Path,
        evaluation: str | Path | None = None,
        license: str | None = None,
        half: bool = False,
    ) -> Path:
        """Write a folder that `load` reads, with a model card; returns its path.

        Args:
            folder: the folder, which may not exist yet.
            evaluation: folder of a run of eval.py, whose table goes into the model card; `None` for no table.
            license: licence of the weights, as the Hub names it, such as `apache-2.0`; `None` to name none.
            half: write weights of 16 bits, half as large; `load` makes 32 bits of them.

        Raises:
            InputError: for an explainer that was not built by `load`, because its config is not known.
        """
        folder = Path(folder)
        if CONFIG not in self.record:
            raise InputError(
                f"expected an explainer that explainers.load has built, got {type(self).__name__} without the config of"
                " its run: load the run's folder"
            )
        table = "" if evaluation is None else read_text(Path(evaluation) / "table.md", "the table of a run of eval.py")
        config = yaml.safe_load(self.record[CONFIG])
        versions = json.loads(self.record.get(VERSIONS, "{}"))
        self.write(folder, half)
        what = (type(self).__doc__ or "").partition("\n")[0]
        card = model_card(type(self).__name__, what, self.identity(), config, versions, table, license)
        write_atomically(folder / CARD, card)
        return folder

    def write(self, folder: Path, half: bool = False) -> None:
        """Write what `load` reads, without a model card; see `save_pretrained`."""
        self.export(folder)
        if half:
            halve(folder / self.weights_file)
        for name, text in self.record.items():
            write_atomically(folder / name, text)

    def push_to_hub(
        self,
        repository: str,
        private: bool = False,
        evaluation: str | Path | None = None,
        license: str | None = None,
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
    source: str | Path, target: TargetModel | None = None, revision: str | None = None, trust_config: bool = False
) -> Any:
    """Load a trained explainer: one that learned to explain a target, or a model that explains itself.

    Args:
        source: name of a model of timm for which an explainer is shipped, see `explainers.available`; folder of a run
            of train.py, or of `save_pretrained`; or `hf://user/name`, a repository on the Hugging Face Hub.
        target: the model to explain; `None` builds the one of the config, which may need files of other runs.
        revision: branch, tag or commit of the repository; `None` for the latest.
        trust_config: build whatever the config names, such as a network of your own, and read weights of any format.
            Such a config is a program; by default it is data, see `building`.

    Returns:
        The explainer, a module on the CPU in eval mode, whose weights need no gradients. `explainer(images)` explains
        the predicted classes of uint8 images (B, C, H, W) and `explainer(images, classes)` others: (B, P, P).

    Raises:
        InputError: if there is no trained explainer, the model to explain is missing, it is not the one that the
            explainer was trained for, or the config names something that it may not.
    """
    on_hub = isinstance(source, str) and source.startswith(HUB)
    known = shipped(source) if isinstance(source, str) and not on_hub else None
    folder = downloaded(str(source), revision) if on_hub else Path(source) if known is None else known.folder
    if revision is not None and not on_hub:
        raise InputError(f"expected hf://user/name for revision={revision}, got {source}: folders have no revisions")
    if not folder.is_dir():
        raise InputError(
            f"expected the folder of a run, or hf://user/name of the Hugging Face Hub, got {source}: there is no such"
            f" folder{_names_shipped()}; train with train.py, or correct the path"
        )
    record = read_record(folder)
    settings = explainer_settings(record[CONFIG], folder)
    model = settings.pop("target")
    if target is None and not trust_config:
        check_permitted(model, "target", "explainer.target")
    kind: Any = learned_explainer(settings.pop("_target_", None), trust_config)
    weights = folder / kind.weights_file
    if not weights.is_file():
        raise InputError(
            f"expected a trained explainer in {folder}, got a run without {weights.name}, which has not ended: run its"
            " command again, which goes on from its last checkpoint"
        )
    settings = kind.settings_to_load(settings)
    if not trust_config:
        check_arguments(settings, kind.networks)
    if target is None:
        check_files(model, folder)
    try:
        target = build(model) if target is None else target.frozen()
        explainer = kind(target=target, weights=str(weights), **build(settings))
    except InputError:
        raise
    except Exception as error:  # whatever timm and torch say of sizes that do not fit, and of arguments without effect
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"expected in {folder / CONFIG} settings that build an explainer, got {type(error).__name__}: {reason}"
        ) from error
    if isinstance(explainer, Pretrained):
        explainer.record = record
    return explainer.eval().requires_grad_(False)


def _names_shipped() -> str:
    """The models for which `load` finds an explainer without a folder, for a message."""
    names = list(dict.fromkeys(each.name for each in available()))
    return f", and explainers are shipped for {', '.join(names)} alone" if names else ""

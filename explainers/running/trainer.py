"""Lightning's trainer of a run: its device, precision and callbacks, and the checkpoint that it resumes from."""

import functools
import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from explainers.errors import InputError
from explainers.saved.files import atomic, is_shared


def build_all(group: DictConfig | None) -> list[Any]:
    """Instantiate every object of a config group, such as `callbacks`; entries that are null are skipped.

    >>> build_all(OmegaConf.create({"first": {"_target_": "builtins.dict", "size": 3}, "second": None}))
    [{'size': 3}]
    """
    return [instantiate(node) for node in (group or {}).values() if node is not None]


def build_trainer(settings: DictConfig, **parts: Any) -> Trainer:
    """Build the trainer of the settings with callbacks, loggers and plugins that leaves signals to `signals.py`."""
    trainer = instantiate(settings, accelerator=choose_accelerator(settings.accelerator), **parts)
    ignore_lightnings_signals(trainer)
    return trainer


def ignore_lightnings_signals(trainer: Trainer) -> None:
    """Keep Lightning from handling signals.

    Its handler of SIGTERM starts a broadcast at any moment of a step, so that processes may wait for each other for
    ever; its handler of SIGUSR1 writes a checkpoint in the middle of a step.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]


@functools.cache  # the line is printed once
def choose_accelerator(wanted: str) -> str:
    """Lightning's accelerator for `trainer.accelerator`: the CPU instead of Apple's GPU (MPS), which has no float64."""
    if wanted == "mps" or wanted == "gpu" and torch.backends.mps.is_available():
        raise InputError(
            f"expected trainer.accelerator=cpu on this machine, got {wanted}: Apple's GPUs (MPS) have no float64, in"
            " which metrics are summed"
        )
    if wanted != "auto" or not torch.backends.mps.is_available():
        return wanted
    rank_zero_only(print)("computing on the CPU, because Apple's GPU (MPS) has no float64, in which metrics are summed")
    return "cpu"


def fastest_precision(accelerator: str) -> str:
    """Lightning's name of the precision: bf16 autocast if the hardware computes it, else float32.

    Emulated bf16 is ten times slower than float32.
    """
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    cpu = accelerator in ("auto", "cpu") and hasattr(torch.cpu, "get_capabilities")
    features = torch.cpu.get_capabilities() if cpu else {}
    return "bf16-mixed" if features.get("amx_bf16") or features.get("avx512_bf16") else "32-true"


OmegaConf.register_new_resolver("fastest_precision", fastest_precision, replace=True)


def find_checkpoint(ckpt_path: str | None, last: Path) -> Path | None:
    """The checkpoint to resume from.

    Args:
        ckpt_path: path of a checkpoint, or `last` for the run's last one; `None` for the last one if it exists.
        last: path of the run's last checkpoint.
    """
    if ckpt_path is None:
        return last if last.exists() else None
    path = last if ckpt_path == "last" else Path(ckpt_path)
    if not path.is_file():
        raise InputError(f"no checkpoint at {path}: leave ckpt_path out to start a new run, or correct the path")
    return path


def read_progress(checkpoint: Path | None) -> tuple[int, dict[str, float]]:
    """Number of training steps before a checkpoint, and its metrics; 0 and none without a checkpoint."""
    if checkpoint is None:
        return 0, {}
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        return int(saved["global_step"]), dict(saved.get("metrics", {}))
    except (RuntimeError, EOFError, LookupError, TypeError, pickle.UnpicklingError) as error:
        raise InputError(
            f"{checkpoint}: expected a checkpoint of a run, got a damaged file, or another kind of file: resume from"
            " another checkpoint (ckpt_path=...), or delete it to start the run again"
        ) from error


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes each checkpoint wholly or not at all, even if the process is killed.

    Lightning writes it to the folder of temporary files, which is often on another disk, and copies it.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        content = io.BytesIO()
        torch.save(checkpoint, content)  # to a file, torch would report a full disk as a position in the file
        with atomic(path, alone=True) as unfinished:
            unfinished.write_bytes(content.getbuffer())


class LabelsAsLogits(Callback):
    """Replaces the labels in test batches by logits, for the module and for later callbacks.

    Args:
        logit_of: the logit of each label, see `match_classes`. A label of -1, for an unlabelled image, stays.
    """

    def __init__(self, logit_of: Sequence[int]) -> None:
        self.logit_of = list(logit_of)

    def on_test_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        if self.logit_of != list(range(len(self.logit_of))):
            batch["label"] = torch.tensor([*self.logit_of, -1]).to(batch["label"])[batch["label"]]


class CheckSharedFolder(Callback):
    """Raises an InputError unless the processes of several machines share one folder and resume from one checkpoint.

    Args:
        folder: the run's folder.
        step: number of steps before the checkpoint that this process resumes from; 0 for none.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        self.folder = folder
        self.step = step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.num_nodes == 1:
            return
        strategy: Any = trainer.strategy
        same = strategy.reduce_boolean_decision(strategy.broadcast(self.step) == self.step)
        if not is_shared(self.folder, strategy) or not same:
            raise InputError(
                f"expected a folder that all machines share, got {self.folder}, where one machine does not see the"
                " files of another: start the command in a folder of a shared file system, or set hydra.run.dir to one"
            )

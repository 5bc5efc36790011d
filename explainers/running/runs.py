"""Functions that `train.py` and `eval.py` share: run folders, records, and the processes of a command."""

import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning import Trainer, seed_everything
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from explainers.errors import InputError, check_range
from explainers.running.commands import arguments
from explainers.running.messages import DENIED, OF_THE_DISK
from explainers.running.precision import check_precision, fastest_precision
from explainers.running.processes import (
    LOCKED,
    accelerator_of,
    ignore_lightnings_signals,
    number_of_processes,
    started_by_launcher,
    torchrun,
)
from explainers.running.resuming import (
    check_model_files,
    divided_as,
    images_per_step,
    model_files,
    read_json,
    replaced_file,
)
from explainers.saved.files import file_name, write_atomically
from explainers.saved.records import devices, first_difference, versions

with_place = warnings.formatwarning
"""Python's own text of a warning."""

OmegaConf.register_new_resolver("file_name", file_name, replace=True)
OmegaConf.register_new_resolver("fastest_precision", fastest_precision, replace=True)


def run_dir() -> Path:
    """Output folder of this run, or of this job of a sweep."""
    return Path(HydraConfig.get().runtime.output_dir)


def relative(path: Path) -> Path:
    """The path relative to the working directory if it lies inside it, otherwise unchanged.

    >>> relative(Path.cwd() / "runs" / "tve").as_posix()
    'runs/tve'
    """
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def build_all(group: DictConfig | None) -> list[Any]:
    """Instantiate every object of a config group, such as `callbacks`; entries that are null are skipped.

    >>> build_all(OmegaConf.create({"first": {"_target_": "builtins.dict", "size": 3}, "second": None}))
    [{'size': 3}]
    """
    return [instantiate(node) for node in (group or {}).values() if node is not None]


def build_trainer(settings: DictConfig, **parts: Any) -> Trainer:
    """Build the trainer of the settings with callbacks, loggers and plugins; signals are answered by ourselves."""
    trainer = instantiate(settings, accelerator=accelerator_of(settings.accelerator), **parts)
    ignore_lightnings_signals(trainer)
    return trainer


def quiet_libraries() -> None:
    """Silence notices of libraries that tell a user nothing about the run; warnings about the run stay, as one line.

    What every process of a command would say alike, of files that are no images, the first one says alone.
    """
    for name in ("lightning.pytorch", "lightning.fabric", "timm"):
        logging.getLogger(name).setLevel(logging.WARNING)
    notices = "not have many workers|in eval mode at the start|LeafSpec|than the logging interval|by the model summary"
    others = r"torch\.distributed\.\S+ is deprecated, use torch|Checkpoint directory .* exists and is not empty"
    alike = "left out: .* that Pillow does not read|the classes of .* are unknown"
    said = (
        LOCKED in os.environ or getattr(rank_zero_only, "rank", 0) > 0
    )  # by the process that started this one, or rank 0
    warnings.filterwarnings("ignore", f".*({notices}|{others}{f'|{alike}' if said else ''})")
    warnings.formatwarning = in_one_line


def in_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning as a user reads it; the place in the code belongs to warnings for programmers.

    >>> in_one_line("left out: a.jpg", UserWarning, "listing.py", 46)
    'warning: left out: a.jpg\\n'
    """
    if not issubclass(category, UserWarning):
        return with_place(message, category, filename, lineno, line)
    return f"warning: {' '.join(str(message).split())}\n"


@rank_zero_only
def summarise(cfg: DictConfig, metrics: Mapping[str, float], seconds: float, note: str = "") -> None:
    """Print what a run did, how good it is, how long it took and where it is, in one line.

    Args:
        cfg: the config of the run.
        metrics: name → value.
        seconds: duration.
        note: what else the user should know of the numbers.
    """
    shown = {name: metrics[name] for name in (cfg.objective, "val/accuracy") if name in metrics}
    values = ", ".join(f"{name} {value:.3g}" for name, value in shown.items())
    said = "; ".join(part for part in (values, note, f"{seconds:.0f} s, {relative(run_dir())}") if part)
    print(f"{cfg.title or cfg.name}: {said}")


class WritableFolder(Callback):
    """Hydra's callback that says in one line that the run's folder cannot be written to, before Hydra logs there."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.run.dir).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            sys.exit(f"error: cannot write to {folder}: {error.strerror}: {OF_THE_DISK.get(error.errno or 0, DENIED)}")


def seed_all(seed: int) -> None:
    """Seed all random numbers of this process and of its data workers."""
    check_range(0, 2**32 - 1, seed=seed)
    seed_everything(seed, workers=True, verbose=False)


def check_number_of_images(trainer: DictConfig, data: Any, split: str) -> None:
    """Raise an InputError for fewer images of a split of `data` than processes, of which each measures one or more."""
    processes = number_of_processes(trainer) * trainer.get("num_nodes", 1)
    if processes > 1 and data.size(split) < processes:
        raise InputError(
            f"expected one {split} image or more for each of {processes} processes, got {data.size(split)}: take fewer"
            " processes (trainer.devices=...), or more images"
        )


def launch(trainer: DictConfig) -> bool:
    """Run this command again under torchrun, with one process per device of this machine, and wait for it.

    Lightning could start the other processes itself. But in a sweep (`-m`) each of them would run the whole sweep
    again, and a failing process would leave the others waiting.

    Args:
        trainer: settings of the trainer.

    Returns:
        True if torchrun ran the command and finished. False if this process shall run it: because one process is
        enough, or because torchrun, SLURM or a parent call of this function has started this process.
    """
    check_precision(trainer.precision)
    processes = number_of_processes(trainer)
    if started_by_launcher(trainer) or processes == 1:
        return False
    config = HydraConfig.get()
    code = torchrun(processes, [sys.argv[0], *arguments(config, run_dir())])
    if code and config.mode == RunMode.MULTIRUN:  # the other jobs of the sweep go on
        raise RuntimeError(f"a process of the run in {run_dir()} failed; its error stands above")
    if code:
        sys.exit(code)
    return True


@rank_zero_only
def start_record(cfg: DictConfig, folder: Path, go_on: bool) -> None:
    """Write config, versions, command and hashes of weight files into the folder of a run that starts or continues.

    Args:
        cfg: the config of the run.
        folder: the run's folder.
        go_on: continue the run of this folder even if its config or its files were different.

    Raises:
        InputError: if a file of weights is damaged, or the folder holds a run of another config or of other such files.
    """
    resolved: Any = OmegaConf.to_container(cfg, resolve=True)
    check_model_files(resolved)
    files, images = model_files(resolved, folder), images_per_step(resolved, number_of_processes(cfg.trainer))
    if (folder / "config.yaml").exists() and (folder / "checkpoints").exists() and not go_on:
        earlier = _read_config(folder / "config.yaml")
        same = resolved | {key: earlier.get(key) for key in ("data_dir", "ckpt_path", "fit", "test")}
        recorded = read_json(folder / "versions.json")
        if images is not None and recorded.get("images_per_step") == images:
            same = divided_as(earlier, same)
        difference = first_difference(earlier, same) or replaced_file(recorded.get("files", {}), files)
        if difference:
            raise InputError(
                f"{folder} holds a run of another config: {difference}. Give this one a name of its own (name=...), "
                "delete the folder, or go on from its checkpoint all the same (ckpt_path=last)"
            )
    write_atomically(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(resolved)))
    record = {"command": sys.argv, "python": sys.version.split()[0], "packages": versions(), "devices": devices()}
    write_atomically(
        folder / "versions.json", json.dumps(record | {"images_per_step": images, "files": files}, indent=2)
    )


def _read_config(path: Path) -> dict[str, Any]:
    """Read the config that a run has written to its folder."""
    try:
        text = path.read_text()
        config: Any = OmegaConf.to_container(OmegaConf.create(text)) if text.endswith("\n") else None  # cut off
    except (YAMLError, OmegaConfBaseException, ValueError):
        config = None
    if not config or not isinstance(config, dict):
        raise InputError(
            f"{path}: expected the config of the run, got a damaged file: delete it to go on with any config"
        )
    return config

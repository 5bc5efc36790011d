"""Functions that `train.py` and `eval.py` share: run folders, records, processes, and one-line errors."""

import hashlib
import json
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from explainers.errors import InputError
from explainers.files import write_atomically
from explainers.records import devices, first_difference, versions


def folder_name(text: str) -> str:
    """A folder name from `text`: without slashes, at most 200 characters; a hash keeps shortened names distinct.

    >>> folder_name("data=folder,data.root=/my/images")
    'data=folder,data.root=_my_images'
    >>> len(folder_name("x" * 1000))
    199
    """
    name = text.replace("/", "_")
    return name if len(name) <= 200 else f"{name[:190]}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def fastest_precision(accelerator: str) -> str:
    """Lightning's precision: bf16 autocast if the hardware computes it, else float32.

    Emulated bf16 is ten times slower than float32.

    Args:
        accelerator: Lightning's name of the device, such as auto, cpu or gpu.
    """
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    cpu = accelerator in ("auto", "cpu") and hasattr(torch.cpu, "get_capabilities")
    features = torch.cpu.get_capabilities() if cpu else {}
    return "bf16-mixed" if features.get("amx_bf16") or features.get("avx512_bf16") else "32-true"


OmegaConf.register_new_resolver("folder_name", folder_name, replace=True)
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


def quiet_libraries() -> None:
    """Silence notices of libraries that tell a user nothing about the run; their warnings about the run stay."""
    for name in ("lightning.pytorch", "lightning.fabric", "timm"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for notice in (".*does not have many workers.*", ".*in eval mode at the start.*", ".*LeafSpec.*"):
        warnings.filterwarnings("ignore", notice)


@rank_zero_only
def summarise(cfg: DictConfig, metrics: Mapping[str, float], seconds: float) -> None:
    """Print what a run did, how good it is, how long it took and where it is, in one line."""
    shown = {name: metrics[name] for name in (cfg.objective, "val/accuracy") if name in metrics}
    values = ", ".join(f"{name} {value:.3g}" for name, value in shown.items())
    print(f"{cfg.title or cfg.name}: {values}; {seconds:.0f} s, {relative(run_dir())}")


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Exit with a one-line message if the user can correct the error; HYDRA_FULL_ERROR=1 shows its traceback.

    Such errors are `InputError`s and config keys that are misspelt or missing. All other errors keep their traceback,
    and so does every error of a sweep's job.
    """
    try:
        yield
    except (InputError, InstantiationException, MissingMandatoryValue) as error:
        message = _message(error)
        if message is None or os.environ.get("HYDRA_FULL_ERROR") == "1" or HydraConfig.get().mode == RunMode.MULTIRUN:
            raise
        sys.exit(f"error: {' '.join(message.split())}")


def _message(error: BaseException) -> str | None:
    """Message for an error that the user can correct; None for a bug."""
    cause = error
    while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, InputError):
        return str(cause).rpartition(f"{type(cause).__name__}: ")[2]  # a loader process prepends its traceback
    misspelt = isinstance(cause, TypeError) and re.search("unexpected keyword argument|missing .* required", str(cause))
    return str(error) if misspelt or isinstance(cause, MissingMandatoryValue) else None


def number_of_processes(trainer: DictConfig) -> int:
    """Number of processes that a trainer with these settings needs on this machine.

    >>> number_of_processes(OmegaConf.create({"devices": [0, 2]}))
    2
    >>> number_of_processes(OmegaConf.create({"accelerator": "cpu", "devices": "auto"}))
    1
    """
    devices = trainer.get("devices", 1)
    if devices in ("auto", -1, "-1"):
        return max(1, torch.cuda.device_count()) if trainer.get("accelerator", "auto") in ("auto", "gpu", "cuda") else 1
    return len(devices) if OmegaConf.is_list(devices) else int(devices)


def launch(processes: int) -> bool:
    """Run this command again under torchrun, with one process per device, and wait for it.

    Lightning could start the other processes itself. But in a sweep (`-m`) each of them would run the whole sweep
    again, and a failing process would leave the others waiting.

    Returns:
        True if torchrun ran the command and finished. False if this process shall run it: because one process is
        enough, or because torchrun, SLURM or a parent call of this function has started this process.
    """
    if processes == 1 or "LOCAL_RANK" in os.environ or "SLURM_PROCID" in os.environ:
        return False
    config = HydraConfig.get()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
        sys.argv[0],
    ]
    torchrun = subprocess.Popen([*command, *config.overrides.task, f"hydra.run.dir='{run_dir()}'"])
    # Otherwise torchrun's processes would outlive this one
    earlier = signal.signal(signal.SIGTERM, lambda *_: torchrun.terminate())
    try:
        code = torchrun.wait()
    finally:
        signal.signal(signal.SIGTERM, earlier)
    if code and config.mode == RunMode.MULTIRUN:  # the other jobs of the sweep go on
        raise RuntimeError(f"a process of the run in {run_dir()} failed; its error stands above")
    if code:
        sys.exit(code)
    return True


@rank_zero_only
def start_record(cfg: DictConfig, folder: Path, go_on: bool) -> None:
    """Write config, versions and command into the folder of a new run, or of a run that continues.

    Args:
        cfg: the config of the run.
        folder: the run's folder.
        go_on: continue the run of this folder even if its config was different.

    Raises:
        InputError: if the folder holds a run of another config; the message names the first key that differs.
    """
    resolved: Any = OmegaConf.to_container(cfg, resolve=True)
    saved = folder / "config.yaml"
    if saved.exists() and (folder / "checkpoints").exists() and not go_on:
        earlier: Any = OmegaConf.to_container(OmegaConf.load(saved))
        difference = first_difference(earlier, resolved | {key: earlier.get(key) for key in ("data_dir", "ckpt_path")})
        if difference:
            raise InputError(
                f"{folder} holds a run of another config: {difference}. Give this one a name of its own (name=...), "
                "delete the folder, or go on from its checkpoint all the same (ckpt_path=last)"
            )
    write_atomically(saved, OmegaConf.to_yaml(OmegaConf.create(resolved)))
    record = {"command": sys.argv, "python": sys.version.split()[0], "packages": versions(), "devices": devices()}
    write_atomically(folder / "versions.json", json.dumps(record, indent=2))


def wandb_logger(project: str, name: str, folder: str, group: str | None = None, offline: bool | None = None) -> Logger:
    """A Weights & Biases logger; a resumed run keeps its W&B id.

    Args:
        project: W&B project.
        name: name of the W&B run.
        folder: the run's folder, where its id is stored.
        group: W&B group of the run.
        offline: `None` logs offline if WANDB_MODE is not set and no W&B key is configured.
    """
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    if offline is None:
        offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False)
    wandb.finish()  # otherwise this run would continue the run of an earlier job of the same sweep
    identifier = Path(folder) / "wandb_id"
    if not identifier.exists():
        write_atomically(identifier, secrets.token_hex(4))
    by_agent = "WANDB_SWEEP_ID" in os.environ  # set by `wandb agent`, which chooses the id of the run
    run_id = identifier.read_text() if identifier.exists() and not by_agent else None
    mode: Any = "offline" if offline else None  # Lightning's `offline` would set WANDB_MODE for later runs, too
    return WandbLogger(name=name, save_dir=folder, mode=mode, project=project, group=group, id=run_id, resume="allow")

"""What `train.py` and `eval.py` share: the folder of a run, its record, its processes, and errors in one line."""

import hashlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
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
from explainers.records import devices, first_difference, versions, write_atomically


def folder_name(text: str) -> str:
    """`text` as the name of one folder: without slashes, and at most 200 characters."""
    name = text.replace("/", "_")
    return name if len(name) <= 200 else f"{name[:190]}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def fastest_precision(accelerator: str) -> str:
    """bf16 autocast where the hardware computes it, and float32 elsewhere: emulated bf16 is ten times slower.

    Args:
        accelerator: Lightning's name of the device to compute on.
    """
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    cpu = accelerator in ("auto", "cpu") and hasattr(torch.cpu, "get_capabilities")
    features = torch.cpu.get_capabilities() if cpu else {}
    return "bf16-mixed" if features.get("amx_bf16") or features.get("avx512_bf16") else "32-true"


OmegaConf.register_new_resolver("folder_name", folder_name, replace=True)
OmegaConf.register_new_resolver("fastest_precision", fastest_precision, replace=True)


def run_dir() -> Path:
    """The folder of this run, or of this job of a sweep."""
    return Path(HydraConfig.get().runtime.output_dir)


def relative(path: Path) -> Path:
    """The path as the user would type it: from the working directory, where it is below that."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def build_all(group: DictConfig | None) -> list[Any]:
    """Every object that a group names, such as the callbacks."""
    return [instantiate(node) for node in (group or {}).values() if node is not None]


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End with one line at an error that the user can mend; HYDRA_FULL_ERROR=1 shows where it came from.

    These are `InputError`s, and keys of the config that are misspelt or missing. Everything else keeps its traceback.
    """
    try:
        yield
    except (InputError, InstantiationException, MissingMandatoryValue) as error:
        message = _message(error)
        if message is None or os.environ.get("HYDRA_FULL_ERROR") == "1" or HydraConfig.get().mode == RunMode.MULTIRUN:
            raise
        sys.exit(f"error: {' '.join(message.split())}")


def _message(error: BaseException) -> str | None:
    """What to tell the user; None for a bug."""
    cause = error
    while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, InputError):
        return str(cause).rpartition(f"{type(cause).__name__}: ")[2]  # a loader's process puts its traceback before
    misspelt = isinstance(cause, TypeError) and re.search("unexpected keyword argument|missing .* required", str(cause))
    return str(error) if misspelt or isinstance(cause, MissingMandatoryValue) else None


def number_of_processes(trainer: DictConfig) -> int:
    """How many processes a trainer of these settings needs on this machine."""
    devices = trainer.get("devices", 1)
    if devices in ("auto", -1, "-1"):
        return max(1, torch.cuda.device_count()) if trainer.get("accelerator", "auto") in ("auto", "gpu", "cuda") else 1
    return len(devices) if OmegaConf.is_list(devices) else int(devices)


def launch(processes: int) -> bool:
    """Run this command again under torchrun, one process for each device; True when that was done, and is done.

    Lightning would start the other processes itself, but under `-m` each of them would run the whole sweep again, and a
    failing one would leave the others waiting. torchrun, SLURM, or a parent call of this function may have started this
    process already.
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
    earlier = signal.signal(signal.SIGTERM, lambda *_: torchrun.terminate())  # or its processes would outlive this one
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
    """Write config, versions and command into the folder of the run: a new one, or one that trained the same config.

    Args:
        go_on: continue the run in the folder though its config was another one.

    Raises:
        InputError: if the folder holds a run of another config; it names the first key that differs.
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
    """Weights & Biases, offline where no key is configured and WANDB_MODE says nothing; a resumed run keeps its id."""
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    if offline is None:
        offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False)
    wandb.finish()  # of an earlier job of the same sweep, which this one would go on with
    identifier = Path(folder) / "wandb_id"
    if not identifier.exists():
        write_atomically(identifier, secrets.token_hex(4))
    of_agent = "WANDB_SWEEP_ID" in os.environ  # W&B's own, of `wandb agent`, names the run
    run_id = identifier.read_text() if identifier.exists() and not of_agent else None
    mode: Any = "offline" if offline else None  # `offline` of Lightning would set WANDB_MODE, for the later runs too
    return WandbLogger(name=name, save_dir=folder, mode=mode, project=project, group=group, id=run_id, resume="allow")

"""The processes of a command: how many a trainer needs, and how they are started."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from explainers.errors import InputError
from explainers.running.folder import quote, run_dir
from explainers.running.signals import end_with_parent, forward_signals

TORCHRUN = """
import sys
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main
try:
    main()
except SignalException as ended:
    sys.exit(128 + ended.sigval)
"""
"""torchrun, without its traceback when a signal ends it."""

LAUNCHER_OVERRIDES = ("hydra.mode", "hydra.sweep", "hydra/sweep", "hydra.launcher", "hydra/launcher", "hydra.run.")
"""Beginnings of the overrides of Hydra's own config that a process of one run does not need."""


def count_processes(trainer: Mapping[str, Any]) -> int:
    """Number of processes that a trainer with these settings needs on each machine.

    >>> count_processes({"devices": [0, 2]}), count_processes({"accelerator": "cpu", "devices": "auto"})
    (2, 1)
    """
    devices = trainer.get("devices", 1)
    if devices in ("auto", -1, "-1"):
        import torch

        return max(1, torch.cuda.device_count()) if trainer.get("accelerator", "auto") in ("auto", "gpu", "cuda") else 1
    if isinstance(devices, int | str) and not (str(devices).isdigit() and int(devices) > 0):
        raise InputError(f"expected trainer.devices above 0, a list of devices, -1 or auto, got {devices}")
    return int(devices) if isinstance(devices, int | str) else len(devices)


def count_all_processes(trainer: Mapping[str, Any]) -> int:
    """Number of processes that a trainer with these settings needs on all machines.

    >>> count_all_processes({"devices": 4, "num_nodes": 2})
    8
    """
    return count_processes(trainer) * trainer.get("num_nodes", 1)


def check_image_count(trainer: DictConfig, data: Any, split: str) -> None:
    """Raise an InputError if a split of `data` has fewer images than there are processes to measure them."""
    processes = count_all_processes(trainer)
    if processes > 1 and data.size(split) < processes:
        raise InputError(
            f"expected one {split} image or more for each of {processes} processes, got {data.size(split)}: use fewer"
            " processes (trainer.devices=...), or more images"
        )


def launch(trainer: DictConfig) -> bool:
    """Run this command again under torchrun, with one process per device of this machine, and wait for it.

    Lightning could start the other processes itself. But in a sweep (`-m`) each of them would run the whole sweep
    again, and a failing process would leave the others waiting.

    Returns:
        False if this process has to run the command: because one process is enough, or because torchrun, SLURM or a
        parent call of this function has started this process.
    """
    processes = count_processes(trainer)
    if is_launched(trainer) or processes == 1:
        return False
    print(f"starting {processes} processes (trainer.devices=1 starts none)", flush=True)
    config = HydraConfig.get()
    code = torchrun(processes, [sys.argv[0], *list_arguments(config, run_dir())])
    if code and config.mode == RunMode.MULTIRUN:  # the sweep continues with its other jobs
        raise build_job_error()
    if code:
        sys.exit(code)
    return True


def build_job_error() -> CompactHydraException:
    """What a job of a sweep raises after its error was printed; Hydra shows its text, without a traceback."""
    return CompactHydraException(f"the job in {run_dir()} failed; its error is printed above")


def is_launched(trainer: Mapping[str, Any]) -> bool:
    """Whether torchrun, SLURM or a parent process has started this process as one of several.

    Raises:
        InputError: if their number differs from the trainer's, or if a trainer of several machines was not started so.
    """
    from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

    machines = trainer.get("num_nodes", 1)
    slurm = SLURMEnvironment.detect() and os.environ["SLURM_NTASKS"] != "1"  # a single task may start processes itself
    if TorchElasticEnvironment.detect() or slurm:
        environment = TorchElasticEnvironment() if TorchElasticEnvironment.detect() else SLURMEnvironment()
        try:
            environment.validate_settings(count_processes(trainer), machines)
        except ValueError as error:
            raise InputError(str(error)) from error
        return True
    if machines > 1:
        raise InputError(
            f"expected torchrun or srun to start processes on {machines} machines (trainer.num_nodes), got neither:"
            " start this command with one of them, see docs/training.md"
        )
    return "LOCAL_RANK" in os.environ


def torchrun(processes: int, program: Sequence[str]) -> int:
    """Run a Python program, given with its arguments, in several processes of this machine; returns the exit code."""
    command = [sys.executable, "-c", TORCHRUN, "--standalone", f"--nproc_per_node={processes}"]
    # A process group of its own: Ctrl-C reaches this process alone, which then ends the others
    started = subprocess.Popen([*command, *program], preexec_fn=end_with_parent, process_group=0)
    with forward_signals(started):
        return started.wait()


def list_arguments(config: Any, folder: Path) -> list[str]:
    """Command-line arguments with which another process composes the config of this run, or of this job of a sweep.

    They repeat the user's flags and overrides, except the overrides of the sweep and the folder.

    Args:
        config: Hydra's own config of this run.
        folder: the run's folder.
    """
    flags = {"main": "--config-path", "command-line": "--config-dir"}
    places = [
        f"{flags[source.provider]}={'' if source.schema == 'file' else source.schema + '://'}{source.path}"
        for source in config.runtime.config_sources
        if source.provider in flags
    ]
    own = [text for text in config.overrides.hydra if not text.lstrip("+~").startswith(LAUNCHER_OVERRIDES)]
    if config.mode.name == "MULTIRUN":  # a config may interpolate these two
        own += [f"hydra.job.num={config.job.num}", f"hydra.sweep.subdir={quote(config.sweep.subdir)}"]
    own += ["hydra.mode=RUN", f"hydra.run.dir={quote(folder)}"]
    given: Any = OmegaConf.to_container(config.overrides.task)  # interpolations in them stay
    return [f"--config-name={config.job.config_name}", *places, *given, *own]

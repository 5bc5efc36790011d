"""The folder of a run: its name, where it is, and that only one command at a time writes to it."""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from explainers.errors import InputError
from explainers.running.signals import LOCKED, is_first_process
from explainers.saved.files import file_name, write_atomically


def folder_name(path: str | None) -> str:
    """A name for a run, from the name of the folder of its images; `images` if they have no common folder.

    >>> folder_name("my/flowers/"), folder_name(None)
    ('flowers', 'images')
    """
    return file_name(Path(path).resolve().name) if path else "images"


def data_name(choice: str, *, _root_: DictConfig) -> str:
    """A name for the chosen file of configs/data; where this reads any data set, that of the data set or its folder."""
    if choice in ("folder", "unlabelled"):
        return folder_name(_root_.data.root)
    return str(_root_.data.name) if choice == "torchvision" else choice


def run_name(name: str) -> str:
    """The name of a run for W&B: that of the config; of a job of a sweep, with what tells it from the other jobs."""
    hydra = HydraConfig.get()
    if OmegaConf.is_missing(hydra.job, "num"):
        return name
    return hydra.sweep.subdir if hydra.sweep.subdir.startswith(name) else f"{name}/{hydra.sweep.subdir}"


for resolver in (file_name, folder_name, data_name, run_name):
    OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)


class Folders(Callback):
    """Hydra's callback that names the folders of a sweep."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        HydraConfig.instance().set_config(config)  # Hydra itself does so later; names of runs interpolate it

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        name_jobs(config)
        HydraConfig.instance().set_config(config)


def name_jobs(config: DictConfig) -> None:
    """Add to the folder of each job of a sweep the overrides that differ between jobs and that it does not name yet.

    Hydra composes each job from the overrides of `config`, that of the whole sweep, on any launcher. Two of its own
    settings are added to them: the folder of a job, and which overrides `hydra.job.override_dirname` leaves out.
    """
    settings: Any = OmegaConf.to_container(config)  # interpolations stay
    hydra = settings["hydra"]
    params = [f"{key}={value}" for key, value in (hydra["sweeper"].get("params") or {}).items()]
    overrides = OverridesParser.create().parse_overrides([*hydra["overrides"]["task"], *params])
    swept = {override.key_or_group for override in overrides if override.is_sweep_override()}
    subdir = hydra["sweep"]["subdir"]
    added = swept - find_interpolated(f"{hydra['sweep']['dir']}/{subdir}", settings)
    if not added:
        return
    subdir = quote(f"{subdir},${{file_name:${{hydra:job.override_dirname}},120}}")
    fixed = ",".join(f"'{key}'" for key in sorted({override.key_or_group for override in overrides} - added))
    config.hydra.overrides.hydra.extend(
        [f"hydra.sweep.subdir={subdir}", f"hydra.job.config.override_dirname.exclude_keys=[{fixed}]"]
    )


def find_interpolated(text: str, settings: Any) -> set[str]:
    """The keys and groups that a text of a config interpolates, also through other keys of `settings`, nested dicts.

    A key of which only the name of a folder is used does not count: two folders may have the same name.

    >>> text = "${name}/${folder_name:${data.root}}/${data.domain}"
    >>> sorted(find_interpolated(text, {"name": "tve_${hydra:runtime.choices.target}"}))
    ['data.domain', 'name', 'target']
    """
    keys = set()
    text = re.sub(r"\$\{folder_name:\$\{[^}]*\}\}", "", text)
    for choices, key in re.findall(r"\$\{(hydra:runtime\.choices\.)?([\w.]+)\}", text):
        value = None if choices else settings
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        keys |= {key} | (find_interpolated(value, settings) if isinstance(value, str) else set())
    return keys


def quote(value: str | Path) -> str:
    """A text as Hydra reads it in an override.

    >>> print(quote("it's here"))
    'it\\'s here'
    """
    return "'" + str(value).replace("'", r"\'") + "'"


def run_dir() -> Path:
    """Output folder of this run, or of this job of a sweep."""
    return Path(HydraConfig.get().runtime.output_dir)


def shorten_path(path: Path) -> Path:
    """The path relative to the working directory if it lies inside it, otherwise unchanged.

    >>> shorten_path(Path.cwd() / "runs" / "tve").as_posix()
    'runs/tve'
    """
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a run's folder, so that no other command writes to it at the same time.

    The lock ends with this process, even if it is killed. Processes that this one starts work under the same lock; of
    those that torchrun or SLURM start, the first one takes it.

    Raises:
        InputError: if another command has locked the folder; the message names its process and machine.
    """
    if not is_first_process() or os.environ.get(LOCKED) == str(folder):
        yield
        return
    lock, holder = FileLock(folder / ".lock", blocking=False), folder / ".locked_by"
    try:
        lock.acquire()
    except Timeout:
        who = holder.read_text(encoding="utf-8") if holder.exists() else "another process"
        raise InputError(
            f"{folder} is in use by {who}: wait until that command ends, or give this run its own name (name=...)"
        ) from None
    try:
        write_atomically(holder, f"process {os.getpid()} on {socket.gethostname()}")
        os.environ[LOCKED] = str(folder)
        yield
    finally:
        os.environ.pop(LOCKED, None)
        holder.unlink(missing_ok=True)
        lock.release()

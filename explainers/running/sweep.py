"""A sweep, `-m`: the folders of its jobs, which of them a validation chooses, and the test of that one."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write

from explainers.running.folder import quote, shorten_path

CHOSEN = ("module.", "explainer.", "lambda_2")
"""Beginnings of the keys among whose values a validation chooses; another key, such as `data`, gives another task."""


class Sweep(Callback):
    """Hydra's callback that names the folders of a sweep's jobs, compares the jobs, and tests the best of them.

    Jobs are compared that differ in settings of the module alone, by the `objective`, of which less is better. None of
    them measures test images: where `test` is set, the best job does, once, after all have ended.
    """

    def __init__(self) -> None:
        self.jobs: list[Any] = []  # JobReturn, which declares all it has as optional
        self.chosen: set[str] = set()
        self.tests = False
        self.task: Any = None

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        HydraConfig.instance().set_config(config)  # Hydra itself does so later; names of runs interpolate it

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        swept = (override.key_or_group for override in parse_overrides(config) if override.is_sweep_override())
        self.chosen = {key for key in swept if key.startswith(CHOSEN)}
        self.tests = bool(self.chosen and config.get("test"))
        if self.tests:
            config.hydra.overrides.task.append("test=false")
        name_jobs(config)
        HydraConfig.instance().set_config(config)

    def on_job_start(self, config: DictConfig, *, task_function: Callable[[DictConfig], Any], **kwargs: Any) -> None:
        self.task = task_function

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        self.jobs.append(job_return)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Compare the jobs of each task, which have ended in this process, unless they are a cluster's."""
        if self.chosen and not self.jobs:
            print("jobs of a cluster are neither compared nor tested: run the best one again with test=true")
        tasks: dict[tuple[str, ...], list[Any]] = {}
        for job in self.jobs if self.chosen else ():
            if job.status == JobStatus.COMPLETED and job.return_value is not None:
                tasks.setdefault(tuple(self.list_values(job, chosen=False)), []).append(job)
        for jobs in tasks.values():
            jobs.sort(key=lambda job: job.return_value)
            if self.tests:
                self.test(jobs[0])
            values = ", ".join(f"{' '.join(self.list_values(job))} {job.return_value:.4g}" for job in jobs)
            best = f"best of {len(jobs)} jobs by {jobs[0].cfg.objective}: {' '.join(self.list_values(jobs[0]))}"
            folder = shorten_path(Path(jobs[0].hydra_cfg.hydra.runtime.output_dir))
            print(f"{best} ({values}); {'tested, ' if self.tests else ''}{folder}")

    def list_values(self, job: Any, chosen: bool = True) -> list[str]:
        """The overrides of a job that belong to what a validation chooses, or the others."""
        return [text for text in job.overrides if (text.lstrip("+~").partition("=")[0] in self.chosen) == chosen]

    def test(self, job: Any) -> None:
        """Run a job again, which finds its own results, and measure it on test images."""
        with read_write(job.hydra_cfg.hydra):
            job.hydra_cfg.hydra.overrides.task.append("test=true")
        HydraConfig.instance().set_config(job.hydra_cfg)
        job.cfg.test = True
        self.task(job.cfg)


def parse_overrides(config: DictConfig) -> list[Override]:
    """The overrides of a sweep, of the command and of the sweeper's own parameters."""
    hydra = config.hydra
    params = [f"{key}={value}" for key, value in (hydra.sweeper.get("params") or {}).items()]
    return OverridesParser.create().parse_overrides([*hydra.overrides.task, *params])


def name_jobs(config: DictConfig) -> None:
    """Add to the folder of each job of a sweep the overrides that differ between jobs and that it does not name yet.

    Hydra composes each job from the overrides of `config`, that of the whole sweep, on any launcher. Two of its own
    settings are added to them: the folder of a job, and which overrides `hydra.job.override_dirname` leaves out.
    """
    settings: Any = OmegaConf.to_container(config)  # interpolations stay
    hydra = settings["hydra"]
    overrides = parse_overrides(config)
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

"""Loggers of a run that may be resumed: they continue one metrics.csv and one W&B run."""

import csv
import io
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from explainers.saved.files import write_atomically

HISTORY = "csv/version_0/metrics.csv"
"""The file of `History` in the folder of a run."""


class Writer(ExperimentWriter):
    """Appends to the metrics.csv of a folder; Lightning's own class deletes a file that is there."""

    def _check_log_dir_exists(self) -> None:
        """Read the columns of the file, which Lightning would delete."""
        with suppress(FileNotFoundError), open(self.metrics_file_path, newline="", encoding="utf-8") as file:
            self.metrics_keys = next(csv.reader(file), [])

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        """Add columns to the file in one step, so that a kill loses no rows; Lightning would truncate it first."""
        with open(self.metrics_file_path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        _write(Path(self.metrics_file_path), fieldnames, rows)


class History(CSVLogger):
    """Logs to `csv/version_0/metrics.csv` in the folder of a run; a resumed run appends to it."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, name="csv", version=0)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer of the file, built at its first use."""
        if self._experiment is None:
            self._experiment = Writer(self.log_dir)
        return self._experiment


@rank_zero_only
def forget_later_rows(folder: Path, step: int) -> None:
    """Remove the rows from a `step` on, which a resumed run logs again, from its history, and a line cut by a kill."""
    path = folder / HISTORY
    if not path.exists():
        return
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        whole = [line for line in file if line.endswith("\n")]
    reader = csv.DictReader(whole)
    rows = [row for row in reader if None not in row and None not in row.values()]
    kept = [row for row in rows if (row.get("step") or "").isdigit() and int(row["step"]) < step]
    if kept:
        _write(path, reader.fieldnames or [], kept)
    else:
        path.unlink()


def _write(path: Path, columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV file in one step, so that it is never half-written."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(columns))
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


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
    wandb.finish()  # otherwise a job of a sweep would continue the run of the job before it
    identifier = Path(folder) / "wandb_id"
    if not identifier.exists():
        write_atomically(identifier, secrets.token_hex(4))
    by_agent = "WANDB_SWEEP_ID" in os.environ  # set by `wandb agent`, which chooses the id of the run
    run_id = identifier.read_text(encoding="utf-8") if identifier.exists() and not by_agent else None
    mode: Any = "offline" if offline else None  # Lightning's `offline` would also set WANDB_MODE for later runs
    settings = wandb.Settings(silent=bool(offline))  # the line below replaces its banners
    if offline:
        rank_zero_only(print)(f"W&B: offline; wandb sync {folder}/wandb/offline-run-* uploads the run")
    names: Any = {"name": name, "project": project, "group": group, "id": run_id, "resume": "allow"}
    logger = WandbLogger(save_dir=folder, mode=mode, settings=settings, **names)
    logger._wandb_init.pop("anonymous", None)  # deprecated in wandb, which warns of it
    return logger

"""Loggers of a run that may be resumed: they continue one metrics.csv and one W&B run."""

import csv
import io
import os
import secrets
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from explainers.saved.files import write_atomically

HISTORY = "csv/version_0/metrics.csv"
"""The file of `History` in the folder of a run."""


class History(Logger):
    """Logs to `csv/version_0/metrics.csv` in the folder of a run; a resumed run continues it.

    Rows are appended. With a new metric, which is a new column, the file is written anew, whole.
    """

    name, version = "csv", 0

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.path = Path(folder) / HISTORY
        self.columns = sorted({name for row in read_rows(self.path) for name in row})
        self.rows: list[dict[str, Any]] = []
        """Rows that are not written yet."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add a row."""
        self.rows.append(metrics | {"step": step})

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Nothing: config.yaml has them."""

    @rank_zero_only
    def save(self) -> None:
        """Write the new rows; Lightning calls this after each of them."""
        if not self.rows:
            return
        columns = sorted({name for row in self.rows for name in row}.union(self.columns))
        if columns == self.columns:
            with open(self.path, "a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, columns).writerows(self.rows)
        else:
            write_rows(self.path, [*read_rows(self.path), *self.rows])
        self.columns, self.rows = columns, []


@rank_zero_only
def forget_later_rows(folder: Path, step: int) -> None:
    """Remove the rows from a `step` on, which a resumed run logs again, from its history, and a line cut by a kill."""
    kept = [row for row in read_rows(folder / HISTORY) if int(row["step"]) < step]
    if kept:
        write_rows(folder / HISTORY, kept)
    else:
        (folder / HISTORY).unlink(missing_ok=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file, without empty cells, and without a last line that a kill has cut; none without a file."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        whole = [line for line in file if line.endswith("\n")]
    return [{name: cell for name, cell in row.items() if cell} for row in csv.DictReader(whole)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a CSV file in one step; its columns are sorted."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, sorted({name for row in rows for name in row}))
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
    return WandbLogger(save_dir=folder, mode=mode, settings=settings, **names)

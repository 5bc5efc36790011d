"""The history of a run in metrics.csv: one file, however often the run is killed and resumed."""

import csv

import pytest
from commands import csv_rows

from benchmarks.papers.run_figures import loss_curves
from explainers.running import loggers
from explainers.running.loggers import HISTORY, History, forget_later_rows


class Killed(BaseException):
    """The process ends here."""


def log(folder, *rows):
    logger = History(str(folder))
    for step, metrics in rows:
        logger.log_metrics(metrics, step)
        logger.save()


def column(folder, name):
    return [row[name] for row in csv_rows(folder / HISTORY)]


def test_rows_after_the_checkpoint_are_forgotten_and_those_before_stay_as_they_are(tmp_path):
    log(tmp_path, (0, {"loss": 0.5}))
    before = (tmp_path / HISTORY).read_bytes()
    log(tmp_path, (1, {"loss": 0.25}), (2, {"loss": 0.125}))
    forget_later_rows(tmp_path, 1)
    assert (tmp_path / HISTORY).read_bytes() == before
    forget_later_rows(tmp_path, 0)
    assert not (tmp_path / HISTORY).exists()
    forget_later_rows(tmp_path, 0)
    log(tmp_path, (0, {"accuracy": 1.0}))
    assert csv_rows(tmp_path / HISTORY) == [{"accuracy": "1.0", "step": "0"}]


def test_a_kill_loses_no_row_that_was_written(tmp_path, monkeypatch):
    log(tmp_path, (0, {"loss": 0.5}))

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(csv.DictWriter, "writerows", killed)
        log(tmp_path, (1, {"accuracy": 1.0}))
    assert csv_rows(tmp_path / HISTORY) == [{"loss": "0.5", "step": "0"}]


def test_figures_leave_out_a_line_that_a_kill_has_cut(tmp_path):
    log(tmp_path, *((step, {"train/loss": 0.5}) for step in range(3)))
    with open(tmp_path / HISTORY, "a") as file:
        file.write("0.1,")
    (axis,) = loss_curves({"run": tmp_path / HISTORY}).axes
    assert [list(line.get_xdata()) for line in axis.lines] == [[0, 1, 2]] * 2


def test_rows_of_known_columns_are_appended_and_a_line_cut_by_a_kill_is_left_out(tmp_path, monkeypatch):
    log(tmp_path, (0, {"loss": 0.5}))
    with monkeypatch.context() as patch:
        patch.setattr(loggers, "write_rows", None)  # a row costs no more in a long history
        log(tmp_path, (1, {"loss": 0.25}), (2, {"loss": 0.125}))
    with open(tmp_path / HISTORY, "a") as file:
        file.write("0.06")
    forget_later_rows(tmp_path, 3)
    assert column(tmp_path, "loss") == ["0.5", "0.25", "0.125"]

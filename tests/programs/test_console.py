"""What a user sees while a command runs, and which hardware settings it chooses."""

import io
import warnings
from contextlib import redirect_stderr
from types import SimpleNamespace

import pytest
import torch
from commands import QUIET, SMALL_DIGITS, TINY_RUN, evaluate, train
from lightning import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import OmegaConf
from toys import LIGHT, SILENT, fit, training

from callbacks.progress import Progress
from datamodules.cached import Cached
from datamodules.digits import Digits
from datamodules.images import Images
from explainers.evaluation import Evaluation, EvaluationModule
from explainers.posthoc.baselines import Chance
from explainers.running import program
from explainers.running.defaults import fastest_precision
from explainers.saved.files import file_hashes
from explainers.tve import TVE, TVELoss


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_one_bar_counts_all_steps_of_a_training_with_the_latest_validation_metric(target, grid, images):
    progress = Progress("digits", "val/loss")
    with redirect_stderr(Terminal()) as terminal:
        fit(training(TVE(target, grid, LIGHT)), images, epochs=3, validate=True, callbacks=[progress])
    assert "digits: 100%" in terminal.getvalue() and "6/6" in terminal.getvalue()  # 3 epochs of 2 batches
    assert "val/loss=" in terminal.getvalue()


@pytest.fixture
def clock(monkeypatch):
    """A clock whose seconds pass when `clock.now` is changed."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("tqdm.std.time", lambda: clock.now)
    return clock


def test_without_a_terminal_there_is_a_line_every_half_minute(clock, capsys, target, grid, images):
    class Slow(TVELoss):
        def compute(self, predicted, rows):
            clock.now += 20
            return super().compute(predicted, rows)

    fit(training(TVE(target, grid, LIGHT), Slow), images, epochs=3, callbacks=[Progress("digits")])
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("digits: ")]
    assert told == [
        "digits: 2 of 6 steps (33 %), 20 s/step, 01:20 left",
        "digits: 4 of 6 steps (67 %), 20 s/step, 00:40 left",
        "digits: 6 of 6 steps (100 %), 20 s/step, 00:00 left",
    ]


def test_a_batch_that_takes_minutes_counts_its_forward_passes(clock, capsys, make_target, grid):
    class Slow(Chance):
        """Sixteen forward passes of a minute each."""

        forward_passes = 16

        def forward(self, images, classes):
            for _ in range(16):
                clock.now += 60
                target.embed(target.normalise(images))
            return super().forward(images, classes)

    target = make_target(num_classes=10)
    evaluation = EvaluationModule(target, {"slow": Slow(None, grid)}, Evaluation(grid, curves=[]))
    data = Images(test=lambda: Digits("test", size=4, image_size=32), batch_size=2, num_workers=0)
    Trainer(accelerator="cpu", callbacks=[Progress("digits")], **SILENT).test(evaluation, data, verbose=False)
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("digits: ")]
    assert len(told) == 32
    assert told[7] == "digits: 0.5294 of 2 batches (26 %), 907 s/batch, 22:13 left"


@pytest.mark.slow
def test_caching_and_hashing_say_how_far_they_are(clock, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("explainers.saved.files._hash", lambda path: setattr(clock, "now", clock.now + 31) or "hash")
    for name in "ab":
        (tmp_path / name).write_text(name)
    file_hashes([tmp_path / "a", tmp_path / "b"])
    assert "hashing files: 2 of 2 files (100 %)" in capsys.readouterr().err
    compute = Cached._compute

    def slow(*args):
        clock.now += 31
        return compute(*args)

    monkeypatch.setattr(Cached, "_compute", slow)
    options = (*TINY_RUN, *SMALL_DIGITS, "cache=sources", f"cache_dir={tmp_path}", "trainer.max_epochs=1", "fit=false")
    train(*options, folder=tmp_path / "run")
    assert "(val): 1 of 1 batch" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_ends_with_one_line_that_says_what_how_well_how_long_and_where(tmp_path, capsys):
    run = ("experiment=demo/tve", "target=tiny", *SMALL_DIGITS, "cache=none", "trainer.max_epochs=1", *QUIET)
    loss = train(*run, "explainer.network.width=24", folder=tmp_path / "run")
    *table, line, following = capsys.readouterr().out.splitlines()
    assert "Fidelity" in table[0] and [row.split()[0] for row in table[1:]] == ["TVE", "DecompX-SkipPLUS", "chance"]
    assert line.startswith(f"TVE learns what the model sees of every patch, without any task: val/loss {loss:.3g}; ")
    assert line.endswith(f" s, {tmp_path / 'run'}")


@pytest.mark.slow
def test_an_evaluation_says_what_it_will_cost_before_it_starts(tmp_path, capsys):
    oracle = ("explainers=[chance,oracle]", "explainers.oracle.cache_dir=null", "evaluation.levels=3")
    digits = ("tasks=digits", "tasks.digits.data.size.test=3")
    evaluate("target=tiny", *oracle, *digits, *QUIET, folder=tmp_path)
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "digits: 3 images, about 133 forward passes each (oracle 128, perturbations 5)"
    assert any(line.startswith("| digits") for line in rest)
    assert rest[-1] == f"Open {tmp_path}/gallery.html in a browser"


def test_an_evaluation_without_tasks_says_how_to_name_them(tmp_path):
    with pytest.raises(SystemExit, match=r"error: nothing to measure: name tasks, such as tasks=\[imagenette\]"):
        evaluate("target=tiny", *QUIET, folder=tmp_path)


@pytest.mark.parametrize(
    ("accelerator", "cuda", "features", "precision"),
    [
        ("auto", True, {}, "bf16-mixed"),
        ("cpu", True, {}, "32-true"),
        ("auto", False, {"amx_bf16": True}, "bf16-mixed"),
        ("auto", False, {"avx512_bf16": True}, "bf16-mixed"),
        ("auto", False, {"avx512_f": True, "avx2": True, "amx_bf16": False}, "32-true"),
        ("mps", False, {"amx_bf16": True}, "32-true"),
    ],
)
def test_bf16_is_for_hardware_that_computes_it(accelerator, cuda, features, precision, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features, raising=False)
    assert fastest_precision(accelerator) == precision


@pytest.mark.parametrize("rank", [0, 1])
def test_a_warning_is_one_line(rank, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", rank, raising=False)
    monkeypatch.setattr(warnings, "formatwarning", program.format_with_place)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        program.quiet_libraries()
        workers, broken = "This DataLoader will create 8 worker processes in total", "left out: c.jpg is broken"
        for message in (workers, broken):
            warnings.warn(message, UserWarning, stacklevel=1)
        warnings.warn("an own function is deprecated", FutureWarning, stacklevel=1)
    *told, last = [warnings.formatwarning(w.message, w.category, w.filename, w.lineno) for w in warned]
    assert told == [*[f"warning: {workers}\n"] * (rank == 0), f"warning: {broken}\n"]
    assert "test_console.py:" in last  # for programmers


@pytest.mark.parametrize(
    ("environment", "rank", "said"),
    [({}, 0, False), ({"LOCAL_RANK": "0"}, 0, True), ({"LOCAL_RANK": "1"}, 1, False)],
    ids=["parent", "first", "second"],
)
def test_what_all_processes_find_is_said_by_the_first_one(environment, rank, said, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", rank, raising=False)
    for name in ("LOCAL_RANK", "SLURM_JOB_NAME", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with program.once(OmegaConf.create({"devices": 2})):
            warnings.warn("left out: 2 files (a.txt, b.txt) that Pillow does not read", stacklevel=1)
        warnings.warn("left out: c.jpg, which this process alone has read", stacklevel=1)
    assert len(warned) == 1 + said

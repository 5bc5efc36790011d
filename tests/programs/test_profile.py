"""The table of `debug=profile`: what sleeps in a part of a step is in its row, and nothing is left behind."""

import json
import time
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import toys
from commands import NO_PICTURES, QUIET, SMALL_DIGITS, train
from forks import Forks
from lightning import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

from callbacks.profile import PARTS, Profile, Stopwatch
from explainers.errors import InputError
from explainers.running import processes
from explainers.tve import TVE, TVELoss

SLEEP = 0.05
SILENT = {"accelerator": "cpu", "max_epochs": 2, **toys.SILENT}


class Sleeps(nn.Module):
    """The identity, in time, and its backward pass as well."""

    def __init__(self, seconds=0.0, backward=0.0):
        super().__init__()
        self.seconds, self.backward = seconds, backward

    def forward(self, x):
        time.sleep(self.seconds)
        if self.backward:
            x.register_hook(lambda _: time.sleep(self.backward))
        return x

    def features(self, x):
        return self(x)


class Source:
    """Sleeps, and calls a part of the frozen model."""

    provides = ("row",)

    def __init__(self, target, seconds):
        self.target, self.seconds = target, seconds

    def __call__(self, batch, epoch=0):
        time.sleep(self.seconds)
        return {"row": self.target.features(batch["image"])}


class Images(Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return {"index": index, "image": torch.ones(2)}


def loader(seconds=0.0):
    """Two batches of four images, each of which takes `seconds`."""
    return DataLoader(Images(seconds), batch_size=4)


class Model(LightningModule):
    """A frozen model in a frozen model, called as a module, by its submodule and by a source; and a trained weight."""

    frozen = ("target",)

    def __init__(self, **sleeps):
        super().__init__()
        self.sleeps = sleeps
        self.target = nn.Sequential(Sleeps(sleeps.get("target", 0.0)))
        self.network = Sleeps(sleeps.get("network", 0.0), sleeps.get("backward", 0.0))
        self.weight = nn.Parameter(torch.ones(2))
        self.sources = (Source(self.target[0], sleeps.get("source", 0.0)),)

    def training_step(self, batch, batch_idx):
        for source in self.sources:
            assert source.provides == ("row",)
            batch = batch | source(batch)
        return self.network(self.weight * self.target(batch["row"])).sum()

    def validation_step(self, batch, batch_idx):
        time.sleep(self.sleeps.get("validation", 0.0))
        self.target(batch["image"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([self.weight], lr=0.1)
        optimizer.register_step_post_hook(lambda *_: time.sleep(self.sleeps.get("optimiser", 0.0)))
        return optimizer


class Other(Callback):
    """Sleeps wherever another callback can."""

    def __init__(self, seconds):
        self.seconds = seconds

    def on_train_batch_start(self, *_):
        time.sleep(self.seconds)

    def on_train_batch_end(self, *_):
        time.sleep(self.seconds)


def rows(printed):
    """Part → milliseconds, part → percent, and the last line, of the one table that was printed."""
    lines = printed[printed.index("part  ") :].splitlines()
    cells = [line.split() for line in lines[1 : 2 + len(PARTS)]]
    assert [row[0] for row in cells] == [*PARTS, "total"]
    return {name: float(ms) for name, ms, _ in cells}, {name: float(share) for name, _, share in cells}, lines[9]


def profiled(capsys, module):
    """The rows of four steps in two epochs; the first step and the validation are not counted."""
    trainer = Trainer(callbacks=[Profile(1), Other(module.sleeps.get("other", 0.0))], **SILENT)
    trainer.fit(module, loader(module.sleeps.get("loader", 0.0) / 4), loader())
    return rows(capsys.readouterr().out)


@pytest.mark.slow
def test_each_part_has_the_time_that_it_sleeps(capsys):
    """The frozen model is called by the source and by the module, and other callbacks sleep twice.

    Neither the first step, which is slow, nor the validation is counted.
    """
    parts = ("loader", "target", "source", "network", "backward", "optimiser", "other")
    sleeps = {part: 0.01 * number for number, part in enumerate(parts, 1)}
    module, first_step = Model(**sleeps, validation=0.2), iter([0.5, 0.5])
    module.target[0].register_forward_hook(lambda *_: time.sleep(next(first_step, 0.0)))
    milliseconds, shares, last = profiled(capsys, module)
    expected = sleeps | {"target": 2 * sleeps["target"] + sleeps["source"], "other": 2 * sleeps["other"]}
    assert all(milliseconds[part] >= 1e3 * seconds for part, seconds in expected.items() if part in PARTS)
    assert sum(milliseconds[name] for name in PARTS) == pytest.approx(milliseconds["total"], abs=0.5)
    assert sum(shares[name] for name in PARTS) == pytest.approx(100, abs=0.5)
    assert milliseconds["total"] < 1e3 * (sum(sleeps.values()) + 0.2)
    assert float(last.removeprefix("3 steps, ").split()[0]) == pytest.approx(4e3 / milliseconds["total"], rel=0.1)


class SlowLoss(TVELoss):
    """Sleeps where it calls no model, as a mask or a backward pass does."""

    def __call__(self, batch, epoch=0):
        time.sleep(SLEEP)
        return super().__call__(batch, epoch)


def test_what_an_explainer_learns_from_counts_as_the_target(target, grid, images, capsys):
    module = toys.training(TVE(target, grid, toys.LIGHT), SlowLoss)
    toys.fit(module, images, epochs=2, callbacks=[Profile(1)])
    milliseconds, _, _ = rows(capsys.readouterr().out)
    assert milliseconds["target"] >= 1e3 * SLEEP > milliseconds["network"]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails, capsys):
    module, trainer = Model(), Trainer(callbacks=[Profile(0)], **SILENT)
    sources, profiler = module.sources, trainer.profiler
    if fails:
        module.on_after_backward = lambda: int("as it should")
    with pytest.raises(ValueError, match="as it should") if fails else nullcontext():
        trainer.fit(module, loader())
    assert module.sources is sources and trainer.profiler is profiler
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


class Function(Model):
    """Calls the frozen model by a function alone, which is no module, and has no sources."""

    def __init__(self):
        super().__init__()
        self.sources = ()

    def training_step(self, batch, batch_idx):
        return self.network(self.weight * self.target[0].features(batch["image"])).sum()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in place", "function"])
def test_a_compiled_target_is_counted_and_its_graph_stays_whole(how, capsys):
    def backend(graph, _):
        def sleep_and_run(*arguments):
            time.sleep(SLEEP)
            return graph(*arguments)

        return sleep_and_run

    module = Function() if how == "function" else Model()
    inner = module.target[0]
    inner.forward = lambda x: x + 0
    if how == "in place":
        module.target.compile(backend=backend, fullgraph=True)
    else:
        inner.features = torch.compile(inner.features, backend=backend, fullgraph=True)
    before = dict(vars(module.target)), dict(vars(inner))
    milliseconds, _, _ = profiled(capsys, module)
    assert milliseconds["target"] >= 1e3 * SLEEP > max(milliseconds["network"], milliseconds["other"])
    assert (vars(module.target), vars(inner)) == before


def test_a_training_of_the_warm_up_alone_says_what_to_do():
    with pytest.raises(InputError, match=r"^expected more than 4 steps \(warmup\), got 4: increase trainer.max_steps$"):
        Trainer(callbacks=[Profile(4)], **SILENT).fit(Model(), loader())
    with pytest.raises(InputError, match="warmup"):
        Profile(-1)


def test_parts_inside_one_another_count_for_the_innermost(monkeypatch):
    clock = iter([0, 1, 3, 6, 10, 15])
    monkeypatch.setattr("callbacks.profile.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    watch = Stopwatch(lambda: None)
    watch.start("[_TrainingEpochLoop].train_dataloader_next")  # reads 0 and 1
    watch.stop("[_TrainingEpochLoop].train_dataloader_next")  # 3
    watch.enter("network")  # 6
    watch.enter("network")  # of the same part, which reads no clock
    watch.leave()
    watch.leave()  # 10
    watch.pause()  # 15
    assert watch.seconds == dict.fromkeys(PARTS, 0) | {"loader": 2, "other": 1 + 3 + 5, "network": 4}


RUN = ("experiment=demo/tve", "target=tiny", "cache=none", "data=digits", *SMALL_DIGITS, *QUIET, NO_PICTURES)


class Late(Callback):
    """The second process begins its backward pass later, and the first has to wait for its gradients."""

    def on_before_backward(self, trainer, *_):
        time.sleep(2 * SLEEP * trainer.global_rank)


@pytest.mark.slow
def test_two_processes_print_one_table_with_what_they_wait_for(tmp_path, monkeypatch, capfd):
    """And `debug=profile` leaves out the first steps and the validation."""
    late = ("+callbacks.late._target_=test_profile.Late", "trainer.max_steps=8")
    work = partial(train, *RUN, "debug=profile", *late, "trainer=ddp", "trainer.devices=2", folder=tmp_path)
    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(Popen=partial(Forks, work)))
    work()
    printed = capfd.readouterr().out
    assert printed.count("part  ") == 1
    milliseconds, _, last = rows(printed)
    assert milliseconds["communication"] > 2e3 * SLEEP * 0.3  # on a busy machine, the first one is late, too
    assert last.startswith("3 steps, ")
    assert "val/loss" not in json.loads((tmp_path / "metrics.json").read_text())

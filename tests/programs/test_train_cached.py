"""Training on what was computed once: a killed cache is filled up, and runs that share it find it whole."""

import os
import signal

import numpy as np
import pytest
from commands import QUIET, SMALL_DIGITS, TVE_RUN, train
from fork_server import fork, join
from forks import ask_no_gpu
from safetensors.torch import load_file
from test_train import same

from datamodules.store import Store
from explainers.shapley.kernel_shap import ShapleyLabels
from explainers.training.sources import Features
from explainers.tve import TVELoss

CACHED = ("data=digits", "cache=sources", "module.min_crop=null", "cache.batch_size=4", *SMALL_DIGITS)


def killed_at(method, call, *command, folder):
    """Train in a process that is killed at this call of a method, as `Store.write`."""
    process = fork(train_until, method, call, command, folder)
    join(process, 180)
    assert process.exitcode == -signal.SIGKILL


def train_until(method, call, command, folder):
    owner, name = method
    end = tear if owner is Store else lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, at_call(call, getattr(owner, name), end))
    ask_no_gpu()
    train(*command, folder=folder)


def at_call(number, function, end):
    """`function`, which at its call of this number does `end`."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return (end if len(calls) == number else function)(*args, **kwargs)

    return counted


def tear(store, index, rows):
    """Write rubbish, and die before the rows are marked as done."""
    for array in store.arrays.values():
        array[index.numpy()] = 7
    os.kill(os.getpid(), signal.SIGKILL)


def watch(function, computed):
    """A source's `__call__` that also writes down which rows it computes."""

    def call(source, batch, *args):
        computed.extend((source.provides[0], index) for index in batch["index"].tolist())
        return function(source, batch, *args)

    return call


@pytest.mark.slow
@pytest.mark.parametrize("dies", [Features, Store])
def test_a_killed_cache_is_filled_up_and_then_only_read(dies, tmp_path, monkeypatch):
    command = (*TVE_RUN, *CACHED)
    method = (dies, "write" if dies is Store else "__call__")
    killed_at(method, 3, *command, f"cache_dir={tmp_path / 'killed'}", folder=tmp_path / "first")
    computed = []
    for source in (TVELoss, Features):
        monkeypatch.setattr(source, "__call__", watch(source.__call__, computed))
    train(*command, f"cache_dir={tmp_path / 'killed'}", folder=tmp_path / "first")
    done = {"patch": 16 if dies is Features else 8, "embedding": 8 if dies is Features else 0}  # of 16 training images
    todo = [(rows, index) for rows, count in done.items() for index in (*range(count, 16), *range(8))]
    assert sorted(computed) == sorted(todo)
    computed.clear()
    train(*command, f"cache_dir={tmp_path / 'killed'}", folder=tmp_path / "second")
    assert not computed
    train(*command, f"cache_dir={tmp_path / 'whole'}", folder=tmp_path / "third")
    assert len(computed) == 2 * (16 + 8)
    stores = [sorted((tmp_path / name).rglob("*.npy")) for name in ("killed", "whole")]
    assert len(stores[0]) > 8 and [path.name for path in stores[0]] == [path.name for path in stores[1]]
    assert all(np.array_equal(np.load(one), np.load(other)) for one, other in zip(*stores, strict=True))


@pytest.mark.slow
def test_killed_attributions_are_filled_up_to_the_bytes_of_an_uninterrupted_run(tmp_path):
    """In the middle of the training images."""
    common = (
        *("target=tiny", "~explainers@explainer", "module=self_explaining", "data=digits", "cache=sources", *QUIET),
        *(*SMALL_DIGITS, "logger=csv", "cache.batch_size=4", "module.labels.budget=10"),
        "projection@module.projection=simplex",  # 16 images show not every class
    )
    train(*common, "module.alpha=1", f"cache_dir={tmp_path / 'twin'}", folder=tmp_path / "predicting")
    command = (*common, f"module.teacher={tmp_path / 'predicting/model.safetensors'}")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed_at((ShapleyLabels, "__call__"), 2, *command, f"cache_dir={killed}", folder=tmp_path / "first")
    (path,) = killed.rglob("shapley.npy")
    assert np.load(path.with_name("done.npy")).sum() == 4  # of 16: one batch
    for cache, folder in ((killed, "first"), (whole, "second")):
        train(*command, f"cache_dir={cache}", folder=tmp_path / folder)
    files = [{path.relative_to(cache): path.read_bytes() for path in cache.rglob("*.*")} for cache in (killed, whole)]
    assert len([path for path in files[0] if path.name == "shapley.npy"]) == 2
    assert files[0] == files[1]
    exported = [load_file(tmp_path / folder / "model.safetensors") for folder in ("first", "second")]
    assert same(*exported)

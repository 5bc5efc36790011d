"""Training on what was computed once: a killed cache is filled up, and runs that share it find it whole."""

import os
import signal

import numpy as np
import pytest
from commands import SMALL_DIGITS, TVE_RUN, train
from fork_server import fork, join
from forks import ask_no_gpu

from datamodules.store import Store
from explainers.learned.sources import Features
from explainers.tve import TVELoss

CACHED = ("data=digits", "cache=sources", "module.min_crop=null", "cache.batch_size=4", *SMALL_DIGITS)
COMMAND = (*TVE_RUN, *CACHED)


def train_until_a_kill(command, folder):
    """Train in a process that is killed in its third write."""
    write, calls = Store.write, []

    def counted(*args):
        calls.append(1)
        return (tear if len(calls) == 3 else write)(*args)

    Store.write = counted
    ask_no_gpu()
    train(*command, folder=folder)


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a cache that one run has filled, and the number of rows that it computed."""
    folder, computed = tmp_path_factory.mktemp("whole"), []
    with pytest.MonkeyPatch.context() as patch:
        for source in (TVELoss, Features):
            patch.setattr(source, "__call__", watch(source.__call__, computed))
        train(*COMMAND, f"cache_dir={folder / 'rows'}", folder=folder / "run")
    return folder / "rows", len(computed)


@pytest.mark.slow
def test_a_killed_cache_is_filled_up_and_then_only_read(whole, tmp_path, monkeypatch):
    command = (*COMMAND, f"cache_dir={tmp_path / 'killed'}")
    process = fork(train_until_a_kill, command, tmp_path / "first")
    join(process)
    assert process.exitcode == -signal.SIGKILL
    computed = []
    for source in (TVELoss, Features):
        monkeypatch.setattr(source, "__call__", watch(source.__call__, computed))
    train(*command, folder=tmp_path / "first")
    done = {"patch": 8, "embedding": 0}  # of 16 training images
    todo = [(rows, index) for rows, count in done.items() for index in (*range(count, 16), *range(8))]
    assert sorted(computed) == sorted(todo)
    computed.clear()
    train(*command, folder=tmp_path / "second")
    assert not computed and whole[1] == 2 * (16 + 8)
    stores = [sorted(folder.rglob("*.npy")) for folder in (tmp_path / "killed", whole[0])]
    assert len(stores[0]) > 8 and [path.name for path in stores[0]] == [path.name for path in stores[1]]
    assert all(np.array_equal(np.load(one), np.load(other)) for one, other in zip(*stores, strict=True))

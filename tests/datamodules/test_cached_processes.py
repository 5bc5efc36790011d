"""Two processes fill one cache, and see all of its rows; or all of them say why not."""

import json
import os
import socket
import time
from functools import partial

import pytest
import torch
from fork_server import fork
from forks import run_as_rank
from lightning import Trainer
from test_cached import Means, Noise, Reading
from toys import SILENT

from datamodules.cached import Cached
from datamodules.images import Images
from explainers.errors import InputError


class Other(Noise):
    """Images that differ between two machines."""

    def fingerprint(self):
        return super().fingerprint() | {"image": f"of process {os.environ['RANK']}"}


class Corrupt(Noise):
    """Every fourth image is corrupt."""

    def __getitem__(self, index):
        return None if index % 4 == 0 else super().__getitem__(index)


def fit(folder, out, data, cached=True):
    """What a process does; it writes down the rows that it saw, or its error."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    images = Images(partial(data, 13), partial(data, 9, seed=1), batch_size=2, num_workers=0)
    source = Means()
    module = Validating(source) if cached else Plain()
    result = {}
    try:
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, use_distributed_sampler=False, **SILENT
        )
        trainer.fit(module, Cached(images, str(folder).format(rank=rank), 4) if cached else images)
        result = {"seen": sorted(module.seen), "steps": trainer.global_step, "computed": source.computed}
    except InputError as error:
        result = {"error": str(error)}
    (out / f"{rank}.json").write_text(json.dumps(result))


class Validating(Reading):
    """Averages the rows of the validation images."""

    def validation_step(self, batch, batch_idx):
        self.log("val/mean", batch["mean"].mean(), batch_size=len(batch["index"]), sync_dist=True)


class Plain(Reading):
    """Reads images, in training and validation; it has a layer with gradients and buffers to synchronise."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(3)

    def training_step(self, batch, batch_idx):
        super().training_step({"index": batch["index"]}, batch_idx)
        return self.weight.sum() + self.norm(batch["image"].float()).sum()

    def validation_step(self, batch, batch_idx):
        self.log("val/mean", self.norm(batch["image"].float()).mean(), batch_size=len(batch["index"]), sync_dist=True)


def in_two_processes(*arguments):
    """The exit codes of two processes, None for one that hangs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [fork(run_as_rank, partial(fit, *arguments), rank, 2, port) for rank in range(2)]
    deadline = time.monotonic() + 180
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def results(out):
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def test_two_processes_fill_a_shared_folder_and_see_all_rows(tmp_path):
    assert in_two_processes(tmp_path / "rows", tmp_path, Noise) == [0, 0]
    first, second = results(tmp_path)
    assert first["steps"] == second["steps"] == 2 * (13 // 4)
    assert len(set(first["seen"]) | set(second["seen"])) > 6
    assert {index % 2 for index in first["computed"]} == {0} and {index % 2 for index in second["computed"]} == {1}
    assert len(first["computed"]) + len(second["computed"]) == 13 + 9


def test_two_processes_with_folders_of_their_own_both_say_so_before_anything_is_computed(tmp_path):
    assert in_two_processes(tmp_path / "disk_of_{rank}" / "rows", tmp_path, Noise) == [0, 0]
    for rank, result in enumerate(results(tmp_path)):
        line = f"expected a folder that all processes share, got {tmp_path}/disk_of_{rank}/rows, "
        assert result["error"].startswith(line) and "cache_dir" in result["error"]
    assert not list(tmp_path.rglob("*.npy"))


def test_two_processes_with_images_of_their_own_both_say_so(tmp_path):
    assert in_two_processes(tmp_path / "rows", tmp_path, Other) == [0, 0]
    for result in results(tmp_path):
        assert result["error"].startswith("expected the same val images in all processes, got different ones")


@pytest.mark.slow
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "not cached"])
def test_corrupt_images_in_the_share_of_one_process_do_not_stop_the_other(tmp_path, cached):
    """Of the validation images, process 0 can read 2 of 5, in 2 of 3 batches, and process 1 all 4."""
    assert in_two_processes(tmp_path / "rows", tmp_path, Corrupt, cached) == [0, 0]
    first, second = results(tmp_path)
    assert first["steps"] == second["steps"] > 0
    assert not {index for index in first["seen"] + second["seen"] if index % 4 == 0}

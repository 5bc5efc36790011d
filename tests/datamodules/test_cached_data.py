"""What a cache does when the images, their labels or their files are not what they were."""

import json
import os
import time
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from lightning import LightningModule, Trainer
from PIL import Image
from toys import SILENT

from datamodules.cached import Cached
from datamodules.datasets import ImageFiles
from datamodules.images import Images
from datamodules.store import Store
from explainers.errors import InputError


class Means:
    """The mean of an image; it writes down which rows it computes."""

    provides, forward_passes, entries = ("mean",), 1, ("image",)

    def __init__(self, scale=1.0):
        self.scale, self.computed = scale, []

    def __call__(self, batch, epoch=0):
        self.computed.extend(batch["index"].tolist())
        return {"mean": batch["image"].float().mean((1, 2, 3)) * self.scale}

    def key(self):
        return {"source": "means", "settings": {"scale": self.scale}}


class Named(Means):
    """Depends on the label too."""

    provides, entries = ("named",), ("image", "label")

    def __call__(self, batch, epoch=0):
        return {"named": super().__call__(batch)["mean"] + 1000 * batch["label"]}

    def key(self):
        return super().key() | {"source": "named"}


class Reading(LightningModule):
    """Writes down the rows of every training and validation batch."""

    def __init__(self, *sources):
        super().__init__()
        self.sources, self.weight, self.seen = sources, torch.nn.Parameter(torch.zeros(1)), {}

    def training_step(self, batch, batch_idx):
        for i, index in enumerate(batch["index"].tolist()):
            self.seen[index] = {name: values[i].item() for name, values in batch.items()}
        return self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def paths(tmp_path):
    paths = [tmp_path / "images" / f"{i}.bmp" for i in range(6)]
    paths[0].parent.mkdir()
    for i, path in enumerate(paths):
        Image.new("RGB", (8, 8), (10 * i + 5,) * 3).save(path)
    return paths


def read(folder, paths, *sources, labels=(0, 1, 2, 0, 1, 2), **settings):
    """One epoch on the rows of these sources: index → rows."""
    data = partial(ImageFiles, paths, labels, 8, **settings)
    module = Reading(*sources)
    trainer = Trainer(accelerator="cpu", max_epochs=1, **SILENT)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(does not have|Found .* in eval mode).*")
        trainer.fit(module, Cached(Images(data, batch_size=1, num_workers=0), str(folder), 4))
    return module.seen


def test_an_edited_pixel_is_seen_though_size_and_time_are_what_they_were(tmp_path, paths, monkeypatch):
    monkeypatch.setattr("explainers.saved.files.SETTLED", 0)
    assert read(tmp_path / "rows", paths, Means())[3]["mean"] == 35
    time.sleep(0.05)
    status, content = paths[3].stat(), bytearray(paths[3].read_bytes())
    content[-192:] = bytes([200] * 192)
    paths[3].write_bytes(content)
    os.utime(paths[3], ns=(status.st_atime_ns, status.st_mtime_ns))
    source = Means()
    assert read(tmp_path / "rows", paths, source)[3]["mean"] == 200
    assert sorted(source.computed) == list(range(6))


def test_swapped_labels_compute_only_the_rows_that_depend_on_labels(tmp_path, paths):
    read(tmp_path / "rows", paths, Means(), Named())
    means, named = Means(), Named()
    rows = read(tmp_path / "rows", paths, means, named, labels=(0, 1, 2, 2, 1, 0))
    assert (means.computed, named.computed) == ([], list(range(6)))
    assert [rows[i]["named"] for i in range(6)] == [5, 1015, 2025, 2035, 1045, 55]
    assert [rows[i]["label"] for i in range(6)] == [0, 1, 2, 2, 1, 0]


def test_renamed_files_are_read_from_the_cache(tmp_path, paths):
    read(tmp_path / "rows", paths, Means())
    moved = [path.rename(path.with_stem(f"new_{path.stem}")) for path in paths]
    source = Means()
    assert read(tmp_path / "rows", moved, source)[5]["mean"] == 55
    assert source.computed == []
    read(tmp_path / "rows", moved[::-1], source)
    assert sorted(source.computed) == list(range(6))


def test_a_store_tells_what_it_depends_on(tmp_path, paths):
    data = partial(ImageFiles, paths, [0, 1, 2, 0, 1, 2], 8)
    read(tmp_path / "rows", paths, Means(scale=2.0), Named())
    keys = {key["source"]: key for key in (json.loads(p.read_text()) for p in (tmp_path / "rows").rglob("key.json"))}
    fingerprint = data().fingerprint()
    assert keys["means"] == {
        "source": "means",
        "settings": {"scale": 2.0},
        "data": {"image": fingerprint["image"]},
        "precision": "32-true",
    }
    assert keys["named"]["data"] == fingerprint


def test_a_corrupt_image_is_decoded_once_and_reported_every_time(tmp_path, paths, monkeypatch):
    paths[2].write_bytes(b"nothing")
    with pytest.warns(UserWarning, match=f"left out: 1 of 6 images, such as {paths[2]}"):
        first = read(tmp_path / "rows", paths, Means(), Named(), skip_corrupt=True)
    monkeypatch.setattr(ImageFiles, "__getitem__", lambda *_: pytest.fail("decoded an image again"))
    with pytest.warns(UserWarning, match=f"left out: 1 of 6 images, such as {paths[2]}"):
        second = read(tmp_path / "rows", paths, Means(), Named(), skip_corrupt=True)
    assert first == second and sorted(first) == [0, 1, 3, 4, 5]


def test_a_repaired_image_is_computed(tmp_path, paths):
    whole = paths[2].read_bytes()
    paths[2].write_bytes(b"nothing")
    with pytest.warns(UserWarning, match="left out"):
        read(tmp_path / "rows", paths, Means(), skip_corrupt=True)
    paths[2].write_bytes(whole)
    assert read(tmp_path / "rows", paths, Means(), skip_corrupt=True)[2]["mean"] == 25


def test_a_value_that_half_precision_cannot_hold_stops_the_run_and_is_not_stored(tmp_path, paths):
    for _ in range(2):
        line = "expected mean of image 4 within ±65504, which half precision can hold, got 67500; set cache=none"
        with pytest.raises(InputError, match=line):
            read(tmp_path / "rows", paths, Means(scale=1500.0))


def test_a_row_that_gets_lost_while_others_are_read_stops_the_run(tmp_path, paths, monkeypatch):
    """Another process deleted the store, or this process sees another folder."""
    own = Store.refresh

    def forgetful(store, names=()):
        own(store, names)
        if names:
            store.done = np.where(np.arange(6) == 1, 0, store.done)

    monkeypatch.setattr(Store, "refresh", forgetful)
    with pytest.raises(InputError, match=f"expected a folder that all processes share, got {tmp_path / 'rows'}"):
        read(tmp_path / "rows", paths, Means())

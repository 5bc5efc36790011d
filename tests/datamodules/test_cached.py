"""Rows of a module's sources, computed once and read ever after. `test_train` kills it, `test_processes` divides it."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from lightning import LightningModule, Trainer
from PIL import Image
from torch.utils.data import Dataset
from toys import SILENT, training

from datamodules.cached import Cached
from datamodules.datasets import ImageFiles
from datamodules.images import Images
from datamodules.store import Store
from explainers.errors import InputError
from explainers.images.transform import ImageTransform
from explainers.learned.sources import Features
from explainers.tve import TVE, TVELoss
from explainers.tve.tve import LightNetwork

STILL = partial(torch.optim.SGD, lr=0.0)


class Noise(Dataset):
    """Images with labels, the last one first."""

    def __init__(self, count, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
        self.labels, self.seed = torch.arange(count).flip(0), seed

    def fingerprint(self):
        return {"image": f"noise {self.seed}", "label": "from the last to the first"}

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index], "label": self.labels[index], "index": torch.tensor(index)}


TRAIN, VAL = partial(Noise, 6), partial(Noise, 3, seed=1)
ONCE = [*range(6), *range(3)]


def stored(folder, train=TRAIN):
    return Cached(Images(train, VAL, batch_size=3, num_workers=0), str(folder), 4)


def fit(module, data, **settings):
    trainer = Trainer(accelerator="cpu", max_epochs=1, log_every_n_steps=1, **SILENT, **settings)
    trainer.fit(module, data)
    return trainer


@pytest.fixture
def computed(monkeypatch):
    """Which rows are computed: (what they provide, index)."""
    rows = []
    for source in (TVELoss, Features):

        def watched(self, batch, epoch=0, call=source.__call__):
            rows.extend(
                ("meta" if "meta" in self.provides else "embedding", index) for index in batch["index"].tolist()
            )
            return call(self, batch, epoch)

        monkeypatch.setattr(source, "__call__", watched)
    return rows


def light(target, grid, blocks, loss=TVELoss, **settings):
    tve = TVE(target, grid, partial(LightNetwork, blocks=blocks, width=12, depth=1))
    return training(tve, loss, STILL, **settings)


def test_networks_that_read_other_blocks_share_the_meta_attributions(target, grid, computed, tmp_path):
    for blocks, expected in (([0, 1], {"meta", "embedding"}), ([1], {"embedding"}), ([0, 1], set())):
        computed.clear()
        fit(light(target, grid, blocks), stored(tmp_path))
        assert sorted(computed) == sorted((provided, index) for provided in expected for index in ONCE)


def test_of_another_backbone_other_images_or_in_another_precision_all_is_computed(
    make_target, grid, computed, tmp_path
):
    other = partial(Noise, 6, seed=2)
    for seed, train, precision, rows in (
        (0, TRAIN, "32-true", ONCE),
        (1, TRAIN, "32-true", ONCE),
        (0, other, "32-true", range(6)),
        (0, TRAIN, "bf16-mixed", ONCE),
    ):
        computed.clear()
        fit(light(make_target(seed=seed), grid, [0]), stored(tmp_path, train), precision=precision)
        assert sorted(computed) == sorted((provided, index) for provided in ("meta", "embedding") for index in rows)


def test_a_batch_holds_the_rows_and_labels_of_its_images(target, grid, tmp_path):
    module, data = light(target, grid, [1], partial(TVELoss, patches_per_image=2)), stored(tmp_path)
    fit(module, data)
    images, seen = Noise(6), set()
    for batch in data.train_dataloader():
        assert "image" not in batch
        assert torch.equal(batch["label"], images.labels[batch["index"]])
        expected = {name: row for source in module.sources for name, row in source(images[batch["index"]]).items()}
        for name, row in expected.items():
            torch.testing.assert_close(batch[name], row, rtol=2e-3, atol=2e-3)  # kept in half precision
        seen |= set(batch["index"].tolist())
    assert seen == set(range(6))


def test_stored_rows_train_and_validate_as_their_images_do(target, grid, tmp_path):
    """In the first epoch, of which the patches are; up to half precision."""
    images = Images(TRAIN, VAL, batch_size=3, num_workers=0)
    metrics_of_runs = []
    for data in (images, stored(tmp_path), stored(tmp_path)):
        torch.manual_seed(0)  # of the network's weights
        metrics = fit(light(target, grid, [1]), data).callback_metrics
        metrics_of_runs.append({name: value.item() for name, value in metrics.items()})
    assert {"train/loss", "val/loss", "val/theorem1_covered"} <= metrics_of_runs[0].keys()
    assert metrics_of_runs[1] == metrics_of_runs[2]
    assert metrics_of_runs[1] == pytest.approx(metrics_of_runs[0], rel=0.02, nan_ok=True)


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
    data = partial(ImageFiles, paths, labels, ImageTransform((8, 8)), **settings)
    module = Reading(*sources)
    trainer = Trainer(accelerator="cpu", max_epochs=1, **SILENT)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(does not have|Found .* in eval mode).*")
        trainer.fit(module, Cached(Images(data, batch_size=1, num_workers=0), str(folder), 4))
    return module.seen


def test_swapped_labels_compute_only_the_rows_that_depend_on_labels(tmp_path, paths):
    read(tmp_path / "rows", paths, Means(), Named())
    means, named = Means(), Named()
    rows = read(tmp_path / "rows", paths, means, named, labels=(0, 1, 2, 2, 1, 0))
    assert (means.computed, named.computed) == ([], list(range(6)))
    assert [rows[i]["named"] for i in range(6)] == [5, 1015, 2025, 2035, 1045, 55]
    assert [rows[i]["label"] for i in range(6)] == [0, 1, 2, 2, 1, 0]


def test_a_corrupt_image_is_decoded_once_and_reported_every_time(tmp_path, paths, monkeypatch):
    paths[2].write_bytes(b"nothing")
    with pytest.warns(UserWarning, match=f"left out: 1 of 6 images, such as {paths[2]}"):
        first = read(tmp_path / "rows", paths, Means(), Named(), skip_corrupt=True)
    monkeypatch.setattr(ImageFiles, "__getitem__", lambda *_: pytest.fail("decoded an image again"))
    with pytest.warns(UserWarning, match=f"left out: 1 of 6 images, such as {paths[2]}"):
        second = read(tmp_path / "rows", paths, Means(), Named(), skip_corrupt=True)
    assert first == second and sorted(first) == [0, 1, 3, 4, 5]


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

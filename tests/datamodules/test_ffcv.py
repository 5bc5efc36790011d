import threading
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from test_images import as_rank, fit, indices

from callbacks.samples import collect_samples
from datamodules.ffcv import FFCV
from datamodules.folders import image_folder
from datamodules.images import Images
from explainers.images.transform import ImageTransform

pytest_plugins = ("written_beton",)

pytestmark = [
    # not importorskip: its import compiles for five seconds, also where none of these tests runs
    pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed: make ffcv"),
    pytest.mark.slow,  # because of that import
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # Numba's finalisers
]

COUNT, HEIGHT, WIDTH = 46, 62, 70
SHOWN = ImageTransform((HEIGHT, WIDTH), crop_pct=0.9)


def failing(*_):
    raise OSError("no space left on device")


def smooth(seed):
    """A picture of a few soft colours: JPEG hardly changes it, and no two are alike."""
    colours = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    size = [(110, 90), (90, 120), (100, 100)][seed % 3]
    return Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC)


def draw(root, names="abc", first=0):
    """A folder of three class folders."""
    for i in range(COUNT):
        (root / names[i % 3]).mkdir(parents=True, exist_ok=True)
        smooth(first + i).save(root / names[i % 3] / f"{i:02}.png")
    return root


@pytest.fixture(scope="module")
def datamodule(beton):
    return partial(FFCV, train=str(beton), val=str(beton), transform=SHOWN, batch_size=8, num_workers=1)


@pytest.fixture(scope="module")
def epoch(datamodule):
    """All batches of an evaluation, kept: FFCV has 5 buffers, so the sixth batch is written over the first."""
    return list(datamodule().val_dataloader())


def torch_twin(folder, **options):
    data = partial(image_folder, folder, SHOWN)
    return Images(data, data, batch_size=8, num_workers=0, **options)


def test_a_batch_is_a_dict_of_contiguous_uint8_images(epoch):
    assert {name: (tuple(value.shape), value.dtype) for name, value in epoch[0].items()} == {
        "image": ((8, 3, HEIGHT, WIDTH), torch.uint8),
        "label": ((8,), torch.int64),
        "index": ((8,), torch.int64),
    }
    assert all(batch["image"].is_contiguous() for batch in epoch)
    assert max(batch["image"].max() for batch in epoch) > 200  # not normalised


def test_callbacks_look_at_the_first_images_of_a_batch(datamodule, epoch):
    seen = collect_samples(SimpleNamespace(datamodule=datamodule()), epoch[0], count=3)
    assert torch.equal(seen["image"], epoch[0]["image"][:3])


def test_evaluation_is_that_of_the_torch_loader(epoch, folder, datamodule):
    """Same samples in the same order. Pixels differ by JPEG only: 2 grey levels on average, on smooth images."""
    expected = list(torch_twin(folder).val_dataloader())
    assert len(epoch) == len(expected) == 6 and datamodule().size("val") == torch_twin(folder).size("val") == COUNT
    for got, wanted in zip(epoch, expected, strict=True):
        assert torch.equal(got["label"], wanted["label"])
        assert torch.equal(got["index"], wanted["index"])
        difference = (got["image"].float() - wanted["image"].float()).abs()
        assert difference.mean((1, 2, 3)).max() < 2
        assert difference.max() < 25


@pytest.mark.usefixtures("interpreted")
def test_training_batches_are_those_of_the_torch_loader(datamodule, folder):
    ours, twin = datamodule(seed=5).train_dataloader(), torch_twin(folder, seed=5).train_dataloader()
    for epoch in (3, 0):
        ours.sampler.set_epoch(epoch), twin.sampler.set_epoch(epoch)
        assert indices(ours) == indices(twin)
    assert len(ours) == len(twin) == COUNT // 8


@pytest.mark.usefixtures("interpreted")
def test_batches_that_are_kept_do_not_change(datamodule):
    """Compared with what they held when they came."""
    kept, summary = [], []
    for batch in datamodule().val_dataloader():
        kept.append(batch)
        summary.append([value.double().sum().item() for value in batch.values()])
    assert [[value.double().sum().item() for value in batch.values()] for batch in kept] == summary


@pytest.mark.usefixtures("interpreted")
def test_no_image_is_counted_twice_across_ranks(datamodule):
    shards = [as_rank(datamodule(), rank, 3).val_dataloader() for rank in range(3)]
    assert [sum(indices(shard), []) for shard in shards] == [[*range(rank, COUNT, 3)] for rank in range(3)]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("at_epoch_end", [True, False], ids=["saved at the epoch's end", "saved after validation"])
def test_a_resumed_run_sees_what_the_whole_run_saw(tmp_path, datamodule, at_epoch_end):
    """FFCV alone counts how often it was iterated, which Lightning does once more than there are epochs."""
    whole, _ = fit(datamodule(), 4, tmp_path / "whole", at_epoch_end=at_epoch_end)
    first, checkpoint = fit(datamodule(), 2, tmp_path / "half", at_epoch_end=at_epoch_end)
    second, _ = fit(datamodule(), 4, tmp_path / "half", resume=checkpoint, at_epoch_end=at_epoch_end)
    assert len({str(batch) for _, batch in whole}) == len(whole) == 4 * (COUNT // 8)
    assert first + second == whole


def test_several_threads_and_no_os_cache_give_the_same_images(datamodule, epoch):
    """More threads than there are cores too, which Numba refuses."""
    got = list(datamodule(num_workers=1000, os_cache=False).val_dataloader())
    assert all(torch.equal(a[name], b[name]) for a, b in zip(got, epoch, strict=True) for name in a)


@pytest.mark.usefixtures("interpreted")
def test_an_unfinished_epoch_leaves_no_thread_and_torch_its_own(datamodule):
    before, torch_threads = set(threading.enumerate()), torch.get_num_threads()
    torch.set_num_threads(2)
    batches = iter(datamodule().train_dataloader())
    next(batches)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(torch_threads)
    (ffcv_thread,) = set(threading.enumerate()) - before
    batches.close()
    ffcv_thread.join(timeout=600)
    assert not ffcv_thread.is_alive()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_ffcvs_thread_is_raised_and_not_waited_for(datamodule, monkeypatch):
    monkeypatch.setattr("ffcv.loader.epoch_iterator.EpochIterator.run_pipeline", failing)
    with pytest.raises(RuntimeError, match="its thread died"):
        next(iter(datamodule().train_dataloader()))


@pytest.mark.usefixtures("interpreted")
def test_a_beton_without_index_is_read_too(tmp_path, datamodule):
    """As other people's scripts write them, with fields that are of no interest here."""
    from ffcv.fields import FloatField, IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    samples = [(float(i), i % 3, np.array(SHOWN.show(smooth(i)))) for i in range(9)]
    fields = {"weight": FloatField(), "label": IntField(), "image": RGBImageField("raw")}
    DatasetWriter(str(tmp_path / "a.beton"), fields, num_workers=1).from_indexed_dataset(samples)
    (batch,) = datamodule(val=str(tmp_path / "a.beton"), eval_batch_size=9).val_dataloader()
    assert batch["index"].tolist() == list(range(9)) and batch["label"].tolist() == [0, 1, 2] * 3
    assert batch["image"].shape == (9, 3, HEIGHT, WIDTH)

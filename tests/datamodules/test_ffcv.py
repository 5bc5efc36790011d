"""FFCV: the batches of the torch loader; a .beton file is whole or not there, and damage is named."""

import errno
import json
import os
import signal
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from fork_server import fork, join
from PIL import Image
from test_images import as_rank, fit, indices

from datamodules import write_beton as writing
from datamodules.beton import check_beton
from datamodules.ffcv import FFCV
from datamodules.folders import image_folder
from datamodules.images import Images
from datamodules.write_beton import main, write_beton
from explainers.errors import InputError
from explainers.images.decoding import CorruptImage
from explainers.images.transform import ImageTransform

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
def folder(tmp_path_factory):
    return draw(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def beton(folder):
    path = folder.parent / "whole.beton"
    assert write_beton(folder, path, SHOWN, workers=2) == COUNT
    return path


@pytest.fixture
def interpreted():
    """The same code without Numba, which would compile each loader again, for longer than it loads these images."""
    from ffcv.pipeline.compiler import Compiler

    Compiler.set_enabled(False)
    yield
    Compiler.set_enabled(True)


@pytest.fixture(scope="module")
def datamodule(beton):
    return partial(FFCV, train=str(beton), val=str(beton), transform=SHOWN, batch_size=8, num_workers=1)


def torch_twin(folder, **options):
    data = partial(image_folder, folder, SHOWN)
    return Images(data, data, batch_size=8, num_workers=0, **options)


def test_evaluation_is_that_of_the_torch_loader(folder, datamodule):
    """Same samples in the same order. Pixels differ by JPEG only: 2 grey levels on average, on smooth images.

    All batches are kept: FFCV has 5 buffers, so the sixth batch is written over the first.
    """
    epoch, expected = list(datamodule().val_dataloader()), list(torch_twin(folder).val_dataloader())
    assert len(epoch) == len(expected) == 6 and datamodule().size("val") == torch_twin(folder).size("val") == COUNT
    for got, wanted in zip(epoch, expected, strict=True):
        assert got.keys() == {"image", "label", "index"} and got["label"].dtype == got["index"].dtype == torch.int64
        assert torch.equal(got["label"], wanted["label"]) and torch.equal(got["index"], wanted["index"])
        assert got["image"].dtype == torch.uint8 and got["image"].is_contiguous()
        difference = (got["image"].float() - wanted["image"].float()).abs()
        assert difference.mean((1, 2, 3)).max() < 2 and difference.max() < 25


@pytest.mark.usefixtures("interpreted")
def test_training_batches_are_those_of_the_torch_loader(datamodule, folder):
    ours, twin = datamodule(seed=5).train_dataloader(), torch_twin(folder, seed=5).train_dataloader()
    for epoch in (3, 0):
        ours.sampler.set_epoch(epoch), twin.sampler.set_epoch(epoch)
        assert indices(ours) == indices(twin)
    assert len(ours) == len(twin) == COUNT // 8


@pytest.mark.usefixtures("interpreted")
def test_no_image_is_counted_twice_across_ranks(datamodule):
    shards = [as_rank(datamodule(), rank, 3).val_dataloader() for rank in range(3)]
    assert [sum(indices(shard), []) for shard in shards] == [[*range(rank, COUNT, 3)] for rank in range(3)]


@pytest.mark.usefixtures("interpreted")
def test_a_resumed_run_sees_what_the_whole_run_saw(tmp_path, datamodule):
    """FFCV alone counts how often it was iterated, which Lightning does once more than there are epochs."""
    whole, _ = fit(datamodule(), 4, tmp_path / "whole")
    first, checkpoint = fit(datamodule(), 2, tmp_path / "half")
    second, _ = fit(datamodule(), 4, tmp_path / "half", resume=checkpoint)
    assert len({str(batch) for _, batch in whole}) == len(whole) == 4 * (COUNT // 8)
    assert first + second == whole


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


def test_a_truncated_beton_is_an_error(tmp_path, beton):
    content, cut = beton.read_bytes(), tmp_path / "cut.beton"
    cut.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"cut.beton is not a complete .beton .* got .*; write it again: python -m"):
        FFCV(val=str(cut), transform=SHOWN).setup("validate")


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("version", "expected version 2"),
        ("num_samples", "expected .* samples and a table of them"),
        ("alloc_table_ptr", "expected 46 samples and a table of them"),
        ("kind of a field", "expected the fields image"),
        ("place of an image", "expected stored pixels for every image, got 1 images without"),
        ("end of a region", "expected all data before byte .*, got 1 regions that end after it"),
    ],
)
def test_a_damaged_beton_is_an_error(tmp_path, beton, place, expected):
    from ffcv.reader import Reader
    from ffcv.types import FieldDescType, HeaderType

    header, content = Reader(str(beton)).header, bytearray(beton.read_bytes())
    samples = HeaderType.itemsize + 3 * FieldDescType.itemsize
    position = {
        "kind of a field": HeaderType.itemsize,
        "place of an image": samples + 8 + 3,
        "end of a region": int(header["alloc_table_ptr"]) + 16 + 5,
    }.get(place) or HeaderType.fields[place][1] + (3 if place == "num_samples" else 1)
    content[position] ^= 0x55
    broken = tmp_path / "broken.beton"
    broken.write_bytes(content)
    assert check_beton(beton) == COUNT
    with pytest.raises(ValueError, match=expected):
        check_beton(broken)


def test_a_page_that_was_written_in_part_is_an_error(tmp_path, beton):
    """FFCV ignores how much of a page a full disk took, and appends the rest: all later images would be shifted."""
    from ffcv.reader import Reader
    from ffcv.types import HeaderType

    table, content = int(Reader(str(beton)).header["alloc_table_ptr"]), bytearray(beton.read_bytes())
    del content[table - 1000 : table]  # zeros, after the last image of the page
    position = HeaderType.fields["alloc_table_ptr"][1]
    content[position : position + 8] = (table - 1000).to_bytes(8, "little")
    (tmp_path / "a.beton").write_bytes(content)
    with pytest.raises(InputError, match="expected whole pages of 8388608 bytes, got a table at byte"):
        check_beton(tmp_path / "a.beton")


class DyingImages(writing.StoredImages):
    """The process that comes to the tenth image dies, as when there is no memory left."""

    def __getitem__(self, index):
        return os._exit(9) if index == 10 else super().__getitem__(index)


def full_disk(*_):
    raise OSError(errno.ENOSPC, "no space left on device")


@pytest.mark.parametrize(
    ("target", "replacement", "error"),
    [
        ("datamodules.write_beton.StoredImages", DyingImages, RuntimeError),
        ("ffcv.memory_allocator.MemoryAllocator.flush_page", full_disk, OSError),
        ("os.fsync", failing, OSError),
    ],
    ids=["a process dies", "the disk is full", "the disk was full, said late"],
)
def test_a_run_that_fails_ends_and_leaves_no_file(tmp_path, folder, monkeypatch, target, replacement, error):
    monkeypatch.setattr(target, replacement)
    with pytest.raises(error):
        write_beton(folder, tmp_path / "a.beton", SHOWN, workers=2)
    assert list(tmp_path.iterdir()) == []


def write_and_die(replacement, folder, out):
    own, names = Path.replace, []

    def replace(path, target):
        names.append(target)
        return os.kill(os.getpid(), signal.SIGKILL) if len(names) == replacement else own(path, target)

    Path.replace = replace
    write_beton(folder, out, SHOWN, limit=6, workers=1)


def kill_writers(folder, kills):
    """Kill a writer as it gives a file its final name: the description is the first, the images are the second."""
    import_module("ffcv.writer")  # once for all of them
    for replacement, out in kills:
        process = fork(write_and_die, replacement, folder, out)
        join(process)
        assert process.exitcode == -signal.SIGKILL


@pytest.fixture(scope="module")
def killed(tmp_path_factory, folder):
    """Files whose writer was killed: before the description was whole; before the images; so, beside earlier ones."""
    root = tmp_path_factory.mktemp("killed")
    outs = [root / name / "a.beton" for name in ("description", "images", "earlier")]
    for out in outs:
        out.parent.mkdir()
    write_beton(draw(root / "others", names="xyz", first=100), outs[2], SHOWN, limit=6, workers=1)
    process = fork(kill_writers, folder, list(zip((1, 2, 2), outs, strict=True)))
    join(process)
    assert process.exitcode == 0
    return outs


def test_a_killed_run_leaves_nothing_that_looks_whole_and_the_next_removes_it(killed, folder):
    description, images, _ = killed
    assert not description.exists() and len(list(description.parent.iterdir())) == 2  # both are unfinished
    names = {path.name for path in images.parent.iterdir() if not path.name.startswith(".")}
    assert names == {"a.beton.json"}
    with pytest.raises(InputError, match="expected a .beton file .*a.beton, got none; write it"):
        FFCV(val=str(images), transform=SHOWN).setup("validate")
    other = images.parent / ".a.b.123.unfinished.beton"  # of another run, which writes a.b.beton
    other.touch()
    assert write_beton(folder, images, SHOWN, limit=4, workers=1) == 4
    assert {path.name for path in images.parent.iterdir()} == {"a.beton", "a.beton.json", other.name}
    assert check_beton(images) == 4


def test_a_run_killed_between_description_and_images_is_noticed(killed):
    """Then the file is the earlier one, which the new description does not fit, though it is as long."""
    out = killed[2]
    assert check_beton(out) == 6
    with pytest.raises(
        InputError, match=r"a.beton and .*a.beton.json to be written together, got .* write both again: "
    ):
        FFCV(val=str(out), transform=SHOWN).setup("validate")


@pytest.mark.usefixtures("interpreted")
def test_the_writer_names_a_corrupt_image_or_leaves_it_out(tmp_path):
    (tmp_path / "images" / "c").mkdir(parents=True)
    for i in range(5):
        smooth(i).save(tmp_path / "images" / "c" / f"{i}.png")
    (tmp_path / "images" / "c" / "2.png").write_bytes(b"nothing")
    out = tmp_path / "a.beton"
    with pytest.raises(CorruptImage, match=r"2.png: expected an image, got 7 bytes"):
        write_beton(tmp_path / "images", out, SHOWN, workers=1)
    assert not out.exists()
    with pytest.warns(UserWarning, match="left out: .*2.png"):
        assert write_beton(tmp_path / "images", out, SHOWN, workers=1, skip_corrupt=True) == 4
    (batch,) = FFCV(val=str(out), transform=SHOWN, eval_batch_size=64, num_workers=1).val_dataloader()
    assert batch["index"].tolist() == [0, 1, 2, 3]
    intact = image_folder(tmp_path / "images", SHOWN)
    expected = torch.stack([intact[i]["image"] for i in (0, 1, 3, 4)]).float()
    assert (batch["image"].float() - expected).abs().mean((1, 2, 3)).max() < 2


def test_a_file_of_another_transform_is_said_and_one_of_another_size_refused(beton):
    FFCV(val=str(beton), transform=SHOWN).setup("validate")
    other = replace(SHOWN, resize="squash")
    with pytest.warns(
        UserWarning, match=r"whole.beton was .* another data.transform, transform.resize: squash → center$"
    ):
        FFCV(val=str(beton), transform=other).setup("validate")
    with pytest.raises(InputError, match=r"expected images of 70 × 62 pixels, as data.transform .* got 62 × 70; write"):
        FFCV(val=str(beton), transform=replace(SHOWN, size=(70, 62))).setup("validate")


def test_classes_that_differ_between_training_and_validation_are_an_error(tmp_path, beton):
    """A file that lacks the first class shifts the labels of all others."""
    val = tmp_path / "val.beton"
    write_beton(draw(tmp_path / "images", names="bbc"), val, SHOWN, workers=1)
    with pytest.raises(InputError, match=r"got 3 and 2 that differ in \['a'\]: labels number .*; write .* again"):
        FFCV(train=str(beton), val=str(val), transform=SHOWN).setup("fit")
    FFCV(train=str(beton), val=str(beton), transform=SHOWN).setup("fit")
    FFCV(train=str(beton), val=str(val), transform=SHOWN).setup("validate")


@pytest.mark.parametrize("content", ["[]", '{"classes": 3}'])
def test_a_description_that_cannot_be_read_is_named(tmp_path, beton, content):
    out = tmp_path / "a.beton"
    out.write_bytes(beton.read_bytes())
    Path(f"{out}.json").write_text(content)
    with pytest.raises(InputError, match=r"a.beton.json.*write it again: python -m"):
        FFCV(val=str(out), transform=SHOWN).setup("validate")


def test_a_fingerprint_is_that_of_the_file_and_tells_its_transform(tmp_path, beton):
    def fingerprint(path=beton):
        return FFCV(val=str(path), transform=SHOWN).fingerprint("val")

    copy, other = tmp_path / "a.beton", tmp_path / "b.beton"
    copy.write_bytes(beton.read_bytes())
    content = bytearray(beton.read_bytes())
    content[9_000_000] ^= 1
    other.write_bytes(content)
    first = fingerprint()
    assert first["images"] == str(COUNT) and first["transform"] == json.loads(json.dumps(asdict(SHOWN)))
    assert fingerprint(copy) == first | {"transform": asdict(SHOWN)}  # without a description
    assert fingerprint(other)["image"] != first["image"] and fingerprint(other)["label"] != first["label"]


def test_the_command_writes_what_a_model_sees(tmp_path, folder):
    main([str(folder), str(tmp_path / "a.beton"), "--limit", "6", "--model", "test_vit", "--workers", "1"])
    assert check_beton(tmp_path / "a.beton") == 6
    with pytest.raises(SystemExit, match="InputError: .*quality=300$"):
        main([str(folder), str(tmp_path / "b.beton"), "--model", "test_vit", "--quality", "300"])

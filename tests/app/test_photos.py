"""Images as people have them become the square that a model sees, or one line that says what to do."""

import os
import stat
from contextvars import Context
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.ExifTags import Base

from explainers.app.photos import decode_batches, decode_seen, is_single, list_photos
from explainers.errors import InputError
from explainers.images.bands import PixelFormat
from explainers.images.transform import ImageTransform
from explainers.runtime import progress

PIXELS = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
IMAGE = Image.fromarray(PIXELS)


def square(images, size=32):
    (photo,) = list_photos(images)
    return decode_seen(photo, ImageTransform((size, size)), PixelFormat())[0]


@pytest.fixture
def file(tmp_path):
    IMAGE.save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def test_every_form_of_an_image_gives_the_same_square(file):
    expected = square(file)
    assert expected.shape == (3, 32, 32) and expected.dtype == torch.uint8
    forms = [str(file), IMAGE, Image.open(file), PIXELS, PIXELS.transpose(2, 0, 1), torch.from_numpy(PIXELS)]
    for form in [*forms, torch.from_numpy(PIXELS).permute(2, 0, 1), [PIXELS], (str(file),), iter([file]), PIXELS[None]]:
        assert torch.equal(square(form), expected)


def test_grey_transparent_cmyk_and_16_bits_are_shown_as_viewers_show_them(tmp_path):
    grey = PIXELS[..., 0]
    expected = square(np.stack([grey] * 3, -1))
    for form in (grey, grey[..., None], grey[None], torch.from_numpy(grey), Image.fromarray(grey)):
        assert torch.equal(square(form), expected)
    assert torch.equal(square(grey.astype(np.uint16) * 257), expected)
    clear = np.concatenate([PIXELS, np.zeros_like(PIXELS[..., :1])], -1)
    assert (square(clear) == 255).all()
    IMAGE.convert("CMYK").save(tmp_path / "a.jpg", quality=95)
    assert (square(tmp_path / "a.jpg").float() - square(IMAGE).float()).abs().mean() < 25


def test_an_image_that_is_already_open_is_turned_upright_and_stays_as_it_is(tmp_path):
    exif = Image.Exif()
    exif[Base.Orientation] = 6
    IMAGE.save(tmp_path / "a.png", exif=exif)
    image = Image.open(tmp_path / "a.png")
    assert torch.equal(square(image), square(tmp_path / "a.png"))
    assert torch.equal(square(image), square(np.rot90(PIXELS, -1)))
    assert image.size == IMAGE.size and np.array_equal(np.array(image), PIXELS)


def test_a_folder_is_read_with_all_folders_below_it_and_the_others_are_named(tmp_path):
    for name in ("b/2.png", "b/1.jpg", "a.webp", ".ipynb_checkpoints/2-checkpoint.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        IMAGE.save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.warns(UserWarning, match=r"left out: 1 file \((notes.txt|2-checkpoint.png)\) that") as warned:
        photos = list_photos(tmp_path)
    assert [photo.name for photo in photos] == ["a.webp", "b/1.jpg", "b/2.png"] and len(warned) == 2
    mixed = list_photos([tmp_path / "a.webp", PIXELS, IMAGE])
    assert [photo.name for photo in mixed] == ["a.webp", "image 1", "image 2"]


def test_pipes_sockets_loops_of_links_and_closed_folders_are_left_out_and_named(tmp_path, monkeypatch):
    IMAGE.save(tmp_path / "a.png")
    os.mkfifo(tmp_path / "pipe.jpg")
    os.mknod(tmp_path / "socket.jpg", stat.S_IFSOCK | 0o600)
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    (tmp_path / "gone.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def scandir(folder):
        if Path(folder).name == "closed":
            raise PermissionError(13, "Permission denied", folder)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scandir)  # because root may read every folder
    with pytest.warns(UserWarning, match=r"^left out: 5 files \(gone.jpg, .*, ...\) that cannot be read: "):
        assert [photo.name for photo in list_photos(tmp_path)] == ["a.png"]
    for name in ("pipe.jpg", "socket.jpg", "loop.jpg", "gone.jpg"):
        with pytest.raises(InputError, match=f"{name}': it is a pipe, socket or device, or a link that leads nowhere"):
            list_photos(tmp_path / name)


def test_one_image_is_told_from_several(file):
    assert all(map(is_single, (str(file), file, IMAGE, PIXELS, torch.from_numpy(PIXELS), "gone.png")))
    assert not any(map(is_single, (file.parent, [file], (), PIXELS[None], torch.from_numpy(PIXELS)[None])))


def test_passes_within_a_batch_move_the_bar(file, monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0)

    def decode():
        for _ in decode_batches(list_photos([file, file]), ImageTransform((8, 8)), PixelFormat(), batch=2, passes=10):
            progress.advance(5)
            progress.advance(100)

    Context().run(decode)  # in which nobody is watching, as generators that earlier tests left open do
    lines = [line.partition(" images")[0] for line in capsys.readouterr().err.splitlines()]
    assert list(dict.fromkeys(lines)) == ["explaining: 0 of 2", "explaining: 0.5 of 2", "explaining: 2 of 2"]


def test_a_strip_needs_no_memory_for_its_whole_length():
    assert square(Image.new("RGB", (100_000, 2), "red"), 64).float().mean((1, 2)).tolist() == [255, 0, 0]

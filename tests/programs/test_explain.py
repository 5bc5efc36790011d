"""`python eval.py experiment=explain`: heatmaps of photos of any kind."""

import io
import json
import os
from contextlib import redirect_stdout

import numpy as np
import pytest
from commands import QUIET, evaluate
from PIL import Image

from explainers.saved.files import file_name

EXPLAIN = ("experiment=explain", "target=tiny", "tasks.photos.data.num_workers=0", *QUIET)
KINDS = ("animated", "caf\ufffd", "cmyk", "grey", "huge", "jpeg2000", "modern", "palette", "targa", "tiny")
KINDS += ("below/rotated", "transparent", "x" * 229)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    colours = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    image = Image.fromarray(colours).resize((120, 80))
    image.convert("L").save(folder / "grey.jpg")
    image.convert("CMYK").save(folder / "cmyk.jpg")
    image.convert("RGBA").save(folder / "transparent.png")
    image.convert("P").save(folder / "palette.png")
    image.resize((3, 2)).save(folder / "tiny.png")
    image.resize((2000, 1500)).save(folder / "huge.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90°
    (folder / "below").mkdir()
    image.save(folder / "below" / "rotated.jpg", exif=exif)
    image.save(folder / "animated.gif", save_all=True, append_images=[image.rotate(180)])
    for name in ("jpeg2000.jp2", "modern.avif", "targa.tga", "x" * 229 + ".png"):
        image.save(folder / name)
    image.save(os.fsencode(folder) + b"/caf\xe9.png", "PNG")  # a name in Latin-1
    (folder / "broken.jpg").write_bytes(b"no image")
    Image.fromarray(np.full((9, 9), 0.5, np.float32)).save(folder / "float.tif")
    for name in ("a.heic", "film.mov", ".hidden"):
        (folder / name).write_bytes(b"something else")
    return folder


@pytest.fixture(scope="module")
def explained(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("explained")
    with pytest.warns(UserWarning, match="left out: ") as warned, redirect_stdout(io.StringIO()) as printed:
        evaluate(*EXPLAIN, f"data.root={photos}", "methods=[DecompX-PLUS,Chance]", folder=folder)
    (folder / "printed").write_text(printed.getvalue())
    (folder / "warned").write_text("\n".join(str(each.message) for each in warned))
    return folder


@pytest.mark.slow
def test_every_photo_that_can_be_read_has_a_picture_of_each_explainer(explained):
    found = {path.name.split("_", 1)[1] for path in (explained / "overlays" / "photos").iterdir()}
    expected = {
        f"{file_name(kind.replace('/', '_'), 120)}_{name}.png" for kind in KINDS for name in ("DecompX-PLUS", "Chance")
    }
    assert found == expected
    for path in (explained / "overlays" / "photos").iterdir():
        assert min(Image.open(path).size) > 448


@pytest.mark.slow
def test_the_gallery_shows_them_with_the_model_s_classes(explained):
    page = (explained / "gallery.html").read_text()
    assert all(f'"name":"{kind}.' in page for kind in KINDS if kind.isascii()) and '"class 3"' in page
    assert (explained / "photos.png").read_bytes().startswith(b"\x89PNG")
    row = json.loads((explained / "results.json").read_text())["results"]["photos"]["DecompX-PLUS"]
    assert row["forward_passes"] == 1 and "fidelity_plus" not in row and "accuracy" not in row


@pytest.mark.slow
def test_what_is_left_out_is_counted_and_named(explained):
    warned = (explained / "warned").read_text()
    assert (
        "left out: 2 files (a.heic, film.mov) that Pillow does not read; for .heic, pip install pillow-heif" in warned
    )
    assert "broken.jpg: expected an image, got 8 bytes" in warned and "float.tif: expected 8 or 16 bits" in warned
    assert "skip_corrupt" not in warned
    told = "photos: 13 of 15 images; left out: 2 files (broken.jpg, float.tif) that cannot be read"
    assert told in (explained / "printed").read_text().splitlines()
    assert json.loads((explained / "results.json").read_text())["identity"]["photos"]["images"] == 13


def test_a_folder_without_readable_images_is_told(tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.jpg").write_bytes(b"no image")
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(SystemExit, match="error: expected at least 1 readable image, got 1 that are all corrupt"),
    ):
        evaluate(*EXPLAIN, f"data.root={tmp_path / 'bad'}", folder=tmp_path / "run")
    assert not (tmp_path / "run" / "results.json").exists()

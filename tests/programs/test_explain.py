"""`python eval.py experiment=explain`: heatmaps of photos of any kind."""

import json

import numpy as np
import pytest
from commands import QUIET, evaluate
from PIL import Image

EXPLAIN = ("experiment=explain", "target=tiny", "tasks.photos.data.num_workers=0", *QUIET)
KINDS = ("broken", "cmyk", "grey", "huge", "palette", "rotated", "tiny", "transparent")


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
    image.resize((4000, 3000)).save(folder / "huge.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90°
    (folder / "below").mkdir()
    image.save(folder / "below" / "rotated.jpg", exif=exif)
    (folder / "broken.jpg").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def explained(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("explained")
    with pytest.warns(UserWarning, match="left out: .*broken.jpg"):
        evaluate(*EXPLAIN, f"data.root={photos}", "methods=[DecompX-PLUS,Chance]", folder=folder)
    return folder


def test_every_photo_that_can_be_read_has_a_picture_of_each_explainer(explained):
    found = {path.name.split("_", 1)[1] for path in (explained / "overlays" / "photos").iterdir()}
    assert found == {f"{kind}_{name}.png" for kind in KINDS[1:] for name in ("DecompX-PLUS", "Chance")}
    for path in (explained / "overlays" / "photos").iterdir():
        assert Image.open(path).size == (64, 64)


def test_the_gallery_shows_them_with_the_model_s_classes(explained):
    page = (explained / "gallery.html").read_text()
    assert all(f'"name":"{kind}.' in page for kind in KINDS[1:]) and '"class 3"' in page
    assert (explained / "photos.png").read_bytes().startswith(b"\x89PNG")
    row = json.loads((explained / "results.json").read_text())["results"]["photos"]["DecompX-PLUS"]
    assert row["forward_passes"] == 1 and "fidelity_plus" not in row and "accuracy" not in row


def test_a_folder_without_images_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="error: expected images below .*empty, got none; correct the folders"):
        evaluate(*EXPLAIN, f"data.root={tmp_path / 'empty'}", folder=tmp_path / "run")


def test_a_folder_without_readable_images_is_told(tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.jpg").write_bytes(b"no image")
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(SystemExit, match="error: expected at least 1 readable image, got 1 that are all corrupt"),
    ):
        evaluate(*EXPLAIN, f"data.root={tmp_path / 'bad'}", folder=tmp_path / "run")
    assert not (tmp_path / "run" / "results.json").exists()

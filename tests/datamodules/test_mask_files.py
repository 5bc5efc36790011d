"""Masks follow their image through resize and crop, and what is missing or does not fit is named."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from PIL.ExifTags import Base

from datamodules.masks import masked_images
from datamodules.truth import Boxes, Crop
from explainers.images.transform import ImageTransform


def write_pair(root, name="a", size=(90, 60), box=(30, 12, 66, 36), scale=1, mode="1", ending="png"):
    """A white object on black, and its mask in a mode of Pillow, at another scale."""
    picture = np.zeros((size[1], size[0]), dtype=np.uint8)
    picture[box[1] : box[3], box[0] : box[2]] = 255
    for folder in ("images", "masks"):
        (root / folder / name).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).convert("RGB").save(root / "images" / f"{name}.bmp")
    mask = Image.fromarray(picture).resize((round(size[0] * scale), round(size[1] * scale)), Image.Resampling.NEAREST)
    {
        "0 and 1": lambda: Image.fromarray(np.asarray(mask) // 255),
        "16 bits": lambda: Image.fromarray(np.asarray(mask).astype(np.uint16) * 257),
    }.get(mode, lambda: mask.convert(mode))().save(root / "masks" / f"{name}.{ending}")


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "0 and 1", "16 bits"])
def test_the_mask_lies_on_the_object(tmp_path, mode):
    write_pair(tmp_path, mode=mode)
    sample = masked_images(tmp_path, ImageTransform((40, 40), crop_pct=0.8, rounds=False))[0]
    assert torch.equal(sample["image"][0] > 127, sample["truth"])
    assert sample["truth"].dtype == torch.bool and (sample["label"], sample["index"]) == (-1, 0)


@pytest.mark.parametrize(("size", "scale"), [((40, 30), 0.5), ((30, 47), 3), ((64, 64), 1)])
def test_each_pixel_is_that_of_the_mask_at_its_centre(tmp_path, size, scale):
    width, height = size
    write_pair(tmp_path, size=size)
    mask = np.random.default_rng(0).random((round(height * scale), round(width * scale))) < 0.5
    Image.fromarray(mask).save(tmp_path / "masks" / "a.png")
    truth = masked_images(tmp_path, ImageTransform((24, 24), crop_pct=0.8, rounds=False))[0]["truth"]
    rows, columns = height * 30 // min(size), width * 30 // min(size)
    for row in range(24):
        for column in range(24):
            y = ((rows - 24) // 2 + row + 0.5) / rows * len(mask)
            x = ((columns - 24) // 2 + column + 0.5) / columns * len(mask[0])
            assert truth[row, column] == mask[int(y + 1e-9), int(x + 1e-9)]


@pytest.mark.parametrize(
    "transform",
    [
        ImageTransform((24, 36), crop_pct=0.8),
        ImageTransform((36, 24), "squash", 0.9),
        ImageTransform((24, 24), "border"),
        ImageTransform((24, 36), "border", 0.9, rounds=False),
    ],
    ids=lambda transform: transform.resize,
)
def test_masks_and_boxes_lie_where_the_transform_shows_the_photo(tmp_path, transform):
    """The centre of every pixel, carried back to the photo by the box of what is seen; nothing lies beside it."""
    size = (31, 53) if transform.resize == "squash" else (47, 30)
    write_pair(tmp_path, size=size)
    mask = np.random.default_rng(0).random(size[::-1]) < 0.5
    Image.fromarray(mask).save(tmp_path / "masks" / "a.png")
    sample = masked_images(tmp_path, transform)[0]
    assert torch.equal(sample["image"], transform(Image.open(tmp_path / "images" / "a.bmp")))
    boxes = [(3.3, 2.1, 17.9, 14.6), (20.2, 16.7, 29.9, 52.5)]
    inside = Boxes([boxes]).mask(0, Crop(size[::-1], transform))
    left, top, right, bottom = transform.box(*size)
    (height, width), seen = transform.size, 0
    for row in range(height):
        for column in range(width):
            y, x = top + (row + 0.5) * (bottom - top) / height, left + (column + 0.5) * (right - left) / width
            on_photo = 0 <= y < size[1] and 0 <= x < size[0]
            assert sample["truth"][row, column] == (on_photo and mask[int(y), int(x)])
            assert inside[row, column] == any(x0 <= x < x1 and y0 <= y < y1 for x0, y0, x1, y1 in boxes)
            seen += on_photo
    assert (seen < height * width) == (min(left, top) < -1e-9)


def test_grey_edges_are_cut_where_the_values_of_the_object_say(tmp_path):
    write_pair(tmp_path)
    Image.fromarray(np.array([[0, 100, 127, 128, 200, 255]] * 4, dtype=np.uint8)).save(tmp_path / "masks" / "a.png")
    found = masked_images(tmp_path, ImageTransform((60, 60)), mask_value="128-255")
    assert found.fingerprint()["truth"] != masked_images(tmp_path, ImageTransform((60, 60))).fingerprint()["truth"]
    truth = found[0]["truth"]
    assert truth.any(0).nonzero()[0] == 30 and torch.equal(truth, truth[:1].expand(60, 60))


def test_pairs_have_one_name_in_any_folder_and_what_is_alone_is_counted_and_named(tmp_path):
    for name in ("b", "deep/a", "deep/c"):
        write_pair(tmp_path, name)
    (tmp_path / "masks" / "b.png").rename(tmp_path / "masks" / "z.png")
    with pytest.warns(UserWarning, match=r"left out: 1 file \(.\.\w+\) without (a mask|an image)") as warned:
        dataset = masked_images(tmp_path, ImageTransform((8, 8)))
    assert sorted(str(each.message) for each in warned) == [
        "left out: 1 file (b.bmp) without a mask",
        "left out: 1 file (z.png) without an image",
    ]
    assert [dataset.path(i).name for i in range(len(dataset))] == ["a.bmp", "c.bmp"]
    assert dataset.classes == [] and dataset.labels.tolist() == [-1, -1]


def test_a_limit_keeps_images_with_their_masks(tmp_path):
    for i in range(5):
        write_pair(tmp_path, str(i), box=(10 * i, 0, 10 * i + 20, 60))
    dataset = masked_images(tmp_path, ImageTransform((40, 40), crop_pct=0.8, rounds=False), limit=2)
    for i in range(2):
        assert torch.equal(dataset[i]["image"][0] > 127, dataset[i]["truth"])
    assert not torch.equal(dataset[0]["truth"], dataset[1]["truth"])


def test_boxes_may_be_in_pixels_of_a_larger_image():
    crop = Crop((30, 40), ImageTransform((30, 30)))
    small, large = Boxes([[(10, 3, 20, 15)]]), Boxes([[(20, 6, 40, 30)]], [(60, 80)])
    assert torch.equal(small.mask(0, crop), large.mask(0, crop)) and small.mask(0, crop).any()


def test_a_fingerprint_changes_with_the_masks_alone(tmp_path):
    write_pair(tmp_path)
    before = masked_images(tmp_path, ImageTransform((8, 8))).fingerprint()
    write_pair(tmp_path, ending="tif")
    (tmp_path / "masks" / "a.png").unlink()
    other_file = masked_images(tmp_path, ImageTransform((8, 8))).fingerprint()
    assert before.keys() == other_file.keys() == {"image", "label", "truth"}
    assert {name for name in before if before[name] != other_file[name]} == {"truth"}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["shown", "stored"])
@pytest.mark.situation(28)
def test_a_mask_follows_the_exif_orientation_of_its_image(tmp_path, orientation, kind):
    """It is drawn on what programs show; on the stored rows only where its size says so."""
    write_pair(tmp_path)
    stored = Image.open(tmp_path / "images" / "a.bmp")
    exif = Image.Exif()
    exif[Base.Orientation] = orientation
    (tmp_path / "images" / "a.bmp").unlink()
    stored.save(tmp_path / "images" / "a.png", exif=exif)
    shown = ImageOps.exif_transpose(Image.open(tmp_path / "images" / "a.png"))
    (shown if kind == "shown" else stored).convert("1").save(tmp_path / "masks" / "a.png")
    unclear = orientation in (2, 3, 4)
    line = rf"^a.png is turned by its EXIF orientation \({orientation}\)"
    with pytest.warns(UserWarning, match=line) if unclear else nullcontext():
        sample = masked_images(tmp_path, ImageTransform((40, 40), crop_pct=0.8, rounds=False))[0]
    assert torch.equal(sample["image"][0] > 127, sample["truth"]) == (kind == "shown" or not unclear)

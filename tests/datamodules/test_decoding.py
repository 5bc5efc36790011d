"""Image files of every mode become the pixels that a viewer shows, or one line that says why not."""

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms
from PIL.ExifTags import Base
from test_datasets import noise

from datamodules.datasets import ImageFiles
from datamodules.folders import image_folder
from datamodules.ilsvrc import annotated_images
from explainers.images.decoding import (
    CorruptImage,
    convert_to_rgb,
    decode,
    decode_upload,
    read_image,
    read_stored_size,
)
from explainers.images.listing import endings
from explainers.images.transform import ImageTransform


@pytest.mark.situation(42)
def test_an_image_of_four_inks_becomes_rgb(tmp_path):
    noise(16, 16).convert("CMYK").save(tmp_path / "0.tif")
    assert np.array_equal(np.array(read_image(tmp_path / "0.tif")), np.array(noise(16, 16)))


RAMP = np.linspace(0, 255, 256).astype(np.uint8).reshape(16, 16)
STORED = {
    "grey": Image.fromarray(RAMP),
    "16 bits": Image.fromarray(RAMP.astype(np.uint16) * 257),  # 0 to 65535
    "16 bits, low byte": Image.fromarray(RAMP.astype(np.uint16) * 256 + 255 - RAMP),
    "32 bits": Image.fromarray(RAMP.astype(np.int32) * 257),
    "palette": Image.fromarray(RAMP).convert("P"),
    "colours": Image.merge("RGB", [Image.fromarray(RAMP)] * 3),
}


@pytest.mark.parametrize("stored", STORED)
def test_whatever_the_mode_the_pixels_are_those_of_8_bits_in_3_equal_channels(tmp_path, stored):
    """Neither cut off at 255, nor wrapped around."""
    (tmp_path / "c").mkdir()
    STORED[stored].save(tmp_path / "c" / ("0.tif" if stored == "32 bits" else "0.png"))
    image = image_folder(tmp_path, ImageTransform((16, 16)))[0]["image"]
    assert image.dtype == torch.uint8
    assert torch.equal(image, torch.from_numpy(RAMP).expand(3, 16, 16))


GREY, OPACITY = Image.fromarray(RAMP), Image.fromarray(RAMP.T.copy())


@pytest.mark.parametrize(
    ("mode", "file"), [("LA", "0.png"), ("RGBA", "0.webp"), ("RGBA", "0.tif"), ("PA", "0.png"), ("PA", "0.tif")]
)
def test_what_is_behind_a_transparent_image_is_white(tmp_path, mode, file):
    stored = Image.merge("LA", [GREY, OPACITY]) if mode == "LA" else Image.merge("RGBA", [GREY] * 3 + [OPACITY])
    if mode == "PA":  # a palette whose first colour is transparent
        stored = Image.fromarray(np.minimum(RAMP, 1)).convert("P")
        stored.putpalette([90, 20, 30, 7, 8, 9])
        stored.info["transparency"] = 0
    stored.save(tmp_path / file, lossless=True)
    got = np.array(read_image(tmp_path / file)).astype(float)
    if mode == "PA":
        seen = file != "0.tif"  # TIFF stores no transparency of palettes
        assert got[0, 0].tolist() == ([255] * 3 if seen else [90, 20, 30]) and got[3, 3].tolist() == [7, 8, 9]
        return
    opacity = RAMP.T / 255
    assert np.abs(got - (RAMP * opacity + 255 * (1 - opacity))[..., None]).max() <= 1


UNREADABLE = {
    "empty": b"",
    "text": b"not an image at all",
    "truncated": None,
    "from 0 to 1": RAMP / np.float32(255),
    "below 0": RAMP.astype(np.int32) - 9,
    "above 16 bits": RAMP.astype(np.int32) * 1000,
    "12 bits in 16": (RAMP.astype(np.int64) * 4095 // 255).astype(np.uint16),  # a high byte of 0 to 15, so black
    "1 bit in 32": RAMP.astype(np.int32) // 255,
}


@pytest.mark.parametrize("stored", UNREADABLE)
def test_what_cannot_be_read_is_refused_or_left_out_if_asked_and_then_without_the_advice_to_do_so(tmp_path, stored):
    path, content = tmp_path / "0.tif", UNREADABLE[stored]
    Image.fromarray(content if isinstance(content, np.ndarray) else RAMP).save(path)
    if not isinstance(content, np.ndarray):
        path.write_bytes(path.read_bytes()[:-90] if content is None else content)
    with pytest.raises(CorruptImage) as error:
        ImageFiles([path], [0], ImageTransform((16, 16)))[0]
    assert str(error.value).startswith(f"{path}: ") and "skip_corrupt=true" in str(error.value)
    assert "\n" not in str(error.value)
    files = ImageFiles([path], [0], ImageTransform((16, 16)), skip_corrupt=True)
    with pytest.warns(UserWarning, match=f"left out: {path}: ") as warned:
        assert files[0] is None and files.corrupt.tolist() == [True]
    assert "skip_corrupt" not in str(warned[0].message)


UPRIGHT = np.arange(48, dtype=np.uint8).reshape(4, 12) * 5
TURNED = {  # orientation → the stored pixels of an image that is UPRIGHT to a viewer
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.T,
    6: UPRIGHT.T[::-1],
    7: UPRIGHT.T[::-1, ::-1],
    8: UPRIGHT.T[:, ::-1],
}


def save_turned(path, orientation, mode="RGB"):
    exif = Image.Exif()
    exif[Base.Orientation] = orientation
    Image.fromarray(np.ascontiguousarray(TURNED[orientation])).convert(mode).save(path, exif=exif, lossless=True)
    return path


@pytest.mark.parametrize(("file", "orientation"), [*(("a.png", turn) for turn in TURNED), ("a.webp", 6), ("a.tif", 6)])
def test_an_image_is_turned_upright_as_viewers_show_it(tmp_path, file, orientation):
    path = save_turned(tmp_path / file, orientation)
    assert np.array_equal(np.array(read_image(path))[..., 0], UPRIGHT)
    image = ImageFiles([path], [0], ImageTransform((4, 4)))[0]["image"]
    assert torch.equal(image, torch.from_numpy(UPRIGHT[:, 4:8].copy()).expand(3, 4, 4))


@pytest.mark.parametrize("orientation", [1, 6])
def test_an_image_with_boxes_stays_as_it_is_stored_because_the_boxes_refer_to_that(tmp_path, orientation):
    save_turned(tmp_path / "a.png", orientation)
    (tmp_path / "annotations.json").write_text(json.dumps([{"file": "a.png", "label": 0, "boxes_xyxy": []}]))
    height, width = TURNED[orientation].shape
    top, left = (height - 4) // 2, (width - 4) // 2
    expected = TURNED[orientation][top : top + 4, left : left + 4].copy()
    sample = annotated_images(tmp_path, ImageTransform((4, 4)))[0]
    assert torch.equal(sample["image"], torch.from_numpy(expected).expand(3, 4, 4))


@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0nonsense",
        b"Exif\0\0MM\0*\0\0\0\x08\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x01\x06\0\0\0\0\0\0\0",  # the orientation is a text
        b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x09\0\0\0\0\0\0",  # 9
        b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x02\0\0\0\x64\0\0\0\0",  # two values, outside the file
    ],
)
def test_broken_metadata_of_a_whole_image_leaves_it_as_it_is_stored(tmp_path, exif):
    noise(16, 12).save(tmp_path / "a.jpg", exif=exif)
    noise(16, 12).save(tmp_path / "b.jpg")
    assert np.array_equal(np.array(read_image(tmp_path / "a.jpg")), np.array(read_image(tmp_path / "b.jpg")))


def test_a_file_that_cannot_be_opened_is_not_a_corrupt_image(tmp_path):
    """Skipping it would hide a missing disk."""
    dataset = ImageFiles([tmp_path / "gone.png"], [0], ImageTransform((8, 8)), skip_corrupt=True)
    with pytest.raises(FileNotFoundError, match="gone.png"):
        dataset[0]


@pytest.mark.parametrize("name", ["photo.jpg", "photo.eps"])
def test_no_other_program_decodes_a_file(name, tmp_path, monkeypatch):
    """Pillow opens EPS by running Ghostscript, whatever the file is called."""
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_: noise(8, 8).im)
    noise(8, 8).save(tmp_path / name, "EPS")
    for read in (read_image, decode, read_stored_size, lambda path: decode_upload(name, path.read_bytes(), 100)):
        with pytest.raises(CorruptImage, match=rf"{name}: expected an image, got .* \(unknown format\)"):
            read(tmp_path / name)
    assert Path(name).suffix not in endings() - {".jpg"}


def test_uploads_are_decoded_to_a_limit():
    """A JPEG is made smaller, other images are refused: both are noticed before any pixel is decoded."""
    files = {kind: io.BytesIO() for kind in ("JPEG", "PNG")}
    for kind, file in files.items():
        noise(300, 200).save(file, kind)
    assert decode_upload("a.jpg", files["JPEG"].getvalue(), 60_000).size == (300, 200)
    assert decode_upload("a.jpg", files["JPEG"].getvalue(), 59_999).size == (150, 100)
    assert decode_upload("a.jpg", files["JPEG"].getvalue(), 1_000).size == (38, 25)
    for name, most in (("JPEG", 900), ("PNG", 59_999)):
        with pytest.raises(CorruptImage, match=rf"^{name}: expected at most .* megapixels, got .*: make it smaller$"):
            decode_upload(name, files[name].getvalue(), most)


def swapped_profile():
    """A colour profile whose red is sRGB's green, and whose green its red: two entries of its table are exchanged."""
    data = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    for number in range(struct.unpack_from(">I", data, 128)[0]):
        start = 132 + 12 * number
        name = bytes(data[start : start + 4])
        data[start : start + 4] = {b"rXYZ": b"gXYZ", b"gXYZ": b"rXYZ"}.get(name, name)
        if name == b"desc":
            (place,) = struct.unpack_from(">I", data, start + 4)
    text = data.index("sRGB".encode("utf-16-be"), place)
    data[text : text + 8] = "swap".encode("utf-16-be")
    return bytes(data)


@pytest.mark.situation(27)
def test_colour_profiles_become_srgb(tmp_path):
    image = Image.new("RGB", (8, 8), (200, 30, 90))
    image.save(tmp_path / "a.png", icc_profile=swapped_profile())
    read = read_image(tmp_path / "a.png")
    assert np.abs(np.array(read)[0, 0].astype(int) - (30, 200, 90)).max() <= 1
    assert convert_to_rgb(read) is not None and np.array_equal(np.array(convert_to_rgb(read)), np.array(read))
    image.save(tmp_path / "b.png", icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    assert np.array_equal(np.array(read_image(tmp_path / "b.png")), np.array(image))
    image.save(tmp_path / "c.png", icc_profile=b"no profile")
    with pytest.warns(UserWarning, match="^left out: a colour profile that cannot be read"):
        assert np.array_equal(np.array(read_image(tmp_path / "c.png")), np.array(image))


@pytest.mark.parametrize("ending", ["tif", "webp", "gif", "png"])
@pytest.mark.situation(29)
def test_the_first_of_several_pages_or_frames_is_read_with_a_warning(tmp_path, ending):
    first, *others = [Image.new("RGB", (16, 16), colour) for colour in ("red", "black", "blue")]
    first.save(tmp_path / f"a.{ending}", save_all=True, append_images=others, lossless=True)
    with pytest.warns(UserWarning, match=f"^a.{ending} has 3 pages or frames: the first is read$"):
        assert read_image(tmp_path / f"a.{ending}").getpixel((8, 8)) == (255, 0, 0)


@pytest.mark.situation(25)
def test_a_large_image_is_read_without_a_word_and_a_larger_one_refused(tmp_path, monkeypatch, recwarn):
    noise(40, 30).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert read_image(tmp_path / "a.png").size == (40, 30) and not recwarn.list
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(CorruptImage, match=r"a.png: expected at most 0.001 megapixels, got 0.0012: cut it into tiles"):
        read_image(tmp_path / "a.png")

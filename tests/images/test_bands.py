"""Bands and bits: what a model of any number of channels sees, beside Pillow and a slow reference."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from refusals import check_refused
from torch import nn

import explainers
from explainers import posthoc
from explainers.app.session import Session
from explainers.errors import InputError
from explainers.images.bands import PixelFormat, find_bands, see_pixels
from explainers.images.decoding import scale_to_16_bits
from explainers.images.transform import ImageTransform
from explainers.models import TargetModel, as_target
from explainers.models.probes import find_statistics

SIX = np.random.default_rng(0).integers(0, 256, (40, 48, 6), dtype=np.uint8)
PHOTO = Image.fromarray(SIX[..., :3])
TRANSFORM = ImageTransform((32, 32), crop_pct=0.9)  # as timm's config of the tiny ViT says
METHODS = "DecompX-PLUS", "RISE", "Saliency"  # which read layers, hide pixels, and go back to them


def vit(channels):
    torch.manual_seed(0)
    size = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    return timm.create_model("vit_tiny_patch16_224", num_classes=4, in_chans=channels, **size).eval()


def six_bands():
    return as_target(vit(6), mean=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], std=0.25)


def grey_net():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)).eval()


@pytest.mark.parametrize("channels", [1, 12])
@pytest.mark.filterwarnings("ignore:VisionTransformer of")
@pytest.mark.situation(10)
def test_a_model_of_any_number_of_channels_sees_its_bands(channels):
    stack = np.concatenate([SIX, SIX], -1)[..., :channels]
    session = Session(vit(channels), "GAE")
    seen = session.explain([stack, stack.transpose(2, 0, 1)], classes=1)
    bands = [TRANSFORM(Image.fromarray(stack[..., band])) for band in range(channels)]
    pixels = torch.cat(bands)[None]
    expected = posthoc.build("GAE", session.target, session.target.grid)(pixels, torch.tensor([1]))[0]
    for explanation in seen:
        torch.testing.assert_close(explanation.heatmap, expected)
        assert explanation.image.shape == (3, 32, 32) and explanation.photo().size == (48, 40)
        assert explanation.picture().width > 0


@pytest.mark.parametrize("channels", [2, 6])
@pytest.mark.filterwarnings("ignore:VisionTransformer of")
@pytest.mark.situation(10)
def test_a_photo_has_too_few_bands(channels):
    with pytest.raises(InputError, match=f"^expected the {channels} channels that the model takes, got .* a GeoTIFF$"):
        explainers.explain(PHOTO, vit(channels), method="GAE")


@pytest.mark.parametrize("method", METHODS)
def test_methods_explain_six_bands_of_16_bits_like_normalised_pixels(method):
    """An image of 8 bits, and the same in 16, have the same heatmaps."""
    target = six_bands()
    eight = torch.from_numpy(SIX[:32, :32]).permute(2, 0, 1)[None].contiguous()
    sixteen = (eight.to(torch.int32) * 257).to(torch.uint16)
    mean, std = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]), 0.25
    torch.testing.assert_close(target.normalise(sixteen), (eight / 255 - mean[:, None, None]) / std)
    one = posthoc.build(method, target, target.grid, {"masks": 40} if method == "RISE" else None)
    maps = [one(images, torch.tensor([2])) for images in (eight, sixteen)]
    assert maps[0].std() > 0
    torch.testing.assert_close(*maps)


def test_bands_of_16_bits_are_resized_and_scaled_as_floats():
    stack = (SIX.astype(np.uint16) * 16)[:32, :32]
    pixels, box = see_pixels(PixelFormat(6, white=4095).convert(stack, "stack"), ImageTransform((32, 32)))
    assert pixels.dtype == torch.uint16 and box == (0, 0, 32, 32)
    expected = torch.from_numpy(stack / 4095).permute(2, 0, 1)
    torch.testing.assert_close(pixels.double() / 65535, expected, atol=1e-5, rtol=0)
    half = see_pixels(
        PixelFormat(6, white=(-1, 1)).convert(np.zeros((8, 32, 32)).transpose(1, 2, 0)[..., :6], "zeros"), TRANSFORM
    )
    assert set(half[0].flatten().tolist()) == {32768}


def claim(path, shape, dtype="<f8"):
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"shape": shape, "fortran_order": False, "descr": dtype})


def save_zip(path):
    with open(path, "wb") as file:
        np.savez(file, a=SIX)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda path: claim(path, (625 * 10**9,)), "mmap length is greater"),  # 5 TB
        (lambda path: claim(path, (-4, 4, 6)), "must be positive|negative dim"),
        (save_zip, "magic string is not correct"),
        (lambda path: np.save(path, np.array([{}])), "Python objects"),
        (lambda path: np.save(path, np.array(["a"])), "of type <U1"),
        (lambda path: np.save(path, SIX * 1j), "of type complex128"),
        (lambda path: path.write_bytes(b""), "EOF"),
    ],
)
def test_arrays_that_are_none_are_refused_and_left_out_of_folders(tmp_path, write, reason):
    np.save(tmp_path / "a.npy", SIX)
    write(tmp_path / "b.npy")
    session = Session(six_bands(), "GAE")
    with pytest.raises(InputError, match=f"^.*/b.npy: expected an array of numbers, got one that .*({reason}).*: give"):
        session.explain(tmp_path / "b.npy")
    with pytest.warns(UserWarning, match=r"left out: 1 file \(b.npy\) that cannot be decoded"):
        assert [each.name for each in session.explain(tmp_path, classes=0)] == ["a.npy"]


@pytest.mark.filterwarnings("ignore:left out. 1 file .notes.txt")
def test_npy_and_tiff_files_hold_the_same_bands(tmp_path):
    tifffile = pytest.importorskip("tifffile", reason="needs tifffile")
    np.save(tmp_path / "a.npy", SIX)
    tifffile.imwrite(tmp_path / "b.tif", SIX.transpose(2, 0, 1), planarconfig="separate", photometric="minisblack")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "c.npy").write_text("no array")
    session = Session(as_target(six_bands(), bands=(5, 3, 0)), "GAE")
    with pytest.warns(UserWarning, match=r"left out: 1 file \(c.npy\)"):
        found = session.explain(tmp_path, classes=0)
    (expected,) = session.explain(SIX, classes=0)
    assert [each.name for each in found] == ["a.npy", "b.tif"]
    for each in found:
        assert torch.equal(each.heatmap, expected.heatmap)
        assert np.array_equal(np.array(each.photo()), SIX[..., [5, 3, 0]])


@pytest.mark.filterwarnings("ignore:VisionTransformer of")
@pytest.mark.situation(11)
def test_a_model_of_one_channel_sees_photos_in_grey():
    target = TargetModel(vit(1)).eval()
    assert target.mean.shape == (1, 1, 1)
    with pytest.warns(UserWarning, match="^colours become grey, because the model takes 1 channel$"):
        explanation = explainers.explain(PHOTO, target, method="GAE")
    grey = TRANSFORM(PHOTO.convert("L"))
    assert torch.equal(explanation.image, grey.expand(3, -1, -1))
    torch.testing.assert_close(explanation.scores, target(grey[None])[0].softmax(-1).detach())
    for mean in (0.5, [0.1307]):
        net = as_target(grey_net(), mean=mean, std=0.5, image_size=28)
        assert net.channels == 1 and net(torch.zeros(2, 1, 28, 28, dtype=torch.uint8)).shape == (2, 10)


@pytest.mark.situation(11)
def test_statistics_of_other_channels_are_guessed_in_one_line_or_stated():
    three = vit(3).pretrained_cfg["mean"]
    with pytest.warns(UserWarning, match="^VisionTransformer of 1 channels: mean and std are guessed") as said:
        assert find_statistics(vit(1))[0] == pytest.approx([sum(three) / 3])
    assert len(said) == 1
    with pytest.warns(UserWarning, match="of 4 channels"):
        assert find_statistics(vit(4))[0] == pytest.approx([*three, three[0]])
    model = vit(6)
    assert as_target(model, mean=0.4, std=0.2).mean.flatten().tolist() == pytest.approx([0.4] * 6)
    assert tuple(model.pretrained_cfg["mean"]) == tuple(three)  # the caller's stays
    with pytest.raises(InputError, match="^expected mean of pixels from 0 to 1, 6 numbers from 0 to 1"):
        as_target(model, mean=[0.4, 0.4, 0.4], std=0.2)


@pytest.mark.situation(26)
def test_twelve_bits_are_read_with_their_white(tmp_path):
    grey = SIX[..., 0].astype(np.uint16) * 16
    Image.fromarray(grey).save(tmp_path / "xray.png")
    with pytest.raises(InputError, match="got values up to .* give the model white=4095"):
        explainers.explain(tmp_path / "xray.png", vit(3), method="Chance")
    for image in (tmp_path / "xray.png", grey, Image.fromarray(grey), grey / 4095):
        white = 1 if isinstance(image, np.ndarray) and image.dtype == float else 4095
        explanation = explainers.explain(image, as_target(vit(3), white=white), method="Chance")
        read = np.array(explanation.photo()).astype(float)
        assert np.abs(read - (grey * (255 / 4095))[..., None]).max() <= 1


def test_values_beyond_white_are_clipped_with_a_warning_and_white_is_never_guessed():
    with pytest.warns(UserWarning, match="^50.0% of the pixels are beyond white=10, and are clipped to it"):
        assert scale_to_16_bits(np.array([5, 20]), 10).tolist() == [32768, 65535]


REFUSED = [
    ("white", lambda: scale_to_16_bits(np.array([0.5]), None)),
    ("white", lambda: scale_to_16_bits(np.array([np.nan]), 1)),
    ("white", lambda: PixelFormat(6).convert(SIX.astype(np.uint16), "stack")),
    ("white", lambda: PixelFormat(6, white=0)),
    ("white", lambda: PixelFormat(6, white=(1, 1))),
    ("bands", lambda: PixelFormat(3, bands=(0, 1, 2))),
    ("bands", lambda: PixelFormat(6, bands=(0, 1, 6))),
    ("bands", lambda: PixelFormat(6, bands=(0, 1))),
    ("[5, 6, 7]", lambda: find_bands(np.zeros((5, 6, 7)), 6, "stack")),
]


@pytest.mark.parametrize(("told", "call"), REFUSED)
def test_what_is_not_known_of_pixels_is_refused(told, call, request):
    check_refused(request, told, call)

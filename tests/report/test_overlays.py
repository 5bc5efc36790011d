"""Heatmaps as colours over images, and large pictures of them with a title and a legend."""

import numpy as np
import pytest
import torch
from PIL import Image

from explainers.errors import InputError
from explainers.report.overlays import BLUE, RED, annotated, overlay
from explainers.report.titles import wrapped

GENERATOR = torch.Generator().manual_seed(0)
IMAGE = torch.randint(256, (3, 32, 32), generator=GENERATOR, dtype=torch.uint8)
HEATMAP = torch.randn(4, 4, generator=GENERATOR)


def pixels(picture):
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def test_an_annotated_picture_contains_the_overlay_enlarged_with_sharp_patches():
    picture = annotated(IMAGE, HEATMAP, "tabby 0.83", size=320)
    large = IMAGE.repeat_interleave(10, 1).repeat_interleave(10, 2)
    top = 10 + 20  # the margin, and a line of the title
    assert torch.equal(pixels(picture)[:, top : top + 320, 10:330], overlay(large, HEATMAP))
    assert pixels(picture)[:, :top].min() < 80 and pixels(picture)[:, -12:].min() < 80  # letters above and below


def test_large_images_are_enlarged_smoothly():
    gradient = torch.linspace(0, 255, 256).expand(3, 256, 256).byte()
    found = pixels(annotated(gradient, torch.zeros(4, 4), "", size=512, legend=False))[0, 100, 16:528].int()
    assert len(found.unique()) > 200 and found.diff().abs().max() <= 2


def test_smooth_pictures_have_no_edges_between_patches():
    grey = torch.full((3, 64, 64), 100, dtype=torch.uint8)
    heatmap = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    sharp, smooth = (pixels(annotated(grey, heatmap, "", 1, smooth, 448, False))[0, 100, 14:462] for smooth in (0, 1))
    assert sharp.int().diff().abs().max() > 100 > 5 > smooth.int().diff().abs().max()


def test_the_legend_goes_from_blue_to_red():
    picture = pixels(annotated(IMAGE, HEATMAP, "", size=320))
    bar = picture[:, 10 + 320 + 10 + 2]
    assert bar[:, 10].tolist() == list(BLUE) and bar[:, 329].tolist() == list(RED)
    assert annotated(IMAGE, HEATMAP, "", size=320, legend=False).height == 340


@pytest.mark.parametrize("size", [(448, 224), (224, 448), (1, 3), (600, 600)])
def test_images_of_any_size_keep_their_shape(size):
    picture = annotated(torch.zeros(3, *size, dtype=torch.uint8), torch.rand(7, 7), "\x00\n 日本語 é 0.5")
    assert isinstance(picture, Image.Image) and max(picture.size) > max(448, *size)


def test_the_probability_stays_when_a_title_is_shortened():
    for words in ("a " * 1000, "x" * 1000, "金" * 1000):
        lines = wrapped(f"{words} 0.83", 40, len)
        assert len(lines) == 2 and lines[1].endswith("… 0.83") and max(map(len, lines)) <= 40
    assert wrapped("", 40, len) == [] and wrapped("x" * 1000, 4, len)[1].endswith("…")
    assert wrapped("just one line 0.83", 18, len) == ["just one line 0.83"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": IMAGE.float()}, "expected one uint8 image .* got torch.float32"),
        ({"image": IMAGE[None]}, "take one of a batch"),
        ({"image": IMAGE[:1]}, r"got torch.uint8 \[1, 32, 32\]"),
        ({"heatmap": HEATMAP[None]}, r"one heatmap \(P, P\), .* \[1, 4, 4\]"),
        ({"heatmap": HEATMAP / 0}, "expected a finite heatmap, got NaN or infinity"),
        ({"opacity": 2}, "expected opacity from 0 to 1, got opacity=2"),
        ({"size": 20}, "expected size from 192 to 8192, got size=20"),
    ],
)
def test_what_cannot_be_drawn_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        annotated(**{"image": IMAGE, "heatmap": HEATMAP, "title": "", **changes})

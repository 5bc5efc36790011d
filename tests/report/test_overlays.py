"""Heatmaps as colours over images, and large pictures of them with a title and a legend."""

import numpy as np
import pytest
import torch

from explainers.errors import InputError
from explainers.report.overlays import BLUE, RED, SEQUENTIAL, colour_scale, draw_annotated, overlay, wrap_title

GENERATOR = torch.Generator().manual_seed(0)
IMAGE = torch.randint(256, (3, 32, 32), generator=GENERATOR, dtype=torch.uint8)
HEATMAP = torch.randn(4, 4, generator=GENERATOR)


def pixels(picture):
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def test_an_annotated_picture_contains_the_overlay_enlarged_with_sharp_patches():
    picture = draw_annotated(IMAGE, HEATMAP, "tabby 0.83", size=320)
    large = IMAGE.repeat_interleave(10, 1).repeat_interleave(10, 2)
    top = 10 + 20  # the margin, and a line of the title
    assert torch.equal(pixels(picture)[:, top : top + 320, 10:330], overlay(large, HEATMAP))
    assert pixels(picture)[:, :top].min() < 80 and pixels(picture)[:, -12:].min() < 80  # letters above and below


def test_large_images_are_enlarged_smoothly():
    gradient = torch.linspace(0, 255, 256).expand(3, 256, 256).byte()
    found = pixels(draw_annotated(gradient, torch.zeros(4, 4), "", size=512, legend=False))[0, 100, 16:528].int()
    assert len(found.unique()) > 200 and found.diff().abs().max() <= 2


def test_smooth_pictures_have_no_edges_between_patches():
    grey = torch.full((3, 64, 64), 100, dtype=torch.uint8)
    heatmap = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    sharp, smooth = (
        pixels(draw_annotated(grey, heatmap, "", 1, smooth, 448, False))[0, 100, 14:462] for smooth in (0, 1)
    )
    assert sharp.int().diff().abs().max() > 100 > 5 > smooth.int().diff().abs().max()


@pytest.mark.parametrize("positive", [False, True])
def test_red_and_blue_are_the_signs_of_values_and_equal_strength_is_an_equal_colour(positive):
    heatmap = torch.tensor([[0.5, 1.0], [2.0, 0.0 if positive else -1.0]])
    grey = torch.full((3, 2, 2), 100, dtype=torch.uint8)
    drawn = overlay(grey, heatmap, opacity=1, signed=True).float()
    for value, colour in zip(heatmap.flatten(), drawn.flatten(1).mT, strict=True):  # median .75: .5 was blue
        full = torch.tensor(RED if value > 0 else BLUE)
        torch.testing.assert_close(colour, 100 + value.abs() / 2 * (full - 100), atol=0.51, rtol=0)


def test_unsigned_heatmaps_go_from_no_colour_to_yellow_wherever_their_zero_is():
    grey = torch.full((3, 4, 4), 100, dtype=torch.uint8)
    heatmap = torch.linspace(0, 1, 16).view(4, 4)
    drawn = overlay(grey, heatmap, opacity=1, signed=False)
    assert drawn[:, 0, 0].tolist() == [100] * 3 and drawn[:, 3, 3].tolist() == list(SEQUENTIAL[-1])
    assert torch.equal(overlay(grey, heatmap / 8 - 3, opacity=1, signed=False), drawn)  # 1/8: exact in floats
    assert torch.equal(overlay(grey, heatmap, opacity=1), drawn)  # unsigned, as it has no negative values


@pytest.mark.parametrize(("value", "signed"), [(0.0, True), (0.3, False), (-0.3, None)])
def test_a_constant_heatmap_says_so_and_has_no_colours(value, signed):
    heatmap = torch.full((4, 4), value) + torch.rand(4, 4) * 1e-8 * abs(value)  # up to rounding
    assert colour_scale(heatmap, signed).constant
    assert torch.equal(overlay(IMAGE, heatmap, signed=signed)[0], IMAGE.float().mean(0).round().byte())
    picture = draw_annotated(IMAGE, heatmap, "tabby 0.83", size=320, signed=signed)
    assert picture.height == 10 + 20 + 16 + 320 + 10  # a line below the title, and no legend
    assert pixels(picture)[:, 30:46].min() < 80


def test_one_outlier_does_not_make_other_patches_pale():
    heatmap = torch.ones(5, 5)
    heatmap[0, 0] = 100.0
    assert colour_scale(heatmap, signed=True).limit == 1
    assert colour_scale(-heatmap + 200, signed=False).limit == 99  # the one low patch is all that differs
    assert colour_scale(heatmap, signed=False).limit == 99


def test_the_legend_goes_from_blue_to_red_or_from_grey_to_yellow():
    bars = [pixels(draw_annotated(IMAGE, HEATMAP, "", size=320, signed=each))[:, 10 + 320 + 10 + 2] for each in (1, 0)]
    assert [bar[:, 10].tolist() for bar in bars] == [list(BLUE), [140] * 3]
    assert [bar[:, 329].tolist() for bar in bars] == [list(RED), list(SEQUENTIAL[-1])]
    assert draw_annotated(IMAGE, HEATMAP, "", size=320, legend=False).height == 340


def test_the_method_stands_below_the_title():
    plain, named = (pixels(draw_annotated(IMAGE, HEATMAP, "tabby 0.83", size=320, method=each)) for each in ("", "GAE"))
    assert torch.equal(plain[:, :24], named[:, :24]) and torch.equal(plain[:, 30:], named[:, 46:])
    assert named[:, 30:44].min() < 80


def test_the_probability_stays_when_a_title_is_shortened():
    for words in ("a " * 1000, "x" * 1000, "金" * 1000):
        lines = wrap_title(f"{words} 0.83", 40, len)
        assert len(lines) == 2 and lines[1].endswith("… 0.83") and max(map(len, lines)) <= 40
    assert wrap_title("", 40, len) == [] and wrap_title("x" * 1000, 4, len)[1].endswith("…")
    assert wrap_title("just one line 0.83", 18, len) == ["just one line 0.83"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": IMAGE.float()}, "expected one uint8 image .* got torch.float32"),
        ({"heatmap": HEATMAP[None]}, r"one heatmap \(P, P\), .* \[1, 4, 4\]"),
        ({"heatmap": HEATMAP / 0}, "expected a finite heatmap, got NaN or infinity"),
        ({"opacity": 2}, "expected opacity from 0 to 1, got opacity=2"),
        ({"size": 20}, "expected size from 192 to 8192, got size=20"),
    ],
)
def test_what_cannot_be_drawn_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        draw_annotated(**{"image": IMAGE, "heatmap": HEATMAP, "title": "", **changes})

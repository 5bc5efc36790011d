"""Heatmaps as colours over images and whole photos, and large pictures of them with a title and a legend."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from explainers.errors import InputError
from explainers.report.overlays import (
    GREY,
    OPACITY,
    PALE,
    STOPS,
    WHITE,
    colour_scale,
    draw_annotated,
    draw_on_photo,
    fade,
    overlay,
    wrap_title,
)

GENERATOR = torch.Generator().manual_seed(0)
IMAGE = torch.randint(256, (3, 32, 48), generator=GENERATOR, dtype=torch.uint8)
HEATMAP = torch.randn(4, 6, generator=GENERATOR)
PHOTO = Image.fromarray(IMAGE.permute(1, 2, 0).numpy())
WORDS = {"title": "tabby 0.83", "explained": "tabby", "method": "GAE"}


def pixels(picture):
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def cubic(x):
    x = abs(x)
    return 1.5 * x**3 - 2.5 * x**2 + 1 if x < 1 else -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0


def sample(line, at):
    """A bicubic curve through the values of a line of patches, at a place in patches."""
    weights = [cubic(number + 0.5 - at) for number in range(len(line))]
    return sum(weight * value for weight, value in zip(weights, line, strict=True)) / sum(weights)


def shade_slowly(shades, row, column, smooth):
    """The shade at a place in patches."""
    if not smooth:
        return shades[math.floor(row)][math.floor(column)]
    value = sample([sample(line, column) for line in shades], row)
    every = [each for line in shades for each in line]
    return min(max(value, min(every)), max(every))


def colour_slowly(below, shade, opacity):
    """The colour of a shade over a colour."""
    at = (shade + 1) / 2 * 5
    first = min(int(at), 4)
    strength = opacity * abs(shade) ** 1.5
    tint = [low + (at - first) * (high - low) for low, high in zip(STOPS[first], STOPS[first + 1], strict=True)]
    return [(1 - strength) * one + strength * other for one, other in zip(below, tint, strict=True)]


def overlay_slowly(image, heatmap, box, smooth, signed, opacity=OPACITY):
    """One pixel after the other."""
    left, top, right, bottom = box
    rows, columns = heatmap.shape
    shades = colour_scale(heatmap, signed).shades(heatmap).tolist()
    result = image.float()
    for y in range(image.shape[1]):
        for x in range(image.shape[2]):
            pixel = image[:, y, x].tolist()
            grey = sum(pixel) / 3
            if not (left <= x < right and top <= y < bottom):
                near = left - 1 <= x < right + 1 and top - 1 <= y < bottom + 1
                result[:, y, x] = 90 if near else grey + WHITE * (255 - grey)
                continue
            place = (y + 0.5 - top) / (bottom - top) * rows, (x + 0.5 - left) / (right - left) * columns
            below = [round(value + PALE * (grey - value)) for value in pixel]
            result[:, y, x] = torch.tensor(colour_slowly(below, shade_slowly(shades, *place, smooth), opacity))
    return result


@pytest.mark.parametrize(
    ("box", "signed", "smooth"),
    [
        ((0, 0, 48, 32), True, True),
        ((8, 0, 40, 32), False, True),  # the middle
        ((-6, -4, 54, 36), True, False),  # beyond all sides
        ((10, -8, 40, 40), False, False),
    ],
)
def test_overlays_are_the_formula_inside_and_outside_of_the_box(box, signed, smooth):
    found = overlay(IMAGE, HEATMAP, smooth=smooth, signed=signed, box=box).float()
    assert (found - overlay_slowly(IMAGE, HEATMAP, box, smooth, signed)).abs().max() <= 1


@pytest.mark.situation(24)
def test_the_heatmap_lies_in_its_box_on_a_photo_of_any_size():
    heatmap = torch.zeros(4, 4)
    heatmap[1, 2] = 1
    photo = Image.new("RGB", (400, 100), (0, 200, 0))
    drawn = pixels(draw_on_photo(photo, heatmap, (150, 0, 250, 100), size=800, smooth=False, signed=False)).float()
    assert drawn.shape == (3, 200, 800)
    coloured = (drawn[0] > drawn[1]).nonzero()
    first, last = coloured.aminmax(dim=0)  # row 1, column 2 of 50 pixels each
    assert (first.tolist(), last.tolist()) == ([50, 400], [99, 449])
    outside = [*range(295), *range(505, 800)]
    assert (drawn[:, :, outside].amax(0) == drawn[:, :, outside].amin(0)).all() and drawn[:, 150, 320].std() > 10


def test_a_photo_without_a_heatmap_stays_in_colour():
    assert torch.equal(fade(IMAGE, pale=0), IMAGE)
    coloured = overlay(IMAGE, torch.zeros(2, 3)).float()
    spread = [each.float().std(0).mean().item() for each in (coloured, IMAGE)]
    assert spread[0] == pytest.approx((1 - PALE) * spread[1], rel=0.02)


def test_an_annotated_picture_has_the_photo_beside_the_overlay():
    picture = pixels(draw_annotated(PHOTO, HEATMAP, **WORDS, size=480, smooth=False, signed=True))
    large = IMAGE.repeat_interleave(10, 1).repeat_interleave(10, 2)
    gap, width = 480 // 32, 2 * 480 + 480 // 32
    margin = width // 48
    top = margin + width // 22 + width // 32  # a title, and a line below it
    assert torch.equal(picture[:, top : top + 320, margin : margin + 480], large)
    right = margin + 480 + gap
    assert torch.equal(picture[:, top : top + 320, right : right + 480], overlay(large, HEATMAP, smooth=False))
    assert picture[:, :top].min() < 80 and picture[:, -margin:].min() < 80  # letters above and below


def test_unsigned_heatmaps_go_from_no_colour_to_yellow_wherever_their_zero_is():
    grey = torch.full((3, 4, 4), 100, dtype=torch.uint8)
    heatmap = torch.linspace(0, 1, 16).view(4, 4)
    look = {"opacity": 1, "smooth": False}
    drawn = overlay(grey, heatmap, **look, signed=False)
    assert drawn[:, 0, 0].tolist() == [100] * 3 and drawn[:, 3, 3].tolist() == list(STOPS[-1])
    assert torch.equal(overlay(grey, heatmap / 8 - 3, **look, signed=False), drawn)  # 1/8: exact in floats
    assert torch.equal(overlay(grey, heatmap, **look), drawn)  # unsigned, as it has no negative values


@pytest.mark.parametrize(("value", "signed"), [(0.0, True), (0.3, False), (-0.3, None)])
def test_a_constant_heatmap_says_so_and_has_no_colours(value, signed):
    heatmap = torch.full((4, 6), value) + torch.rand(4, 6) * 1e-8 * abs(value)  # up to rounding
    assert colour_scale(heatmap, signed).constant
    assert torch.equal(overlay(IMAGE, heatmap, signed=signed), fade(IMAGE))
    picture = draw_annotated(PHOTO, heatmap, **WORDS, size=480, signed=signed)
    width = 2 * 480 + 15
    top = width // 48 + width // 22 + 2 * (width // 32)
    assert picture.height == top + 320 + width // 48  # one more line above, and no legend
    assert pixels(picture)[:, top - width // 32 : top].min() < 80


def test_one_outlier_does_not_make_other_patches_pale():
    heatmap = torch.ones(7, 7)
    heatmap[0, 0] = 100.0
    assert colour_scale(heatmap, signed=True).limit == 1
    assert colour_scale(-heatmap + 200, signed=False).limit == 99  # the one low patch is all that differs
    assert colour_scale(heatmap, signed=False).limit == 99


@pytest.mark.parametrize(("signed", "lowest"), [(True, -1), (False, 0)])
def test_the_legend_has_the_colours_of_the_scale(signed, lowest):
    picture = pixels(draw_annotated(PHOTO, HEATMAP, **WORDS, size=480, signed=signed))
    width = 2 * 480 + 15
    margin = width // 48
    bar = picture[:, -(margin + width // 15) + margin + 4].float()
    for at, shade in ((margin, lowest), (margin + width - 1, 1)):
        expected = torch.tensor(colour_slowly(GREY, shade, OPACITY))
        torch.testing.assert_close(bar[:, at], expected, atol=1, rtol=0)


def test_the_probability_stays_when_a_title_is_shortened():
    for words in ("a " * 1000, "x" * 1000, "金" * 1000):
        lines = wrap_title(f"{words} 0.83", 40, len)
        assert len(lines) == 2 and lines[1].endswith("… 0.83") and max(map(len, lines)) <= 40
    assert wrap_title("", 40, len) == [] and wrap_title("x" * 1000, 4, len)[1].endswith("…")
    assert wrap_title("just one line 0.83", 18, len) == ["just one line 0.83"]


@pytest.mark.parametrize(
    ("draw", "changes", "named"),
    [
        (overlay, {"image": IMAGE.float()}, "torch.float32"),
        (overlay, {"image": np.zeros((8, 8, 3))}, "torch.float64"),
        (overlay, {"heatmap": 3}, "heatmap="),
        (overlay, {"heatmap": HEATMAP[None]}, r"\[1, 4, 6\]"),
        (overlay, {"heatmap": HEATMAP / 0}, "finite"),
        (overlay, {"opacity": 2}, "opacity=2"),
        (lambda image, **settings: draw_annotated(PHOTO, **settings, **WORDS), {"size": 20}, "size=20"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, changes, named):
    with pytest.raises(InputError, match=named):
        draw(**{"image": IMAGE, "heatmap": HEATMAP, **changes})


@pytest.mark.parametrize(
    "image", [np.array(PHOTO), np.array(PHOTO)[::-1][::-1], PHOTO, PHOTO.convert("RGBA"), IMAGE.numpy()]
)
def test_numpy_and_pil_are_drawn_as_tensors_are(image):
    assert torch.equal(overlay(image, HEATMAP.numpy()), overlay(IMAGE, HEATMAP))

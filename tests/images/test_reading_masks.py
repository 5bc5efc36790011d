"""What the object of a mask is: in each kind of file the upper left quarter, or the mask is refused in one line."""

import re

import numpy as np
import pytest
from PIL import Image

from explainers.errors import InputError
from explainers.images.masks import find_ranges, read_mask

OBJECT = np.kron([[1, 0], [0, 0]], np.ones((16, 16))).astype(bool)
RIM = np.zeros_like(OBJECT)
RIM[16:18, :18] = RIM[:16, 16:18] = True
VOC = [0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0]
VOC += [64] * (765 - len(VOC)) + [224, 224, 192]


def values(of_object, background=0, rim=None, kind=np.uint8):
    pixels = np.where(OBJECT, of_object, background)
    return np.where(RIM, background if rim is None else rim, pixels).astype(kind)


def grey(*parts, **more):
    return Image.fromarray(values(*parts, **more))


def indexed(*parts, palette=VOC):
    image = Image.fromarray(values(*parts))
    image.putpalette(palette)
    return image


def colours(of_object, background=(0, 0, 0), mode="RGB"):
    return Image.fromarray(np.where(OBJECT[..., None], of_object, background).astype(np.uint8), mode)


TRIMAP = (1, 2, 3)
SOFT = Image.fromarray(np.clip(values(255) + RIM * 100, 0, 255).astype(np.uint8))
TWO = "expected a mask of two values, 0 and that of the object, got "
BLACK_WHITE = [0, 0, 0, 255, 255, 255]


@pytest.mark.parametrize(
    ("image", "mask_value", "refused"),
    [
        pytest.param(indexed(3, 0, 255), None, None, id="VOC: class, background, void rim"),
        pytest.param(indexed(3, 0), None, None, id="VOC without a rim"),
        pytest.param(indexed(3, 255), None, None, id="VOC: all else is void"),
        pytest.param(indexed(3, 1, 255), 3, None, id="VOC: one of two classes"),
        pytest.param(indexed(1, 0, palette=BLACK_WHITE), None, None, id="indexed, black and white"),
        pytest.param(indexed(0, 1, palette=BLACK_WHITE[::-1]), None, None, id="indexed, white first"),
        pytest.param(indexed(255, 0, palette=[*np.arange(256).repeat(3).tolist()]), None, None, id="indexed greys"),
        pytest.param(grey(*TRIMAP), None, f"{TWO}1, 2, 3: give", id="trimap"),
        pytest.param(grey(*TRIMAP), 1, None, id="trimap, 1"),
        pytest.param(grey(1, 2, 2), None, f"{TWO}1, 2: give", id="trimap without a rim"),
        pytest.param(grey(255, 0, 128), None, f"{TWO}0, 128, 255: give", id="trimap of greys"),
        pytest.param(grey(7, 2, 9), [7, 8], None, id="several values"),
        pytest.param(SOFT, None, f"{TWO}0, 100, 255: give", id="grey edges"),
        pytest.param(SOFT, "128-255", None, id="grey edges, bright"),
        pytest.param(grey(1), None, None, id="0 and 1"),
        pytest.param(grey(255), None, None, id="0 and 255"),
        pytest.param(grey(40), None, None, id="0 and a dark grey"),
        pytest.param(grey(255, 254), None, f"{TWO}254, 255: give", id="254 and 255"),
        pytest.param(grey(True, False, kind=bool), None, None, id="1 bit"),
        pytest.param(grey(65535, kind=np.uint16), None, None, id="16 bits"),
        pytest.param(grey(300, 0, 700, kind=np.uint16), 300, None, id="16 bits, ids"),
        pytest.param(colours((255, 255, 255)), None, None, id="RGB"),
        pytest.param(colours((128, 0, 0)), None, None, id="RGB, red"),
        pytest.param(grey(*TRIMAP).convert("RGB"), 1, None, id="RGB, trimap"),
        pytest.param(colours((0, 0, 255), (255, 0, 0)), None, f"{TWO}255, 16711680", id="RGB, blue on red"),
        pytest.param(colours((255,) * 4, (0, 0, 0, 255), "RGBA"), None, None, id="RGBA, opaque"),
        pytest.param(colours((9, 9, 9, 255), (9, 9, 9, 0), "RGBA"), None, None, id="RGBA, cut out"),
    ],
)
def test_a_mask_marks_its_object_or_is_refused(tmp_path, image, mask_value, refused):
    image.save(tmp_path / "a.png")
    if refused is None:
        assert np.array_equal(read_mask(tmp_path / "a.png", find_ranges(mask_value)), OBJECT)
        np.save(tmp_path / "a.npy", OBJECT)
        assert np.array_equal(read_mask(tmp_path / "a.npy"), OBJECT)
    else:
        with pytest.raises(InputError, match=f"^{tmp_path}/a.png: {re.escape(refused)}.* mask_value=1") as caught:
            read_mask(tmp_path / "a.png", find_ranges(mask_value))
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("value", [0, 200])
def test_a_mask_of_one_value_is_the_background_or_all_object(tmp_path, value):
    grey(value, value).save(tmp_path / "a.png")
    assert read_mask(tmp_path / "a.png").mean() == bool(value)


@pytest.mark.parametrize("given", ["x", "3-1", True, 1.5, [None], 1.0])
def test_values_are_numbers_or_ranges(given):
    with pytest.raises(InputError, match="^mask_value=.*: expected numbers, or ranges such as 128-255$"):
        find_ranges(given)

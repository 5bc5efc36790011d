import base64
import io
import re

import numpy as np
import pytest
import torch
from browser import content
from PIL import Image

from explainers.errors import InputError
from explainers.report.gallery import Picture, gallery_html

NASTY = '</script><b> & "q" \'é'
COLUMNS = {"fidelity_plus": "Fidelity⁺ ↑", "accuracy": "Accuracy ↑", "images_per_second": "Images/s ↑"}
MEASURED = {"sparsity": [0.0, 1.0], "fidelity_plus": 0.25, "fidelity_plus_error": 0.1, "images_per_second": 7.0}
RESULTS = {
    "loop": {
        "b": MEASURED | {"fidelity_plus_curve": [0.0, float("nan")], "log_odds_curve": [1.0, 2.0]},
        "a": {"fidelity_plus": float("nan")},
    }
}


def image(size=8):
    return torch.randint(256, (3, size, size), dtype=torch.uint8)


def picture(**changes):
    heatmaps = {"a": {"10": torch.randn(4, 4), "9": torch.randn(4, 4)}, "z": {"10": torch.zeros(4, 4)}}
    fields = {"image": image(), "label": "9", "classes": {"10": 0.75, "9": float("nan")}, "heatmaps": heatmaps}
    return Picture(**{"name": "0.png", **fields, **changes})


def decoded(url, kind):
    head, text = url.split(",")
    assert head == f"data:image/{kind};base64"
    return np.array(Image.open(io.BytesIO(base64.b64decode(text))))


def test_names_and_classes_cannot_end_the_data_or_become_markup():
    one = picture(name=NASTY, label=NASTY, classes={NASTY: 1.0}, heatmaps={NASTY: {NASTY: torch.zeros(2, 2)}})
    page = gallery_html(NASTY, {NASTY: [one]}, {NASTY: {NASTY: MEASURED}}, {"fidelity_plus": NASTY}, [NASTY])
    assert page.isascii()
    assert page.count("</script") == gallery_html("", {}, {}, {}).count("</script") == 2
    assert "<b>" not in page
    data = content(page)
    [task] = data["tasks"]
    names = [data["title"], *data["notes"], *data["columns"], data["explainers"][0]["name"], task["name"]]
    [shown] = task["pictures"]
    assert {*names, shown["name"], shown["label"], shown["classes"][0]["name"]} == {NASTY}


def test_the_page_forbids_the_network_and_names_no_address():
    page = gallery_html("", {"loop": [picture()]}, RESULTS, COLUMNS)
    assert "content=\"default-src 'none'; img-src data:; " in page
    assert set(re.findall(r"\w+://[^\"'\s]*", page)) == {"http://www.w3.org/2000/svg"}  # a name, which nobody fetches
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|@import|url\(", page)


@pytest.mark.parametrize("signed", [True, False])
def test_heatmaps_are_stored_as_shades_in_127_steps(signed):
    heatmap = torch.randn(7, 7)
    heatmap[0, 0] = 100.0
    one = picture(classes={"x": 1.0, "y": 0.0}, heatmaps={"a": {"x": heatmap}}, signed={"a": signed})
    [task] = content(gallery_html("", {"loop": [one]}, {}, {}))["tasks"]
    [stored] = task["pictures"][0]["heatmaps"]
    assert stored["maps"][1] is None and stored["signed"] == signed
    found = np.frombuffer(base64.b64decode(stored["maps"][0]), np.int8)
    numbers = [float(number) for number in heatmap.flatten()]
    centre = 0.0 if signed else sorted(numbers)[1]  # at most 3 % of 49 are below
    limit = sorted(abs(number - centre) for number in numbers)[-2]  # at most 3 % of 49 are beyond
    for number, byte in zip(numbers, found, strict=True):
        assert abs(max(-1.0 if signed else 0.0, min(1.0, (number - centre) / limit)) * 127 - byte) <= 0.501


def test_small_images_are_exact_and_large_ones_nearly():
    truth = torch.zeros(8, 8, dtype=torch.bool)
    truth[2:5, 1:7] = True
    smooth = torch.linspace(0, 255, 128).expand(3, 128, 128).byte()
    several = [picture(truth=truth), picture(image=smooth)]
    first, second = content(gallery_html("", {"loop": several}, {}, {}))["tasks"][0]["pictures"]
    assert (decoded(first["image"], "png") == several[0].image.permute(1, 2, 0).numpy()).all()
    assert (decoded(first["truth"], "png").astype(bool) == truth.numpy()).all()
    difference = decoded(second["image"], "webp").astype(float) - smooth.permute(1, 2, 0).numpy()
    assert abs(difference).max() < 12
    assert second["truth"] is None


def test_rows_hold_the_written_cells_and_the_numbers_and_curves():
    data = content(gallery_html("", {}, RESULTS, COLUMNS))
    assert data["columns"] == ["Fidelity⁺ ↑", "Images/s ↑"]
    assert data["curves"] == ["Fidelity⁺ ↑", "log odds"]
    b, a = data["tasks"][0]["rows"]
    assert b["text"] == ["0.250 ± 0.100", "7.0"]
    assert b["values"] == [0.25, 7.0]
    assert b["curves"] == [[0.0, None], [1.0, 2.0]]
    assert (a["text"], a["values"], a["curves"]) == (["nan", "–"], [None, None], [[], []])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"image": torch.zeros(3, 8, 8)}, "torch.float32"),
        ({"truth": torch.zeros(4, 4, dtype=torch.bool)}, "truth"),
        ({"heatmaps": {"a": {"10": torch.zeros(1, 4, 5)}}}, "heatmaps"),
        ({"heatmaps": {"a": {"10": torch.full((4, 4), float("nan"))}}}, "heatmaps"),
    ],
)
def test_a_picture_that_cannot_be_shown_is_refused(changes, named):
    with pytest.raises(InputError, match=f"^0.png: .*{named}"):
        picture(**changes)

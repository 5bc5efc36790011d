import json
import shutil

import pytest
import torch
from browser import content
from PIL import Image

from explainers.report.overlays import draw_annotated, to_pillow
from explainers.report.pictures import write_pictures
from explainers.report.publish import publish
from explainers.report.tables import Reference


def write(folder, tensors, files, signed):
    write_pictures(folder, "odd", tensors, files, ["even", "odd"], signed, dict.fromkeys(signed, ""))


@pytest.fixture
def run(tmp_path):
    """A folder with results and pictures of two images."""
    row = {"images": 2, "sparsity": [0.0, 1.0], "fidelity_plus": 0.5, "fidelity_plus_curve": [0.0, 0.5]}
    identity = {"backbone": "tiny", "images": 2, "classes": "predicted", "removals": ["zero", "drop"], "levels": 2}
    content = {
        "results": {"odd": {"tve": row, "chance": row | {"ignores_classes": True}}},
        "columns": {"odd": {"fidelity_plus": "Fidelity⁺ ↑"}},
        "identity": {"odd": identity},
        "runs": [{"command": ["/somewhere/else/eval.py", "experiment=x"]}],
    }
    (tmp_path / "results.json").write_text(json.dumps(content))
    tensors = {
        "image": torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8),
        "label": torch.tensor([1, -1]),
        "classes": torch.tensor([[1, 0], [0, 1]]),
        "scores": torch.tensor([[0.75, 0.25], [0.5, 0.5]]),
        "heatmaps/tve": torch.rand(2, 2, 2, 2),
        "heatmaps/chance": torch.rand(2, 1, 2, 2),
        "heatmaps/dropped": torch.rand(2, 1, 2, 2),
    }
    signed = {"tve": True, "chance": False, "dropped": True}
    write(tmp_path, tensors, ["a.png", "b.png"], signed)
    return tmp_path, tensors


def test_everything_is_made_of_files(run, tmp_path_factory):
    folder, _ = run
    out = tmp_path_factory.mktemp("out")
    table = publish(out, [folder / "results.json"])
    assert table == (out / "table.md").read_text() and "0.500" in table
    names = {path.name for path in out.iterdir()}
    assert names == {"table.md", "table.tex", "results.csv", "odd.png", "gallery.html"}
    page = (out / "gallery.html").read_text()
    assert "python eval.py experiment=x" in page and "/somewhere" not in page
    assert "odd: backbone tiny; images 2; classes predicted; levels 2; removals zero, drop" in page
    assert "dropped" not in page  # its numbers are not among the results


@pytest.mark.slow
def test_overlays_are_of_the_class_that_all_explainers_explain_and_take_the_place_of_earlier_ones(run):
    folder, tensors = run
    publish(folder, [folder / "results.json"], overlays=True)
    overlays = folder / "overlays" / "odd"
    found = {path.name for path in overlays.iterdir()}
    assert found == {f"000{i}_{name}_{who}.png" for i, name in enumerate("ab") for who in ("tve", "chance")}
    image, heatmap = to_pillow(tensors["image"][1]), tensors["heatmaps/tve"][1, 0]
    expected = draw_annotated(image, heatmap, "even 0.50", "even", "TVE", signed=True)
    with Image.open(overlays / "0001_b_tve.png") as written:
        assert written.tobytes() == expected.tobytes()
    Image.new("RGB", (2, 2)).save(overlays / "mine.png")
    one = {name: values[:1] for name, values in tensors.items()}
    signed = {"tve": True, "chance": False}
    write(folder, one, ["c.png"], signed)
    publish(folder, [folder / "results.json"], overlays=True)
    assert {path.name for path in overlays.iterdir()} == {"0000_c_tve.png", "0000_c_chance.png", "mine.png"}


def test_heatmaps_of_several_runs_are_shown_together_if_images_and_classes_are_the_same(run, tmp_path):
    folder, tensors = run
    other = tmp_path / "other"
    results = json.loads((folder / "results.json").read_text())
    results["results"] = {"odd": {"lime": results["results"]["odd"]["tve"]}}
    shared = {key: value for key, value in tensors.items() if not key.startswith("heatmaps")}
    own = shared | {"heatmaps/lime": torch.rand(2, 1, 2, 2)}
    for classes, count in ((own["classes"], 3), (own["classes"].flip(1), 2)):
        changed = own | {"classes": classes}
        write(other, changed, ["a.png", "b.png"], {"lime": True})
        (other / "results.json").write_text(json.dumps(results))
        publish(other, [folder / "results.json", other / "results.json"])
        pictures = content((other / "gallery.html").read_text())["tasks"][0]["pictures"]
        assert [len(picture["heatmaps"]) for picture in pictures] == [count, count]


def test_a_reference_is_a_column_or_a_line(run, capsys):
    folder, _ = run
    shutil.rmtree(folder / "rows")  # to draw nothing
    for name, told in (("tve", False), ("TVE", True)):
        reference = Reference("paper", "ViT", {"ViT": {"odd": {name: {"fidelity_plus": 0.25}}}})
        table = publish(folder, [folder / "results.json"], reference)
        assert ("0.25" in table) != told == capsys.readouterr().out.startswith("reference: the paper has ")

"""Names from a received results.json, and of image files, stay inside their folder and draw as what they are."""

import json

import pytest
import torch
from commands import QUIET, evaluate
from PIL import Image

from callbacks.resume_test import ResumeTest
from explainers.errors import InputError
from explainers.report.pictures import heatmap_file, write_pictures
from explainers.report.publish import publish
from explainers.report.results import load
from explainers.report.tables import latex, markdown, rows
from explainers.saved.files import file_name

HOSTILE = ("../../x", "/tmp/x", "..", ".hidden", "a/b", "a\\b", "y" * 300, "é" * 200, 'a"b?', r"$\frac", "[ab]")
ROW = {"sparsity": [0.0, 1.0], "fidelity_plus": 0.5, "fidelity_plus_curve": [0.0, 0.5]}
ROW |= {"fidelity_minus": 0.5, "fidelity_minus_curve": [0.0, 0.5]}


def received(folder, tasks, explainers, images=("a.png",)):
    """A folder that somebody has sent, whose tasks, explainers and images have these names."""
    folder.mkdir(parents=True)
    results = {task: dict.fromkeys(explainers, ROW) for task in tasks}
    content = {"results": results, "columns": {"x": {"fidelity_plus": "Fidelity⁺ ↑"}}}
    content["rows"] = {task: dict.fromkeys(explainers, "../../x") for task in tasks}
    (folder / "results.json").write_text(json.dumps(content))
    tensors = {
        "image": torch.randint(0, 256, (len(images), 3, 8, 8), dtype=torch.uint8),
        "label": torch.full((len(images),), -1),
        "classes": torch.zeros(len(images), 1, dtype=torch.long),
        "scores": torch.ones(len(images), 1),
        **{f"heatmaps/{name}": torch.rand(len(images), 1, 2, 2) for name in explainers},
    }
    for task in tasks:
        of_rows = dict.fromkeys(explainers, True), dict.fromkeys(explainers, "../../x")
        write_pictures(folder, task, tensors, list(images), [r"class $\frac"], *of_rows)
    return folder / "results.json"


def files(folder):
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_names_of_tasks_and_explainers_write_nowhere_else(tmp_path):
    tasks, explainers = ("../../x", r"$\frac"), ("/tmp/x",)
    results, out = received(tmp_path / "in", tasks, explainers), tmp_path / "some" / "where" / "out"
    before = files(tmp_path)
    out.mkdir(parents=True)
    replot = (f"results.files=[{results}]", "overlays=true", "figures=[bars]", *QUIET)
    evaluate(*replot, folder=out)
    written = files(tmp_path) - before
    assert {path.parts[:3] for path in written} == {("some", "where", "out")}
    inside = {path.relative_to("some/where/out") for path in written}
    assert {len(path.parts) for path in inside if path.parts[0] != "overlays"} == {1}
    pictures = [path for path in inside if path.suffix == ".png" and len(path.parts) == 1]
    assert len(pictures) == 2 + 1  # a file of each task, and the bars
    overlays = [path for path in inside if path.parts[0] == "overlays"]
    assert len(overlays) == 2 and {len(path.parts) for path in overlays} == {3}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_name_stays_in_its_folder_and_fits_beside_the_endings_that_files_get(name):
    safe = file_name(name)
    assert len(safe.encode()) <= 200 and not set(safe) & set('/\\\0\n<>:"|?*') and not safe.startswith(".")
    assert (safe == name) == (name == HOSTILE[-1])
    assert file_name(safe) == safe != file_name(name + "2")


def test_the_same_names_are_safe_where_they_are_measured(tmp_path):
    for name in HOSTILE:
        assert heatmap_file(tmp_path, name, name, name).parents[1] == tmp_path / "rows"
        unfinished = ResumeTest(tmp_path, name, "key")
        left = tmp_path / f"{file_name(name)}_0_of_1.pt"
        left.write_text("")
        unfinished.remove()
        assert not left.exists()


def test_names_of_images_are_safe(tmp_path):
    images = ["z" * 251 + ".png", "../../x.png", "\ud800.png", "a\nb$x.png"]
    publish(tmp_path / "out", [received(tmp_path / "in", ["task"], ["tve"], images)], overlays=True)
    paths = [*(tmp_path / "out" / "overlays" / "task").iterdir()]
    assert len(paths) == len(images)
    for path in paths:
        with Image.open(path) as picture:
            assert min(picture.size) > 448 and path.name.isprintable()


@pytest.mark.parametrize("name", ["a\x1b]0;x\x07", "a\nb", "\ud800", ""])
def test_names_that_cannot_be_printed_are_refused(tmp_path, name):
    (tmp_path / "results.json").write_text(json.dumps({"results": {"task": {name: ROW}}}))
    with pytest.raises(InputError, match=r"results.json: expected names that can be printed, got '.*'") as error:
        load(tmp_path / "results.json")
    assert str(error.value).isprintable()


def test_names_cannot_break_tables():
    table = rows({"a|b": {r"\input{x}~^": ROW}}, {"fidelity_plus": "Fidelity⁺ ↑"})
    assert markdown(table).splitlines()[2].startswith(r"| a\|b | \input")
    assert r"a|b & \textbackslash{}input\{x\}\textasciitilde{}\textasciicircum{} & 0.500" in latex(table)

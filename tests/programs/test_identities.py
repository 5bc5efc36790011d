"""What was measured belongs to what it was measured on: commands with heads, explainers and data of something else."""

import json
import re
import shutil

import pytest
from commands import NO_FIGURES, QUIET, draw_images, evaluate, train
from test_errors import error

import eval as evaluation
from explainers.running.rows import list_rows

FOLDER = ("target=tiny", "data=folder", "data.num_workers=0", "data.batch_size=4", "logger=csv", *QUIET)
HEAD = ("experiment=linear_head", *FOLDER, "cache=none")
FEW = ("evaluation.levels=3", "logger=csv", *NO_FIGURES, *QUIET)
MEASURE = ("target=tiny", "tasks=[folder]", "tasks.folder.data.num_workers=0", *FEW)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    draw_images(folder / "train", count=8), draw_images(folder / "val", count=8)
    return folder


def measured(*overrides, folder):
    """The results of the folder's task, and whether they were measured just now."""
    before = {*folder.glob("rows/*/*.json")}
    evaluate(*MEASURE, *overrides, folder=folder)
    return json.loads((folder / "results.json").read_text()), {*folder.glob("rows/*/*.json")} != before


@pytest.mark.slow
def test_a_head_of_two_classes_is_refused_for_three_folders_and_for_two_others(images, tmp_path):
    train(*HEAD, f"data_dir={images}", folder=tmp_path / "head")
    head = f"tasks.folder.target.head={tmp_path / 'head/head.safetensors'}"
    for classes, told in ((("bird", "cat", "dog"), "got 3 (bird, cat, dog)"), (("cat", "fox"), "got 2 (cat, fox)")):
        draw_images(tmp_path / told / "val", count=6, classes=classes)
        message = error(evaluate, *MEASURE, head, f"data_dir='{tmp_path / told}'", folder=tmp_path / "run")
        assert f"expected images of the head's 2 classes (cat, dog), {told}: give the head of this task" in message
    message = error(evaluate, *MEASURE, f"data_dir={images}", folder=tmp_path / "run")  # the tiny model's own head
    assert "expected images of the head's 10 classes, got 2 (cat, dog)" in message


OWN_HEAD = ("target.model.num_classes=2",)


@pytest.mark.slow
def test_edited_images_and_swapped_labels_are_measured_again_and_moved_ones_are_not(images, tmp_path, capsys):
    shutil.copytree(images, data := tmp_path / "images")
    command = (*OWN_HEAD, f"data_dir={data}")
    first, _ = measured(*OWN_HEAD, f"data_dir={images}", folder=tmp_path / "run")
    found, again = measured(*command, folder=tmp_path / "run")
    assert (found["results"], again) == (first["results"], False)
    assert "folder: not measured again" in capsys.readouterr().out
    cats = sorted((data / "val/cat").iterdir())
    shutil.copy(data / "train/dog/7.jpg", cats[0])  # an edited image
    edited, again = measured(*command, folder=tmp_path / "run")
    assert again and "settings differ: data.image: " in capsys.readouterr().out
    dogs = sorted((data / "val/dog").iterdir())
    cats[1].rename(data / "val/dog" / f"0{dogs[0].name}"), dogs[0].rename(data / "val/cat" / f"9{cats[1].name}")
    swapped, again = measured(*command, folder=tmp_path / "run")
    assert again
    results = [content["results"]["folder"]["chance"] for content in (first, edited, swapped)]
    assert len({json.dumps(row["fidelity_plus_curve"]) for row in results}) > 1


def test_two_processes_under_a_limit_of_each_measure_again_what_one_has_measured(images, tmp_path, monkeypatch):
    command = (*OWN_HEAD, f"data_dir={images}", "tasks.folder.data.eval_batch_size=2")
    command += ("trainer.limit_test_batches=1",)
    content, _ = measured(*command, folder=tmp_path)
    assert content["results"]["folder"]["chance"]["images"] == 2
    rows = []
    monkeypatch.setattr("eval.list_rows", lambda *given: rows.append(list_rows(*given)) or rows[0])
    monkeypatch.setattr(evaluation, "launch", lambda trainer: True)
    evaluate(*MEASURE, *command, "trainer.devices=2", folder=tmp_path)
    (row,) = rows[0]["folder"]
    assert not row.path.exists() and row.find_change() == "processes: 1 → 2"


def shown(folder):
    """Explainer → number of pictures with its heatmap in the gallery."""
    data = json.loads(re.search(r"<script[^>]*json[^>]*>(.*?)</script>", (folder / "gallery.html").read_text())[1])
    (task,) = data["tasks"]
    of_pictures = [row["explainer"] for picture in task["pictures"] for row in picture["heatmaps"]]
    return {data["explainers"][number]["name"]: of_pictures.count(number) for number in of_pictures}


@pytest.mark.slow
def test_pictures_are_those_of_the_rows(images, tmp_path, capsys):
    command = ["target=tiny", "tasks=[folder]", "tasks.folder.data.num_workers=0", *OWN_HEAD, f"data_dir={images}"]
    command += ["explainers=[chance]", "methods=[Occlusion]", "evaluation.curves=[]", "figures=[]", *QUIET]
    evaluate(*command, "pictures.images=2", folder=tmp_path)
    assert shown(tmp_path) == {"chance": 2, "Occlusion": 2} and (tmp_path / "folder.png").exists()
    evaluate(*command, "pictures=null", "explainers.chance.seed=1", folder=tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert "folder: no heatmaps of chance on these images (fresh=true makes new ones)" in lines
    assert shown(tmp_path) == {"Occlusion": 2}
    evaluate(*command, "pictures=null", folder=tmp_path)  # nothing is measured
    assert shown(tmp_path) == {"chance": 2, "Occlusion": 2}

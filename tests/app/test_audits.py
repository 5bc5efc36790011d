"""Audits of folders: labels, masks, what is written and printed, and one line for what a user can correct."""

import copy
import json
import sys
import warnings

import numpy as np
import pytest
import torch
from conftest import timm_model
from devices import DEVICE, refusing_to_mix
from PIL import Image
from torch import nn

import explainers
from explainers.app import audit_command, command
from explainers.app.audit_command import HEAD
from explainers.app.audited_photos import find_labels, find_objects, list_folder
from explainers.app.audits import open_audit, start_session
from explainers.app.session import Session
from explainers.auditing.audit import FILES, Audit
from explainers.errors import InputError
from explainers.models import TargetModel, as_target
from explainers.models.heads import save_head
from explainers.report.audit_page import PAGE

CLASSES = ("cats", "dogs")
IMAGES = 12


def write_images(folder, brightness, seed=0, count=IMAGES):
    draws = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for number in range(count):
        pixels = draws.integers(0, 60, (32, 32, 3)) + brightness
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:02}.png")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Dark cats and bright dogs."""
    root = tmp_path_factory.mktemp("animals")
    for name, brightness in zip(CLASSES, (0, 190), strict=True):
        write_images(root / name, brightness)
    return root


@pytest.fixture(scope="module")
def target(folder):
    """A tiny ViT that tells them apart, with the names of both."""
    target = timm_model(as_target=True)
    session = Session(target, "DirectPaths")
    with torch.no_grad():
        seen = [session.decode(list_folder(folder / name))[1] for name in CLASSES]
        cats, dogs = (target.embed(target.normalise(pixels)).mean(0) for pixels in seen)
        head = nn.Linear(target.embed_dim, 2)
        row = (dogs - cats) / (dogs - cats).norm() ** 2
        head.weight.copy_(torch.stack([-row, row]))
        head.bias.copy_(torch.tensor([1.0, -1.0]) * (row @ (cats + dogs)) / 2)
    target = TargetModel(target, head=head).eval()
    target.classes = list(CLASSES)
    return target


@pytest.fixture(scope="module")
def audited(folder, target, tmp_path_factory):
    output = tmp_path_factory.mktemp("audit")
    return explainers.audit(folder, target, method="DirectPaths", labels="folder", groups=2, output=output), output


def test_an_audit_of_a_folder_is_returned_and_written(audited, folder):
    audit, output = audited
    assert isinstance(audit, explainers.Audit) and audit.classes == list(CLASSES) and audit.shape == (4, 4)
    assert audit.numbers["images"] == 2 * IMAGES and audit.numbers["accuracy"] == 1.0
    assert 0 < audit.numbers["stability"] <= 1
    assert audit.numbers["bytes"] == sum(file.stat().st_size for file in (output / "evidence").iterdir())
    assert {group.class_index for group in audit.groups} == {0, 1}
    assert audit.about["explainer"] == "DirectPaths"
    assert Audit.load(output).groups == audit.groups
    names = {example.name for group in audit.groups for example in group.examples}
    page = (output / PAGE).read_text()
    assert all(name in page for name in names)
    assert names and names <= {file.relative_to(folder).as_posix() for file in folder.rglob("*.png")}


def test_the_same_call_again_takes_the_stored_evidence(audited, folder, target, monkeypatch):
    audit, output = audited
    monkeypatch.setattr("explainers.auditing.store.take_evidence", None)
    again = explainers.audit(folder, target, method="DirectPaths", labels="folder", groups=2, output=output)
    assert again.groups == audit.groups


def test_the_other_processes_end_after_their_share(audited, folder, target, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as ended:
        explainers.audit(folder, target, method="DirectPaths", labels="folder", output=audited[1])
    assert not ended.value.code and "process 1: its evidence is in" in capsys.readouterr().err


def test_folders_are_classes_by_name_by_wnid_or_in_order(folder, target, monkeypatch):
    photos = list_folder(folder)
    assert find_labels("folder", photos, target).tolist() == [0] * IMAGES + [1] * IMAGES
    monkeypatch.setattr(target, "classes", ["Dogs", "Cats"])
    assert find_labels("folder", photos, target).tolist() == [1] * IMAGES + [0] * IMAGES
    with pytest.warns(UserWarning, match=r"^labels: 23 of 24 images have no label \(cats/01.png, .*, ...\)$"):
        assert find_labels({"cats/00.png": "cats"}, photos, target).tolist() == [1] + [-1] * (2 * IMAGES - 1)
    monkeypatch.setattr(target, "classes", ["n02127052", "Dogs"])  # a lynx
    with pytest.raises(InputError, match=r"^labels=folder: expected images of the head\'s 2 classes .*cats, dogs"):
        find_labels("folder", photos, target)
    monkeypatch.setattr(target, "classes", [])
    with pytest.warns(UserWarning, match="the order is taken as cats, dogs"):
        assert find_labels("folder", photos, target).tolist() == [0] * IMAGES + [1] * IMAGES


STEMS = [f"{name}/{number:02}" for name in CLASSES for number in range(IMAGES)]


LABELS = {
    "numbers as text": lambda folder: {f"{each}.png": str(row // IMAGES) for row, each in enumerate(STEMS)},
    "no ending": lambda folder: {each: each[:4] for each in STEMS},
    "paths": lambda folder: {folder / f"{each}.png": each[:4] for each in STEMS},
    "from elsewhere": lambda folder: {f"../{folder.name}/{each}.PNG": each[:4] for each in STEMS},
    "list of numbers": lambda folder: ["0"] * IMAGES + ["1"] * IMAGES,
}
LABEL_FILES = {
    "titles.csv": "\n".join(["photo;class", *(f"{each};{each[:4]}" for each in STEMS)]),
    "plain.csv": "\n".join(f'"{each}.png",{each[:4]}' for each in STEMS),
    "a.json": json.dumps({each: each[:4] for each in STEMS}),
}


def test_labels_find_their_images_in_every_form(folder, target, tmp_path):
    forms = [make(folder) for make in LABELS.values()]
    for name, text in LABEL_FILES.items():
        (tmp_path / name).write_text(text)
        forms.append(tmp_path / name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for form in forms:
            assert find_labels(form, list_folder(folder), target).tolist() == [0] * IMAGES + [1] * IMAGES


def open_nothing(folder, target, tmp_path, **settings):
    with pytest.raises(InputError) as refused:
        explainers.audit(folder, target, **{"method": "DirectPaths", "output": tmp_path / "audit"} | settings)
    assert not (tmp_path / "audit" / FILES[0]).exists() and "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("labels", {"x.png": 0}, "no image (x.png)"),
        ("labels", {"00.png": 0}, "00.png is the name of 2 images"),
        ("labels", {"cats/00": 0, "cats/00.png": 1}, "cats/00.png"),
        ("labels", {"cats/00.png": "cat"}, "labels=cat"),
        ("labels", {"cats/00.png": "7"}, "labels=7"),
        ("labels", "absent.csv", "labels=absent.csv"),
        ("labels", "folders", "labels=folders"),
        ("labels", "three.csv", "three.csv"),
        ("labels", "none.csv", "24 of 24 images have no label"),
        ("labels", ["cats"] * 23, "labels"),
        ("method", "RISE", "RISE"),
        ("passes", "x", "passes='x'"),
        ("passes", 0, "passes=0"),
        ("groups", "x", "groups='x'"),
        ("groups", 10_000, "groups=10000"),
        ("masks", "nowhere", "nowhere"),
        ("output", __file__, "output"),
    ],
)
def test_bad_settings_and_labels_of_no_image_or_of_several_are_refused(
    folder, target, setting, value, named, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "three.csv").write_text("a,b,c")
    (tmp_path / "none.csv").write_text("")
    assert named in open_nothing(folder, target, tmp_path, **{setting: value})


def test_what_labels_of_a_folder_lack_is_said(folder, target, tmp_path):
    with pytest.raises(InputError, match=r"^labels=folder: expected a folder for each class, got 12 images"):
        find_labels("folder", list_folder(folder / "cats"), target)
    write_images(tmp_path / "cats", 0, count=2)
    Image.new("RGB", (32, 32)).save(tmp_path / "beside.png")
    with pytest.warns(UserWarning) as warned:
        assert find_labels("folder", list_folder(tmp_path), target).tolist() == [-1, 0, 0]
    lines = [str(warning.message) for warning in warned]
    assert len(lines) == 2 and "1 image beside the folders" in lines[0] and "one class, cats" in lines[1]


def test_models_and_folders_without_an_audit_are_refused(folder, target, tmp_path):
    open_nothing(folder, as_target(target, head=nn.Linear(24, 2), score="value"), tmp_path)
    other = timm_model(seed=1, as_target=True)
    file = save_head(target.head, tmp_path / "head.safetensors", other.backbone_identity(), CLASSES)
    with pytest.raises(InputError, match=str(file)):
        as_target(target, head=file)
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", folder / "cats/00.png"):
        assert place.name in open_nothing(place, target, tmp_path)


def test_patches_of_masks_are_on_the_object(folder, target, tmp_path):
    session, photos = Session(target, "DirectPaths"), list_folder(folder)
    mask = np.zeros((32, 32), dtype=np.uint8)
    mask[8:16, 16:32] = mask[0:8, 0:3] = 1  # patches 6 and 7; less than half of patch 0
    (tmp_path / "dogs").mkdir()
    Image.fromarray(mask).save(tmp_path / "dogs/03.png")
    with pytest.warns(UserWarning, match=r"no mask that can be decoded of 23 files \(00.png"):
        inside = find_objects(tmp_path, photos, session, target.grid)
    assert inside[IMAGES + 3].nonzero()[:, 0].tolist() == [6, 7] and inside.sum() == 23 * 16 + 2
    with pytest.raises(InputError, match="12 files"):
        find_objects(tmp_path, list_folder(folder / "cats"), session, target.grid)


def test_broken_masks_are_named_and_double_ones_refused(folder, target, tmp_path):
    session, photos = Session(target, "DirectPaths"), list_folder(folder / "cats")
    mask = np.kron([[3, 0], [0, 0]], np.ones((16, 16), dtype=int))
    for number in range(IMAGES):
        indexed(mask.copy()).save(tmp_path / f"{number:02}.png")
    inside = find_objects(tmp_path, photos, session, target.grid)
    assert inside.float().mean(1).tolist() == [0.25] * IMAGES
    for number in range(6):
        (tmp_path / f"{number:02}.png").write_bytes(b"no image")
    line = rf"^{tmp_path}: no mask that can be decoded of 6 files \(00.png, .*\): all of each counts as the object$"
    with pytest.warns(UserWarning, match=line):
        inside = find_objects(tmp_path, photos, session, target.grid)
    assert inside.float().mean(1).tolist() == [1] * 6 + [0.25] * 6
    Image.new("1", (32, 32)).save(tmp_path / "00.bmp")
    with pytest.raises(InputError, match="got 13 files of 12 names"):
        find_objects(tmp_path, photos, session, target.grid)
    (tmp_path / "one").mkdir()
    for mask, got in ((np.zeros((32, 32)), "none in any"), (np.arange(32)[None].repeat(32, 0), "got 32 from 0 to 31")):
        Image.fromarray(mask.astype(np.uint8)).save(tmp_path / "one/00.png")
        with pytest.raises(InputError, match=got):
            find_objects(tmp_path / "one", photos, session, target.grid)


def indexed(ids):
    """As those of PASCAL VOC, with a rim that is void."""
    ids[16, :17] = ids[:17, 16] = 255
    image = Image.fromarray(ids.astype(np.uint8))
    image.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0] + [224] * 756)
    return image


@pytest.fixture
def run(target, folder, monkeypatch, capsys):
    """Run `explainers audit` with the small model: its exit status, and the lines of its output and of its errors."""
    monkeypatch.setattr(audit_command, "model_and_methods", lambda options: (target, options.method))

    def run(*words):
        words = ["audit", str(folder), "--method", "DirectPaths", *map(str, words)]
        monkeypatch.setattr(sys, "argv", ["explainers", *words])
        status = command.main(words)
        out, err = capsys.readouterr()
        return status, out.splitlines(), err.splitlines()

    return run


def test_the_command_prints_groups_and_where_the_page_is(run, audited):
    audit, output = audited
    status, lines, errors = run("--output", output)
    assert status == 1 and "--labels folder" in errors[0] and "differs in images.labels" in errors[1]
    status, lines, errors = run("--labels", "folder", "--groups", "2", "--output", output)
    assert (
        errors == [] and status == 0 and lines[0].startswith(f"24 images, 100.0% predicted right: {audit.conclude()}")
    )
    rows = [line.split()[:2] for line in lines if line.split()[:1] and line.split()[0].isdecimal()]
    assert ["0", CLASSES[audit.groups[0].class_index]] in rows
    assert f"{output / PAGE} shows the groups in the photos; {output / FILES[0]} has all numbers" in lines
    assert json.loads((output / FILES[0]).read_text())["about"]["command"][:2] == ["explainers", "audit"]


def test_without_writes_a_head_that_explains(run, audited, folder, target):
    audit, output = audited
    status, lines, errors = run("--output", output, "--without", "0")
    assert status == 0 and len(errors) == 1  # the accuracy falls, as weights are random
    assert sum(line.endswith("<- chosen") for line in lines) == 1 and f"--head {output / HEAD}" in lines[-1]
    repaired = audit.without([0])
    after = TargetModel(target, head=output / HEAD)
    assert torch.equal(after.head.weight, repaired.head.weight) and after.classes == list(CLASSES)
    assert not torch.equal(after.head.weight, target.head.weight)
    assert explainers.explain(folder / "cats/00.png", after, method="DirectPaths").heatmap.shape == (4, 4)
    assert str(audit.report_card(repaired)) in "\n".join(lines)


def test_without_needs_an_audit_of_this_model_and_folder_and_groups_that_are_there(run, audited, folder, tmp_path):
    _, output = audited
    for words, message in (
        (["--output", output, "--without", "99"], "--without: expected different numbers of groups from 0 to 3, got"),
        (["--output", output, "--without", "0", "--strength", "-1"], "expected strength above 0, got --strength=-1"),
        (["--output", tmp_path, "--without", "3", "7"], "--without 3 7: expected the folder of an audit, got"),
    ):
        status, lines, errors = run(*words)
        assert status == 1 and lines == [] and len(errors) == 1 and errors[0].startswith(f"explainers: {message}")
    write_images(tmp_path / "others", 0, count=2)
    session = start_session(audited[0].session.target, "DirectPaths")
    with pytest.raises(InputError, match="holds another audit, which differs in images"):
        open_audit(session, tmp_path / "others", output)


@pytest.mark.parametrize("groups", ["0", 0, ["0"], [0.0], [True], [1, 1], []])
def test_groups_are_taken_out_by_a_list_of_their_numbers(audited, groups):
    with pytest.raises(InputError, match="^without: expected different numbers of groups from 0 to 3, got "):
        audited[0].without(groups)


def test_an_audit_and_its_repair_compute_on_the_device(audited, folder, target, tmp_path):
    expected, _ = audited
    with refusing_to_mix():
        there = copy.deepcopy(target).to(DEVICE)
        found = explainers.audit(folder, there, method="DirectPaths", labels="folder", groups=2, output=tmp_path)
        repaired = found.without([0])
        card = found.report_card(repaired)
    assert [group.share for group in found.groups] == pytest.approx(
        [group.share for group in expected.groups], rel=0.01
    )
    assert str(card) == str(expected.report_card(expected.without([0])))

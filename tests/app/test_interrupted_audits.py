# ruff: noqa: F811
"""An audit that is killed at any write, that another one overtakes, or whose photos change: consistent, or refused."""

import json
import shutil
import warnings
from pathlib import Path
from pkgutil import resolve_name

import pytest
from browser import content
from PIL import Image
from test_audits import IMAGES, folder, target  # noqa: F401

import explainers
from explainers.app.audits import open_audit, start_session
from explainers.auditing.audit import FILES
from explainers.auditing.store import EvidenceStore
from explainers.errors import InputError
from explainers.report.audit_page import PAGE

WRITES = ("photos.json", "00001.safetensors", PAGE, "groups.safetensors", "results.json", PAGE)
"""Writes of a second audit in a folder that lacks a shard: the first page is deleted, the other files are renamed."""


class Killed(BaseException):
    """Ends an audit as a kill does."""


def audit(folder, target, output, groups=2, **settings):
    return explainers.audit(
        folder, target, method="DirectPaths", labels="folder", groups=groups, output=output, passes=24, **settings
    )


def act_at(write, after, action, patch):
    """Act once, before or after the write with this number; returns the names of all writes so far."""
    names = []

    def wrap(original):
        def changed(path, *arguments, **settings):
            if ".unfinished" in path.name and not arguments:  # what `atomic` clears away
                return original(path, *arguments, **settings)
            names.append(Path(*arguments[:1] or [path]).name)
            now = len(names) == write + 1
            if now and not after:
                action()
            original(path, *arguments, **settings)
            if now and after:
                action()

        return changed

    for name in ("replace", "unlink"):
        patch.setattr(Path, name, wrap(getattr(Path, name)))
    return names


@pytest.fixture(scope="module")
def first(folder, target, tmp_path_factory):
    """The folder of an audit in three shards."""
    output = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EvidenceStore.__init__, "__defaults__", (8,))
        audit(folder, target, output)
        yield output


def check_one_audit(session, folder, output):
    """What is opened has one number of groups in all files, or is refused in one line."""
    try:
        opened = open_audit(session, folder, output)
    except InputError as error:
        assert len(str(error).splitlines()) == 1
        return None
    numbers, page = json.loads((output / FILES[0]).read_text()), content((output / PAGE).read_text())
    assert opened.id == numbers["id"] == page["id"]
    assert len(numbers["groups"]) == len(page["groups"]) == len(opened.centres.classes) == len(opened.groups)
    return opened


# before a write, the files are those after the last one
@pytest.mark.parametrize(("write", "after"), [(0, False), *((write, True) for write in range(len(WRITES)))])
def test_a_killed_audit_is_consistent_or_refused_and_its_repeat_is_whole(
    first,
    folder,
    target,
    tmp_path,
    write,
    after,
):
    output, session = tmp_path / "audit", start_session(target, "DirectPaths")
    shutil.copytree(first, output)
    (output / "evidence" / "00001.safetensors").unlink()

    def kill():
        raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        names = act_at(write, after, kill, patch)
        audit(folder, target, output, groups=3)
    assert names == [*WRITES[: write + 1]]
    check_one_audit(session, folder, output)
    repeated = audit(folder, target, output, groups=3)
    assert check_one_audit(session, folder, output).groups == repeated.groups


@pytest.mark.parametrize("write", [0, 4])  # before evidence and the numbers are written
def test_two_audits_at_once_are_consistent_or_refused(first, folder, target, tmp_path, write):
    output, session = tmp_path / "audit", start_session(target, "DirectPaths")
    shutil.copytree(first, output)
    (output / "evidence" / "00001.safetensors").unlink()
    with pytest.MonkeyPatch.context() as patch:
        names = act_at(write, True, lambda: audit(folder, target, output, groups=4), patch)
        audit(folder, target, output, groups=3)
    assert len(names) > len(WRITES)
    opened = check_one_audit(session, folder, output)
    assert opened is None or len(opened.groups) in (6, 8)


def test_another_audit_that_starts_in_the_folder_is_noticed(folder, target, tmp_path):
    other, output = tmp_path / "other", tmp_path / "audit"
    shutil.copytree(folder, other)
    Image.new("RGB", (32, 32)).save(other / "cats" / "more.png")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError, match="another audit, .* in images.count"):
        act_at(0, True, lambda: audit(other, target, output), patch)
        audit(folder, target, output)


def change(file, how):
    """Delete, truncate or replace a file."""
    if how == "deleted":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:50] if how == "truncated" else (file.parent / "07.png").read_bytes())


@pytest.mark.parametrize(
    ("when", "how"),
    [("decoding", "deleted"), ("decoding", "replaced"), ("hiding", "truncated"), ("hiding", "replaced")],
)
def test_a_photo_that_changes_is_left_out_and_its_shard_alone_is_taken_again(
    first, folder, target, tmp_path, monkeypatch, how, when
):
    photos, output = tmp_path / "photos", tmp_path / "audit"
    shutil.copytree(folder, photos)
    file, shards = photos / "cats" / "02.png", output / "evidence"
    take = {"decoding": "explainers.app.audited_photos.decode_known", "hiding": "explainers.app.audits.measure_groups"}
    original, calls = resolve_name(take[when]), []

    def changed(*arguments, **settings):
        calls.append(0)
        if len(calls) == 1:
            change(file, how)
        return original(*arguments, **settings)

    monkeypatch.setattr(take[when], changed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        audit(photos, target, output)
    lines = [str(each.message) for each in caught if "02.png" in str(each.message)]
    if when == "hiding":
        assert lines == ["neither hidden nor shown: 1 file (02.png) changed since the evidence was taken"]
    elif how != "replaced":  # evidence is of the new photo
        assert lines == ["left out: 1 file (02.png) that cannot be decoded, or are gone"]
    kept = {each: each.stat().st_mtime_ns for each in shards.glob("0*")}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = audit(photos, target, output)
    assert again.numbers["images"] == 2 * IMAGES - (how != "replaced")
    assert {each.name for each in kept if each.stat().st_mtime_ns != kept[each]} <= {"00000.safetensors"}
    if when == "hiding":
        line = "evidence of 1 of 3 shards is taken again: 1 file (02.png) changed or deleted since"
        assert line in [str(each.message) for each in caught]
    opened = open_audit(start_session(target, "DirectPaths"), photos, output)
    assert opened.groups == again.groups and opened.without([0]).head

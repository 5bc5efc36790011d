"""Files that are never half-written, and remembered hashes."""

import hashlib
import os
import signal
import subprocess
import sys
import time

import pytest

from explainers.saved import files
from explainers.saved.files import atomic, file_hashes


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new/picture.png"
    with pytest.raises(RuntimeError), atomic(path) as unfinished:
        unfinished.write_text("half")
        raise RuntimeError
    assert list(path.parent.iterdir()) == []
    with atomic(path) as unfinished:
        unfinished.write_text("whole")
        unfinished.chmod(0o600)  # as safetensors writes files
        assert unfinished.suffix == ".png" and not path.exists()
    assert path.read_text() == "whole" and list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~files.UMASK


def test_what_a_process_has_left_is_overwritten_by_the_next_that_is_alone(tmp_path):
    with atomic(tmp_path / "last.ckpt", alone=True) as unfinished:
        left = unfinished
        unfinished.write_text("whole")
    left.write_text("half, of a killed process")
    with atomic(tmp_path / "last.ckpt", alone=True) as unfinished:
        unfinished.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_killed_processes_have_left_is_deleted_after_an_hour(tmp_path):
    program = (
        "import os, signal, sys\nfrom explainers.saved.files import atomic\n"
        "with atomic(sys.argv[1]) as unfinished:\n"
        "    unfinished.write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    (tmp_path / "a.json").write_text("old")
    killed = subprocess.run([sys.executable, "-c", program, tmp_path / "a.json"], check=False)
    assert killed.returncode == -signal.SIGKILL and (tmp_path / "a.json").read_text() == "old"
    (left,) = tmp_path.glob(".*")
    for age, kept in ((0, [left]), (files.ABANDONED + 60, [])):
        os.utime(left, (time.time() - age,) * 2)
        files.delete_leftovers.cache_clear()  # as in another process
        with atomic(tmp_path / "b.json") as unfinished:
            unfinished.write_text("whole")
        assert list(tmp_path.glob(".*")) == kept


@pytest.fixture
def hashed(monkeypatch, tmp_path):
    """The files that were read, and not remembered; a file settles at once."""
    read, compute = [], files._hash
    monkeypatch.setattr(files, "_hash", lambda path: read.append(path) or compute(path))
    monkeypatch.setattr(files, "SETTLED", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "memory"))
    return read


def test_a_hash_is_computed_once_and_again_after_every_change(hashed, tmp_path):
    path = tmp_path / "image"
    path.write_bytes(b"one")
    assert file_hashes([path, path]) == file_hashes([path]) * 2 == [hashlib.sha256(b"one").hexdigest()] * 2
    assert len(hashed) == 1
    times = path.stat()
    path.write_bytes(b"two")  # of the same size, at the same time
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file_hashes([path]) == [hashlib.sha256(b"two").hexdigest()] and len(hashed) == 2


def test_a_file_that_changed_just_now_is_not_remembered(hashed, tmp_path, monkeypatch):
    """Its next change might leave its times as they are."""
    monkeypatch.setattr(files, "SETTLED", 100)
    (tmp_path / "image").write_bytes(b"one")
    for count in (1, 2):
        file_hashes([tmp_path / "image"])
        assert len(hashed) == count


def test_without_a_folder_to_remember_in_hashes_are_computed(hashed, tmp_path, monkeypatch):
    (tmp_path / "memory").write_text("a file, no folder")
    (tmp_path / "image").write_bytes(b"one")
    for _ in range(2):
        assert file_hashes([tmp_path / "image"]) == [hashlib.sha256(b"one").hexdigest()]
    (tmp_path / "memory").unlink(), (tmp_path / "memory/transferable-explainers").mkdir(parents=True)
    (tmp_path / "memory/transferable-explainers/hashes.sqlite").write_bytes(b"torn")
    assert file_hashes([tmp_path / "image"]) == [hashlib.sha256(b"one").hexdigest()]

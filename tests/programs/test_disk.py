"""Full disks and missing permissions end a command in one line."""

import ctypes
import errno
import re
import resource
from pathlib import Path

import pytest
from commands import DIGITS, TVE_RUN, composed
from fork_server import PATIENCE
from forks import forked
from huggingface_hub.errors import LocalEntryNotFoundError
from hydra.errors import InstantiationException
from safetensors import SafetensorError

from explainers.running import program


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/data/cache.npy"), "/data/cache.npy"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "a file in {}"),
        (PermissionError(errno.EACCES, "Permission denied", "/data/x"), "/data/x"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "No space left on device"),
        (LocalEntryNotFoundError("cannot find the requested files"), "cannot find the requested files"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_the_disk_refuses_or_the_hub_lacks_is_named_in_one_line(mistake, told, wrapped, tmp_path):
    cfg = composed(*TVE_RUN, folder=tmp_path)
    with pytest.raises(SystemExit) as ending, program.errors_in_one_line(cfg):
        if wrapped:
            raise InstantiationException(f"Error in call to target: {mistake}") from mistake
        raise mistake
    assert ending.value.code.startswith("error: ") and "\n" not in ending.value.code
    assert told.format(tmp_path) in ending.value.code


def give_up_rights():
    """Make root obey permissions of files, as every other user does: drop all capabilities of this process."""
    version_3, this_process = 0x20080522, 0
    header, none = (ctypes.c_uint32 * 2)(version_3, this_process), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o555)
    with forked("train.py", *TVE_RUN, *DIGITS, folder=folder, prepare=give_up_rights) as process:
        process.join(PATIENCE)
    output = Path(f"{folder}.log").read_text().strip()
    assert process.exitcode == 1 and "Traceback" not in output
    assert re.match(rf"error: .*{folder}", output.rpartition("\n")[2])


def limit_files_when_imported():
    quiet = program.quiet_libraries

    def limited():
        quiet()
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    program.quiet_libraries = limited


@pytest.mark.slow
def test_a_disk_that_is_full_ends_the_run_in_one_line_and_leaves_no_half_a_file(tmp_path):
    """A limit of the size of files stands for the full disk."""
    folder = tmp_path / "run"
    with forked("train.py", *TVE_RUN, *DIGITS, folder=folder, prepare=limit_files_when_imported) as process:
        process.join(PATIENCE)
    output = Path(f"{folder}.log").read_text()
    assert process.exitcode == 1
    assert re.search(rf"error: cannot read or write {folder}/\S+: File too large", output)
    assert "Traceback" not in output
    assert not list(folder.rglob("*.ckpt")) and not (folder / "explainer.safetensors").exists()

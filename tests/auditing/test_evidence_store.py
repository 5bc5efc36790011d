"""Evidence on disk: shards by processes, kills, other audits, broken files."""

import os
import re
import shutil
import signal
from dataclasses import fields, replace

import pytest
import torch
from conftest import timm_model
from fork_server import fork, join

from explainers import posthoc
from explainers.auditing.evidence import Evidence, take_evidence
from explainers.auditing.store import EvidenceStore, Source, process_number
from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.models import TargetModel

COUNT = 11
IMAGES = torch.randint(0, 256, (COUNT, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
LABELS = [*range(5), -1, *range(5)]


def source(broken=(), killed_at=None, asked=None):
    """Eleven images in batches of two, of which some are broken, and one kills the process that decodes it."""

    def batches(part):
        for start in range(part.start, part.stop, 2):
            numbers = [number for number in range(start, min(start + 2, part.stop)) if number not in broken]
            if killed_at in numbers:
                os.kill(os.getpid(), signal.SIGKILL)
            (asked if asked is not None else []).extend(numbers)
            if numbers:
                yield IMAGES[numbers], numbers

    return Source([f"folder/{number}.png" for number in range(COUNT)], LABELS, [], batches)


def path_flow(target=None):
    return posthoc.PathFlow(target or timm_model(as_target=True), PatchGrid(32, 8))


def collect(folder, images=None, rank=None, explainer=None, **settings):
    if rank is not None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    return EvidenceStore(folder, shard_size=4).collect(explainer or path_flow(), images or source(), **settings)


def collect_and_die(folder, killed_at):
    collect(folder, source(killed_at=killed_at))


def files(folder):
    return {path.name: path.read_bytes() for path in (folder / "evidence").glob("[0-9]*")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert collect(folder)
    return folder


def test_shards_have_the_evidence_of_their_images_in_order(whole):
    shards = [*EvidenceStore(whole).shards()]
    assert [shard.numbers.tolist() for shard in shards] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    expected = take_evidence(path_flow(), IMAGES, torch.tensor(LABELS))
    for field in fields(Evidence):
        found = torch.cat([getattr(shard, field.name) for shard in shards])
        torch.testing.assert_close(found, getattr(expected, field.name), rtol=1e-3, atol=1e-4)


def test_two_processes_write_what_one_writes_and_the_first_waits_for_the_second(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    first = fork(collect, tmp_path, rank=0)
    asked = []
    assert not collect(tmp_path, source(asked=asked), rank=1)
    join(first)
    assert first.exitcode == 0 and files(tmp_path) == files(whole)
    assert asked == [4, 5, 6, 7]


def test_a_killed_process_continues_with_the_shards_that_are_missing(whole, tmp_path):
    killed = fork(collect_and_die, tmp_path, killed_at=6)
    join(killed)
    assert killed.exitcode == -signal.SIGKILL and files(tmp_path).keys() == {"00000.safetensors"}
    asked = []
    collect(tmp_path, source(asked=asked))
    assert asked == [*range(4, COUNT)] and files(tmp_path) == files(whole)


def test_the_folder_of_another_audit_is_refused_with_what_differs(whole, tmp_path):
    head = TargetModel(timm_model(as_target=True), head=torch.nn.Linear(24, 5)).eval()
    later = tmp_path / "x.png"
    later.touch()
    for change, differs in (
        ({"explainer": path_flow(head)}, "target.head_sha256: [0-9a-f]{12} → [0-9a-f]{12}"),
        ({"explainer": posthoc.DirectPaths(timm_model(as_target=True), PatchGrid(32, 8))}, "explainer.class: PathFlow"),
        ({"strongest": 3}, "strongest: 40 → 3"),
        ({"images": replace(source(), labels=[0] * COUNT)}, "images.labels_sha256"),
        ({"images": replace(source(), files=[later])}, "images.files"),
        ({"images": replace(source(), names=["x"] * COUNT)}, "images.names_sha256"),
    ):
        line = f"^output: .* {re.escape(str(whole))}, which holds another audit, which differs in {differs}[^\n]*$"
        with pytest.raises(InputError, match=line):
            collect(whole, **change)


def test_broken_files_are_left_out_and_named(tmp_path):
    with pytest.warns(UserWarning, match=r"left out: 5 files \(2.png, 3.png, 8.png, ...\) that cannot be decoded"):
        collect(tmp_path, source(broken=[2, 3, 8, 9, 10]))
    shards = [*EvidenceStore(tmp_path).shards()]
    assert [shard.numbers.tolist() for shard in shards] == [[0, 1], [4, 5, 6, 7]]

    with pytest.raises(InputError, match="expected images, got 11 files"):
        collect(tmp_path / "other", source(broken=range(COUNT)))


def copied(whole, tmp_path):
    shutil.copytree(whole / "evidence", tmp_path / "evidence")
    return [tmp_path / "evidence" / f"{number:05}.safetensors" for number in (0, 1, 2, 99)]


def test_a_file_beside_the_shards_is_left_out_and_named(whole, tmp_path):
    first, *_, other = copied(whole, tmp_path)
    shutil.copy(first, other)
    with pytest.warns(UserWarning, match=r"^left out: 1 file \(00099.safetensors\) beside the 3 shards in"):
        collect(tmp_path)
    store = EvidenceStore(tmp_path)
    with pytest.warns(UserWarning, match="00099"):
        assert store.identity().keys() == {"target", "explainer", "images", "strongest", "shard_size"}
    assert [len(shard.numbers) for shard in store.shards()] == [4, 4, 3]


def flip(path, other):
    data = bytearray(path.read_bytes())
    data[-50] ^= 64
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "got"),
    [
        (flip, "as it was written, got a changed file: delete it, and repeat the command"),
        (lambda path, other: shutil.copy(other, path), "expected shard 1, got a copy of 0: delete it, and repeat"),
        (lambda path, other: path.write_bytes(b""), "got a damaged file: delete it"),
        (lambda path, other: path.unlink(), "expected the evidence of an audit, got no file"),
    ],
)
def test_a_changed_shard_is_refused_before_any_pass_and_made_again_once_it_is_deleted(whole, tmp_path, damage, got):
    first, second, *_ = copied(whole, tmp_path)
    damage(second, first)
    asked, line = [], rf"^{re.escape(str(second))}: .*{got}"
    with pytest.raises(InputError, match=line):
        EvidenceStore(tmp_path).identity()
    if second.exists():
        with pytest.raises(InputError, match=line):
            collect(tmp_path, source(asked=asked))
        second.unlink()
    assert not asked and collect(tmp_path) and files(tmp_path) == files(whole)


def test_srun_numbers_processes_and_a_batch_script_alone_is_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "2")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert process_number() == (0, 1)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert process_number() == (2, 4)

"""A store of rows survives kills, full disks, damaged files and several writers; or says in one line what is wrong."""

import errno
import os
import re

import numpy as np
import pytest
import torch
from fork_server import PATIENCE, fork

from datamodules.store import Store, StoredRows
from explainers.errors import InputError

KEY = {"source": "example", "target": {"weights": "abc"}}


def store(folder, size=6, **key):
    return Store(folder, KEY | key, size)


def rows(*index, width=3):
    return torch.tensor(index), {"score": torch.tensor(index)[:, None].float().expand(-1, width) + 0.5}


def filled(folder, size=6, **key):
    own = store(folder, size, **key)
    own.write(*rows(*range(size)))
    return own


def test_whole_numbers_keep_their_type_and_others_are_kept_in_half_precision(tmp_path):
    own, images = store(tmp_path, size=2), torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    values = torch.tensor([[1e-3, 65504.0], [float("inf"), -0.1]])
    own.write(torch.tensor([0, 1]), {"image": images, "value": values})
    read = [store(tmp_path, size=2).read(i) for i in range(2)]
    assert torch.equal(torch.stack([row["image"] for row in read]), images)
    assert torch.equal(torch.stack([row["value"] for row in read]), values.half().float())


@pytest.mark.parametrize("kind", [np.int64, np.complex64, str, np.float32, None], ids=str)
def test_rows_of_another_type_or_without_numbers_are_refused(tmp_path, kind):
    path = filled(tmp_path).path / "score.npy"
    scores = np.load(path)
    np.save(path, scores.astype(kind) if kind else scores * np.nan)
    with pytest.raises(InputError, match=rf"^{path}: .*delete the folder"):
        store(tmp_path).read(5)


def test_a_lost_or_damaged_list_of_types_is_named(tmp_path):
    path = filled(tmp_path).path / "types.json"
    for text in ("", "[]", '{"score": "evil"}', "[" * 100000, None):
        path.unlink() if text is None else path.write_text(text)
        for use in (lambda: store(tmp_path).read(5), lambda: store(tmp_path).refresh(["score"])):
            with pytest.raises(InputError, match=rf"^{path}: .*; delete the folder"):
                use()


@pytest.mark.parametrize("value", [65520.0, -3e38, float("nan")])
def test_values_beyond_half_precision_are_refused_with_their_row(tmp_path, value):
    own, (index, values) = store(tmp_path), rows(4, 2)
    values["score"][1, 2] = value
    line = f"expected score of image 2 within ±65504, which half precision can hold, got {value:g}; set cache=none"
    with pytest.raises(InputError, match=re.escape(line)):
        own.write(index, values | {"other": torch.zeros(2)})
    assert own.missing() == list(range(6)) and not list(own.path.glob("score*"))


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_none(tmp_path, monkeypatch):
    own = store(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=r"No space left on device, .* GB.*score.npy") as error:
            own.write(*rows(0))
        assert error.value.errno == errno.ENOSPC
    assert not list(own.path.glob("score*")) and own.missing() == list(range(6))
    own.write(*rows(0))
    assert own.written() == [0]


def test_an_array_file_of_the_wrong_length_or_header_is_named_with_the_folder_to_delete(tmp_path):
    own = filled(tmp_path)
    path = own.path / "score.npy"
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    damages = [whole[:length] for length in (0, 1, 7, 40, 127, 128, len(whole) - 1)] + [bytes(len(whole)), b"x" * 500]
    damages += [whole.replace(b"(6, 3)", shape) for shape in (b"(5, 3)", b"(6, 9)", b"(6, -)")]
    for _ in range(40):
        header = bytearray(whole)
        header[generator.integers(0, 80)] = generator.integers(0, 256)
        damages.append(bytes(header))
    refused = 0
    for damage in damages:
        path.write_bytes(damage)
        again = store(tmp_path)
        try:
            again.refresh(("score",))
            again.read(5)
        except InputError as error:
            refused += 1
            assert str(path) in str(error) and "\n" not in str(error)
            assert str(error).endswith(f"delete the folder {own.path}, and its rows are computed again")
    assert refused > 40  # a changed space of the header, for example, is no damage
    path.write_bytes(whole)
    assert store(tmp_path).read(5)["score"].tolist() == [5.5] * 3


def test_a_lost_array_is_not_read_as_zeros(tmp_path):
    """Neither for reading nor for writing the rest."""
    own = store(tmp_path)
    own.write(*rows(0, 1))
    (own.path / "score.npy").unlink()
    again = store(tmp_path)
    with pytest.raises(InputError, match=rf"{own.path}/score.npy: .*delete the folder {own.path}"):
        again.refresh(("score",))
    with pytest.raises(InputError, match=rf"{own.path}/score.npy: .*delete the folder {own.path}"):
        again.write(*rows(2))


def write_share(folder, rank, count):
    own = store(folder, size=64)
    for index in range(rank, 64, count):
        own.write(*rows(index))


def test_several_processes_fill_one_store(tmp_path):
    """All of them create its arrays."""
    writers = [fork(write_share, tmp_path, rank, 4) for rank in range(4)]
    for writer in writers:
        writer.join(PATIENCE)
    assert [writer.exitcode for writer in writers] == [0] * 4
    own = store(tmp_path, size=64)
    assert not own.missing()
    assert [own.read(i)["score"].tolist() for i in range(64)] == [[i + 0.5] * 3 for i in range(64)]
    assert not list(tmp_path.rglob("*.unfinished"))


def test_stored_rows_are_those_that_every_store_has(tmp_path):
    scores, others = filled(tmp_path), store(tmp_path, source="other")
    others.write(torch.tensor([0, 2, 3, 5]), {"other": torch.tensor([0, 2, 3, 5])})
    others.mark_corrupt([1, 4])
    samples = StoredRows([scores, others], torch.arange(6) * 10)
    assert len(samples) == 4
    for sample, row in zip((samples[i] for i in range(4)), [0, 2, 3, 5], strict=True):
        assert (sample["index"], sample["label"], sample["other"]) == (row, row * 10, row)
        assert sample["score"].tolist() == [row + 0.5] * 3


def test_a_row_that_one_store_misses_is_not_read_as_zeros(tmp_path):
    scores, others = filled(tmp_path), store(tmp_path, source="other")
    others.write(torch.tensor([0, 2, 3]), {"other": torch.tensor([0, 2, 3])})
    others.mark_corrupt([1])
    for stores in ([scores, others], [others, scores]):
        with pytest.raises(InputError, match=rf"expected rows of 6 images in {others.path}, got no row for 2 of them"):
            StoredRows(stores, None)

"""Full disks, missing permissions and damaged files lose nothing. `faults.py` tries far more of them, and kills.

Kills: of a training, `test_train` and `test_mid_epoch`; of the store, `test_train_cached`; of an evaluation,
`test_unfinished`; of `write_beton`, `test_beton_classes`.
"""

import pytest
from fault_jobs import JOBS, Lab
from faults import damage, file_limits, read_only

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("faults"))


def test_a_full_disk_ends_in_one_line_and_leaves_nothing_half_written(lab):
    """The arrays of the store are larger than the limit; a training: `test_disk`."""
    row = file_limits(lab, JOBS["store"], [10_000])
    assert row.rounds == 1 and row.lost == []


def test_a_folder_that_cannot_be_written_to_is_named(lab):
    assert read_only(lab, JOBS["training"], ["new"]).lost == []


@pytest.mark.parametrize(
    ("name", "pattern", "share"),
    [
        ("training", "run/checkpoints/last.ckpt", 0.5),
        ("training", "run/metrics.json", None),  # as if the command had been killed before it wrote this last file
        ("store", "cache/*/*/meta.npy", 0.5),
    ],
)
def test_a_file_that_is_damaged_or_gone_is_named_or_does_no_harm(name, pattern, share, lab):
    row = damage(lab, JOBS[name], pattern, {"rest": share})
    assert row.rounds == 1 and row.lost == []

"""Files of weights, which say what they belong to."""

import pytest
import torch

from explainers.errors import InputError
from explainers.saved.weights import check_identity, read_weights, save_weights

WEIGHTS = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.zeros(2)}
IDENTITY = {"target": {"backbone": "vit", "normalisation": {"mean": [0.5]}}, "hops": [1, 2], "mae": None}


def test_weights_come_back_with_what_they_belong_to(tmp_path):
    path = save_weights(WEIGHTS, tmp_path / "new/network.safetensors", IDENTITY)
    identity, weights = read_weights(path)
    assert identity == IDENTITY and weights.keys() == WEIGHTS.keys()
    assert all(torch.equal(weights[name], value) for name, value in WEIGHTS.items())
    assert read_weights(save_weights(WEIGHTS, path))[0] == {}


def test_equal_weights_make_equal_files(tmp_path):
    """A finished run that is run again writes what is there already, so that nothing is measured again."""
    contents = {save_weights(WEIGHTS, tmp_path / f"{i}.safetensors", IDENTITY).read_bytes() for i in range(20)}
    assert len(contents) == 1


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_no_other(tmp_path):
    path = save_weights(WEIGHTS, tmp_path / "network.safetensors", IDENTITY)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        save_weights(WEIGHTS, path, {"hops": {1, 2}})
    with pytest.raises(AttributeError):
        save_weights({"weight": None}, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_missing_and_a_damaged_file_are_named(tmp_path):
    with pytest.raises(InputError, match="no trained explainer at .*nowhere.safetensors: train one"):
        read_weights(tmp_path / "nowhere.safetensors")
    path = save_weights(WEIGHTS, tmp_path / "cut.safetensors", IDENTITY)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InputError, match="expected a head at .*cut.safetensors, got a damaged file: delete it"):
        read_weights(path, "a head")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        ({"further": 1}, None),
        ({"hops": [2]}, r"hops: \[2\] → \[1, 2\]: use the model and settings of the file"),
        ({"target": {"backbone": "swin", "normalisation": {"mean": [0.5]}}}, "target.backbone: swin → vit"),
        ({"target": {"backbone": "vit", "normalisation": {"mean": [0.4]}}}, r"target.normalisation.mean: \[0.4\]"),
    ],
    ids=str,
)
def test_the_first_difference_is_named(change, told):
    saved = IDENTITY | change
    if told is None:
        check_identity(saved, IDENTITY, "x.safetensors")
        return
    with pytest.raises(InputError, match=told):
        check_identity(saved, IDENTITY, "x.safetensors")


def test_a_file_that_says_nothing_belongs_to_nothing():
    with pytest.raises(InputError, match="hops: None → "):
        check_identity({}, {"hops": [1]}, "x.safetensors")

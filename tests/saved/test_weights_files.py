"""Files of weights, which say what they belong to."""

from unittest.mock import Mock

import pytest
import timm
import torch
from conftest import TINY_VIT, timm_model
from safetensors import SafetensorError
from safetensors.torch import save_file
from toys import LIGHT

from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.models.fetching import load_target
from explainers.models.heads import load_head
from explainers.saved.weights import check_identity, read_sealed, read_weights, save_weights, seal
from explainers.text.encoders import stored_encoder, text_embeddings
from explainers.tve import TVE
from explainers.tve.masked_autoencoder import read_mae
from explainers.vectors import exported_target

WEIGHTS = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.zeros(2)}
IDENTITY = {"target": {"backbone": "vit", "normalisation": {"mean": [0.5]}}, "hops": [1, 2], "mae": None}


def test_weights_come_back_with_what_they_belong_to(tmp_path):
    path = save_weights(WEIGHTS, tmp_path / "new/network.safetensors", IDENTITY)
    identity, weights = read_weights(path)
    assert identity == IDENTITY and weights.keys() == WEIGHTS.keys()
    assert all(torch.equal(weights[name], value) for name, value in WEIGHTS.items())
    assert len({save_weights(WEIGHTS, path, IDENTITY).read_bytes() for _ in range(20)}) == 1  # so none is used again
    assert read_weights(save_weights(WEIGHTS, path))[0] == {}


def test_a_sealed_file_of_which_a_number_changed_is_refused(tmp_path):
    sealed = IDENTITY | {"sha256": seal(IDENTITY, WEIGHTS)}
    path = save_weights(WEIGHTS, tmp_path / "a.safetensors", sealed)
    assert read_sealed(path, "evidence", "audit again")[0] == IDENTITY
    for weights, identity in ((WEIGHTS | {"bias": torch.ones(2)}, sealed), (WEIGHTS, sealed | {"mae": "a"})):
        with pytest.raises(InputError, match="audit again"):
            read_sealed(save_weights(weights, path, identity), "evidence", "audit again")


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_no_other(tmp_path):
    path = save_weights(WEIGHTS, tmp_path / "network.safetensors", IDENTITY)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        save_weights(WEIGHTS, path, {"hops": {1, 2}})
    with pytest.raises(AttributeError):
        save_weights({"weight": None}, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_an_error_of_the_system_that_names_the_file(tmp_path, monkeypatch):
    text = "Error while serializing: I/O error: No space left on device (os error 28)"
    monkeypatch.setattr("explainers.saved.weights.save_file", Mock(side_effect=SafetensorError(text)))
    with pytest.raises(OSError, match="No space left on device") as caught:
        save_weights(WEIGHTS, tmp_path / "network.safetensors")
    assert (caught.value.errno, caught.value.filename) == (28, str(tmp_path / "network.safetensors"))


ROUTES = {
    "head": lambda path, target, grid: load_head(path),
    "explainer": lambda path, target, grid: TVE(target, grid, LIGHT, weights=str(path)),
    "self-explaining model": lambda path, target, grid: exported_target(target, path),
    "embeddings of texts": lambda path, target, grid: stored_encoder(path, path),
    "masked autoencoder": lambda path, target, grid: read_mae(str(path)),
    "target": lambda path, target, grid: load_target(target, path),
    "checkpoint_path": lambda path, target, grid: TargetModel(
        timm.create_model("vit_tiny_patch16_224", num_classes=5, checkpoint_path=str(path), **TINY_VIT)
    ),
}
"""What is read from a file → how."""


@pytest.mark.parametrize("route", ROUTES)
def test_files_of_weights_that_are_not_finite_are_refused_by_every_route(route, tmp_path, target, grid):
    weights, path = timm_model().state_dict(), tmp_path / "diverged.safetensors"
    weights["blocks.1.mlp.fc1.weight"] = torch.full_like(weights["blocks.1.mlp.fc1.weight"], torch.nan)
    save_file(weights, path)
    with pytest.raises(InputError, match="expected finite weights, .* in \\S*blocks.1.mlp.fc1.weight"):
        ROUTES[route](path, target, grid)


def test_weights_that_are_not_finite_are_not_written(tmp_path):
    with pytest.raises(InputError, match="head.safetensors: expected finite weights, got NaN or infinity in bias, "):
        save_weights(WEIGHTS | {"bias": torch.tensor([torch.inf])}, tmp_path / "head.safetensors")
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="^expected finite embeddings of texts, got NaN or infinity: the weights of"):
        text_embeddings(lambda texts: torch.full((len(texts), 2), torch.nan), ["a cat"])


def test_the_first_difference_is_named():
    check_identity(IDENTITY | {"further": 1}, IDENTITY, "x.safetensors")
    for change, named in (
        ({"hops": [2]}, "hops: [2] → [1, 2]"),
        ({"target": {"backbone": "vit", "normalisation": {"mean": [0.4]}}}, "target.normalisation.mean: [0.4]"),
        ({"hops": None}, "hops: None → "),
    ):
        with pytest.raises(InputError) as refused:
            check_identity(IDENTITY | change, IDENTITY, "x.safetensors")
        assert named in str(refused.value)

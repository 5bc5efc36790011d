"""No connection is opened for what lies on this machine."""

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
from conftest import wake
from hub import cache_weights
from PIL import Image
from safetensors.torch import save_file
from toys import VECTORS

import explainers
from explainers.anyhead import AnyHead
from explainers.app.command import main
from explainers.models import TargetModel

NAME = "test_vit2"


@pytest.fixture(scope="module")
def model():
    return wake(timm.create_model(NAME))


@pytest.fixture
def folder(model, tmp_path, monkeypatch):
    """A folder with an image and a file of weights, and a cache with the same weights."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    cache_weights(model.state_dict(), tmp_path / "hub", NAME)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "cat.jpg")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        f"explain cat.jpg --model {NAME} --weights weights.safetensors",
        f"explain cat.jpg --model {NAME}",
        f"list --model {NAME}",
    ],
)
def test_commands(words, folder, no_sockets, capsys):
    assert main(words.split()) == 0
    assert no_sockets == [] and "downloading" not in capsys.readouterr().err


def test_trained_explainers(model, folder, no_sockets):
    """The file of an explainer names the model of timm, whose weights are in the cache."""
    target = TargetModel(model)
    AnyHead(target, target.grid, VECTORS).export(folder / "run")
    explainer = explainers.load(folder / "run")
    image = torch.zeros(1, 3, *target.grid.size, dtype=torch.uint8)
    assert explainer(image).shape == (1, *target.grid.shape)
    assert main(["explain", "cat.jpg", "--explainer", "run"]) == 0
    explainers.available()
    assert no_sockets == []

"""Files of earlier versions are read, although classes and modules have other names since."""

import json

import pytest
import torch
from commands import QUIET, composed
from conftest import wake
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from toys import VECTORS, fit

import explainers
from explainers.anyhead import AnyHead, CoalitionTeacher, PropagationTeacher
from explainers.errors import InputError
from explainers.models.fetching import save_target
from explainers.running.record import check_same_run
from explainers.saved.renamed import RENAMED, renamed

IMAGES = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
ANYHEAD = ("explainers@explainer=anyhead", "explainer.network.width=8", "target=tiny", *QUIET)


def as_earlier(text):
    """A config or an identity with the names that earlier versions wrote."""
    for old, new in sorted(RENAMED.items(), key=lambda names: -len(names[1])):  # some names begin with others
        text = text.replace(new, old)
    return text.replace('"class": "AnyHead"', '"class": "Decomposition"').replace("AnyHeadNetwork", "VectorNetwork")


@pytest.fixture
def folder(tmp_path):
    """The folder of an explainer, as an earlier version left it, and the explainer."""
    save_target(wake(instantiate(composed("target=tiny", folder=tmp_path).target)), tmp_path / "target.safetensors")
    given = f"target.model.checkpoint_path={tmp_path / 'target.safetensors'}"
    config = composed(*ANYHEAD, given, folder=tmp_path)
    explainer = instantiate(config.explainer)
    wake(explainer.network)
    path = explainer.export(tmp_path)
    with safe_open(path, "pt") as file:
        identity = as_earlier(file.metadata()["identity"])
    assert '"class": "Decomposition"' in identity and '"class": "VectorNetwork"' in identity
    save_file(load_file(path), path, {"identity": identity})
    text = as_earlier(OmegaConf.to_yaml(config, resolve=True))
    assert "explainers.decomposition.Decomposition" in text and "explainers.networks.VectorNetwork" in text
    (tmp_path / "config.yaml").write_text(text)
    return tmp_path, explainer.eval()


@torch.no_grad()
def test_a_folder_of_an_earlier_version_is_loaded_and_gives_the_same_heatmaps(folder):
    path, explainer = folder
    assert torch.equal(explainers.load(path)(IMAGES), explainer(IMAGES))


def test_a_run_of_an_earlier_version_may_be_resumed(folder):
    path, _ = folder
    config = renamed(OmegaConf.to_container(OmegaConf.load(path / "config.yaml")))
    check_same_run(path, config, images=None, files={})
    with pytest.raises(InputError, match="holds a run of another config: seed: 0 → 1"):
        check_same_run(path, config | {"seed": 1}, images=None, files={})


def test_a_checkpoint_of_an_earlier_version_is_resumed(target, grid, images, tmp_path):
    build = lambda: AnyHead(target, grid, VECTORS, CoalitionTeacher, torch.optim.Adam)  # noqa: E731
    fit(build(), images, epochs=1).save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    checkpoint["identity"] = json.loads(as_earlier(json.dumps(checkpoint["identity"])))
    assert checkpoint["identity"]["class"] == "Decomposition"
    torch.save(checkpoint, tmp_path / "last.ckpt")
    assert fit(build(), images, epochs=2, resume=tmp_path / "last.ckpt").current_epoch == 2


def test_rows_that_an_earlier_version_stored_are_found(target, grid):
    """Stores are named by the hash of this key."""
    assert CoalitionTeacher(target, grid).key()["class"] == "Coalitions"
    assert PropagationTeacher(target, grid).key()["class"] == "Propagation"


@pytest.mark.parametrize("name", RENAMED.values())
def test_every_present_name_is_the_name_of_something(name):
    assert get_object(name) is not None

"""Any target with any data set: the files compose, what they describe can be built, and a tuned target comes back."""

import re
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from commands import QUIET, ROOT, composed, draw_images, train
from conftest import timm_model
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image
from torch import nn

from explainers.models import TargetModel, as_target
from explainers.saved.identity import weights_hash
from explainers.training.classifier import Classifier
from explainers.transformer.direct_paths import check_direct
from explainers.transformer.stage_paths import check_stage_paths

SHARED = ("transform", "crop_fraction")
RUN = (*QUIET, "logger=csv", "trainer.max_epochs=1", "trainer.precision=32-true")


def test_a_target_and_a_data_set_have_the_images_in_common_and_nothing_else():
    """So that all pairs compose, because each composes with one of the others (`test_configs.py`)."""
    for path in (ROOT / "configs/target").glob("*.yaml"):
        assert {*OmegaConf.load(path)} <= {"defaults", "target", "blocks", "direct", "grid", *SHARED}
    for path in [ROOT / "configs/names/data.yaml", *(ROOT / "configs/data").glob("*.yaml")]:
        text = path.read_text()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        read = set(re.findall(r"\$\{([a-z_.]+)", "\n".join(lines)))
        known = {"grid.image_size", "data_dir", "seed", "oc.select", *SHARED}
        assert {key for key in read if not key.startswith(".")} <= known


class Net(nn.Sequential):
    """A model as people hold it: a ViT, and layers behind it."""

    def __init__(self, **settings):
        vit = timm_model(num_classes=0, **settings)
        super().__init__(vit, nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 3))


def test_a_function_by_its_python_path_builds_a_target(tmp_path):
    cfg = composed(f"target={__name__}.Net", "+target.model.mean=0.3", "+target.model.model.depth=3", folder=tmp_path)
    target = instantiate(cfg.target)
    assert target.num_classes == 3 and len(target.backbone.blocks) == 3 and target.mean.unique() == 0.3
    assert instantiate(cfg.grid) == target.grid and cfg.direct == [1, 2] and cfg.blocks == [0, 1, 2]
    assert target.backbone_identity() == as_target(Net(depth=3), mean=0.3).backbone_identity()
    headed = TargetModel(target, nn.Linear(24, 2))
    assert headed.num_classes == 2 and headed.backbone_identity() == target.backbone_identity()


@pytest.mark.situation(22)
def test_data_sets_show_what_the_target_was_trained_to_see(tmp_path, name="beit_base_patch16_384"):
    (tmp_path / "images/val/a").mkdir(parents=True)
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8))
    photo.save(tmp_path / "images/val/a/1.png")
    settings = [f"target={name}", "data=folder", f"data.root={tmp_path}/images"]
    cfg = composed(*settings, "target.model.pretrained=false", folder=tmp_path)
    with torch.device("meta"):
        model = timm.create_model(name)
    own = TargetModel(model).transform
    assert instantiate(cfg.transform) == own
    assert torch.equal(instantiate(cfg.data).dataset("val")[0]["image"], own(photo))
    wide = composed(*settings[:2], "transform.size=[96,160]", "crop_fraction=0.5", folder=tmp_path)
    assert wide.data.crop_fraction == 0.5 and instantiate(wide.data.transform) == replace(own, size=(96, 160))


def test_experiments_keep_the_crops_of_their_numbers(tmp_path):
    """Those without photos, and `explain`, which shows what the target sees, need none."""
    without = {"demo", "explain.yaml", "vectors_digits.yaml"}
    for path in (ROOT / "configs/experiment").rglob("*.yaml"):
        stated = OmegaConf.load(path).get("crop_fraction")
        assert stated == (None if without & {path.name, path.parent.name} else 0.875), path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_tiny", "resnet18"])  # a transformer and stages
def test_a_target_can_be_explained_by_the_light_network(name, tmp_path):
    """In shapes alone: the images fit the backbone, the blocks are there, and their maps fit the network.

    So do the blocks of direct paths, which AnyHead reads.
    """
    cfg = composed(f"target={name}", "explainers@explainer=tve", "target.model.pretrained=false", folder=tmp_path)
    with torch.device("meta"):
        target, grid = instantiate(cfg.target).eval(), instantiate(cfg.grid)
        network = instantiate(cfg.explainer.network)(target, grid)
        if name == "resnet18":
            check_stage_paths(target, cfg.direct, grid.size)
        elif cfg.direct:
            check_direct(target, cfg.direct)
        images = torch.zeros(2, 3, *grid.size, dtype=torch.uint8)
        embeddings, maps = target.embed_with_maps(target.normalise(images), cfg.blocks)
        assert target.head(embeddings).shape == (2, 1000)
        assert network(images, embeddings, maps).shape == (2, grid.num_patches, 2, target.embed_dim)


@pytest.mark.slow
def test_a_fully_tuned_target_comes_back_by_the_options_of_a_later_command(tmp_path, monkeypatch):
    """With as many classes as the data set, which nobody has told."""
    for split in ("train", "val"):
        draw_images(tmp_path / split, count=3, classes=("a", "b", "c"))
    trained, export = [], Classifier.export
    monkeypatch.setattr(Classifier, "export", lambda self, folder: (trained.append(self), export(self, folder)))
    options = ("target=tiny", "target.model.pretrained=false")
    data = ("data=folder", f"data.root={tmp_path}", "data.num_workers=0", "data.batch_size=2")
    train("experiment=full_finetuning", *options, *data, *RUN, folder=tmp_path / "run")
    path = tmp_path / "run" / "target.safetensors"
    options += ("++target.model.num_classes=3", f"target.model.checkpoint_path={path}")
    cfg = composed("explainers@explainer=tve", *options, folder=tmp_path)
    again, tuned = instantiate(cfg.target).eval(), trained[0].target.eval()
    images = torch.randint(0, 256, (4, 3, cfg.grid.image_size, cfg.grid.image_size), dtype=torch.uint8)
    assert tuned.num_classes == 3 and again(images).shape == (4, 3) and again(images).std() > 0
    torch.testing.assert_close(again(images), tuned(images))
    assert weights_hash(again.backbone) == weights_hash(tuned.backbone)
    same_head = instantiate(cfg.target, head=str(tmp_path / "run" / "head.safetensors")).eval()
    torch.testing.assert_close(same_head(images), tuned(images))

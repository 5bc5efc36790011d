"""experiment=anyhead_tower: small towers of CLIP, SigLIP and DINOv2 with random weights take a step."""

import json
import math

import pytest
from clips import IMAGE
from commands import QUIET, draw_images, train
from omegaconf import OmegaConf

SMALL = {key: value for key, value in IMAGE.items() if key != "num_classes"}
TEXTS = ("module.loss.vocabulary=[cat,dog,car]",)
TOWERS = {
    "siglip_vit_b16": (SMALL, "clips.random_text_head", "texts"),
    "dinov2_vit_s14": (SMALL | {"patch_size": 14, "img_size": 42}, None, "images"),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return draw_images(tmp_path_factory.mktemp("images"), count=20)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOWERS)
def test_every_tower_takes_a_step_without_classes(name, tmp_path, images, capsys):
    size, text_head, functionals = TOWERS[name]
    given = [f"++target.model.{key}={value}" for key, value in size.items()]
    if text_head is not None:
        given += [f"module.loss.text_head={{_target_:{text_head},_partial_:true}}", *TEXTS]
    folder = tmp_path / "run"
    loss = train(
        *("experiment=anyhead_tower", f"target={name}", "target.model.pretrained=false", f"data.root={images}"),
        *("data.batch_size=4", "data.num_workers=0", "trainer.max_epochs=1", "trainer.limit_train_batches=1"),
        *("explainer.network.width=12", "module.loss.pairs=3", "logger=csv", *QUIET, *given),
        folder=folder,
    )
    assert math.isfinite(loss) and "train/loss" in json.loads((folder / "metrics.json").read_text())
    assert capsys.readouterr().out.splitlines()[-1] == f'next: explainers.load("{folder}") in Python'
    teacher = OmegaConf.load(folder / "config.yaml").module.loss
    assert teacher.functionals == functionals

"""`target=NAME` for any model of timm, and the settings that follow from the model."""

import json

import pytest
from commands import composed
from omegaconf import OmegaConf

from explainers.running.defaults import read_model_settings

FOLLOW = ("image_size", "patch_size", "blocks", "direct")
TWELVE = (list(range(12)), list(range(4, 12)))
FILES = {
    "tinyclip": (224, 16, list(range(10)), list(range(3, 10))),
    "digits": (64, 8, [2, 3, 4], [2, 3, 4]),
    "resnet50": (224, 16, [2, 3, 4], [2, 3, 4]),  # and not the model of timm of this name
    "vit_large": (224, 16, [3, 7, 11, 15, 19, 23], list(range(8, 24))),
}
MODELS = {
    "deit_tiny_distilled_patch16_224": (224, 16, TWELVE[0], []),  # its embedding is of two tokens
    "vit_small_patch14_dinov2.lvd142m": (518, 14, *TWELVE),
    "swinv2_tiny_window8_256": (256, 16, [1, 2, 3], [1, 2, 3]),
    "vit_relpos_small_patch16_rpn_224": (224, 16, TWELVE[0], []),  # blocks that normalise their outputs
    "vit_base_patch16_siglip_224": (224, 16, TWELVE[0], []),  # attention pools its tokens
}


def settings(cfg):
    resolved = OmegaConf.to_container(cfg, resolve=True)
    return (resolved["grid"]["image_size"], resolved["grid"]["patch_size"], resolved["blocks"], resolved["direct"])


@pytest.mark.slow
def test_the_settings_of_a_target_follow_from_its_model_with_a_file_or_without(tmp_path):
    for name, expected in FILES.items():
        assert settings(composed(f"target={name}", folder=tmp_path)) == expected, name
    for name, expected in MODELS.items():
        model = json.dumps({"_target_": "timm.create_model", "model_name": name, "pretrained": True})
        assert tuple(read_model_settings(model)[key] for key in FOLLOW) == expected, name


@pytest.mark.parametrize(("name", "fit"), [("test_vit", "ranking"), ("test_resnet", "regions")])
def test_anyhead_reads_few_blocks_and_ranks_patches_where_there_are_paths(name, fit, tmp_path):
    cfg = composed("experiment=anyhead", "data.root=images", f"target={name}", folder=tmp_path)
    assert cfg.explainer.network.blocks == {"test_vit": [1, 2, 3, 5], "test_resnet": [2, 3, 4]}[name]
    assert cfg.module.loss.fit == fit


@pytest.mark.parametrize("config", ["train", "eval"])
def test_a_name_of_timm_is_a_file_that_names_the_model(config, tmp_path):
    name = "vit_tiny_patch16_224.augreg_in21k"
    got = composed(f"target={name}", folder=tmp_path, config=config)
    expected = composed("target=timm", f"target.model.model_name={name}", folder=tmp_path, config=config)
    assert OmegaConf.to_container(got, resolve=True) == OmegaConf.to_container(expected, resolve=True)

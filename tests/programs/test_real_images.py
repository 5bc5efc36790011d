"""What only real weights and images can show. They are in the folder that DATA_DIR names; else these tests skip."""

import os
from pathlib import Path

import pytest
import torch
from commands import composed
from hydra.utils import instantiate

import explainers
from explainers.running.settings import use_weights

DATA = Path(os.environ.get("DATA_DIR", "data"))
WEIGHTS = DATA / "weights/vit_tiny_patch16_224.augreg_in1k.safetensors"
pytestmark = [
    pytest.mark.shared_data,
    pytest.mark.skipif(not WEIGHTS.is_file(), reason=f"no weights at {WEIGHTS}: set DATA_DIR"),
]


@torch.no_grad()
def test_a_pretrained_model_classifies_imagenet_so_that_pixels_labels_and_normalisation_are_right(tmp_path):
    weights = ("target=vit_tiny", f"weights={WEIGHTS}")
    images = ("tasks=imagenet_val", "tasks.imagenet_val.data.num_workers=0", "tasks.imagenet_val.data.test.limit=100")
    cfg = composed(*weights, *images, f"data_dir={DATA}", folder=tmp_path, config="eval")
    use_weights(cfg)
    target, data = instantiate(cfg.target).eval(), instantiate(cfg.tasks.imagenet_val.data)
    right = [(target(batch["image"]).argmax(1) == batch["label"]).float() for batch in data.test_dataloader()]
    assert torch.cat(right).mean() > 0.65  # 0.755 of 1000 images; a wrong normalisation costs a third


def test_one_call_names_the_cat_and_the_cup_in_a_photo_and_shows_each_of_them():
    photo = Path(__file__).parents[2] / "docs/photos/cat_and_coffee.jpg"
    explanation = explainers.explain(photo, explainers.as_target("vit_tiny_patch16_224", WEIGHTS))
    assert explanation.method == "AnyHead"  # the shipped one
    assert {each.name for each in explanation.classes} >= {"Egyptian cat", "espresso", "cup", "tabby"}
    cat, cup = (explanation.of(name).heatmap for name in ("tabby", "cup"))
    left, right = slice(0, 7), slice(7, 14)  # the cat is on the left, and the cup on the right
    assert cat[:, left].mean() > cat[:, right].mean() and cup[:, right].mean() > cup[:, left].mean()

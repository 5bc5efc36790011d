import pytest
import torch
from torch import nn

from explainers.models.fetching import load_target, save_target
from explainers.saved.identity import weights_hash
from explainers.training.state_dicts import with_part, without_part

FAMILIES = ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "test_resnet", "test_convnext"]


def test_a_part_leaves_a_state_and_comes_back():
    module = nn.ModuleDict({"target": nn.Linear(2, 2), "targets": nn.Linear(1, 1)})
    left = without_part(module.state_dict(), "target")
    assert left.keys() == {"targets.weight", "targets.bias"}
    whole = with_part(left, "target", module["target"])
    assert whole.keys() == module.state_dict().keys()
    assert torch.equal(whole["target.weight"], module["target"].weight)


def test_equal_weights_have_equal_hashes_and_others_do_not():
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    assert weights_hash(first) != weights_hash(second)
    second.load_state_dict(first.state_dict())
    assert weights_hash(first) == weights_hash(second)


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("new_head", [True, False])
def test_a_saved_target_comes_back(make_target, images, tmp_path, name, new_head):
    target = make_target(name)
    if new_head:
        target.head = nn.Linear(target.embed_dim, 3)
    save_target(target, path := tmp_path / "target.safetensors")
    blank = make_target(name, seed=1)
    if new_head:
        blank.head = nn.Linear(target.embed_dim, 3)
    again = load_target(blank, path)
    assert again.num_classes == (3 if new_head else 5)
    torch.testing.assert_close(again(images), target(images))
    assert weights_hash(again.backbone) == weights_hash(target.backbone) != weights_hash(blank.backbone)

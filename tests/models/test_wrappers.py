"""Wrappers are taken off: what is explained is the model inside, and the caller's model stays as it is."""

import copy
import importlib.util

import pytest
import timm
import torch
from held import Net, call
from torch import nn
from torch.nn import functional as F

from explainers import posthoc
from explainers.models import TargetModel, as_target
from explainers.saved.identity import architecture_hash, weights_hash

WRAPPERS = {
    "DataParallel": nn.DataParallel,
    "ModelEmaV2": timm.utils.ModelEmaV2,
    "ModelEmaV3": timm.utils.ModelEmaV3,
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
    "OptimizedModule": lambda model: torch.compile(model, backend="eager"),
}


@pytest.mark.situation(4)
@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_model_inside_of_a_wrapper_is_explained(kind, make_model, images, capsys):
    model = make_model()
    expected = TargetModel(model)
    for wrapped in (WRAPPERS[kind](model), nn.DataParallel(WRAPPERS[kind](model))):
        target = as_target(wrapped)
        assert target.identity() == expected.identity()
        assert as_target(nn.DataParallel(target)) is target
        assert f"{kind}: taken off, and VisionTransformer inside is explained\n" in capsys.readouterr().err
    classes = torch.tensor([3, 0])
    heatmaps = [posthoc.build("GAE", each, each.grid)(images[:2], classes) for each in (target, expected)]
    torch.testing.assert_close(*heatmaps)


class Sharper(nn.DataParallel):
    """A wrapper that does more than its module."""

    def forward(self, images):
        return torch.tanh(super().forward(images))


@torch.no_grad()
def test_what_a_wrapper_does_besides_is_kept(make_model, images):
    model = make_model()
    target = as_target(Sharper(model))
    normalised = target.normalise(images)
    torch.testing.assert_close(target(images), model(normalised).tanh())
    assert weights_hash(target.backbone) == weights_hash(TargetModel(model).backbone)


@pytest.mark.situation(9)
def test_compiled_blocks_have_the_identity_of_the_model(make_model):
    model = make_model()
    expected = TargetModel(model)
    compiled = copy.deepcopy(model)
    for index, block in enumerate(compiled.blocks):
        compiled.blocks[index] = torch.compile(block, backend="eager")
    assert as_target(compiled).identity() == expected.identity()
    assert hasattr(compiled.blocks[0], "_orig_mod")  # the caller's model stays as it is
    own = TargetModel(compiled).backbone
    assert weights_hash(own) == weights_hash(expected.backbone)
    assert architecture_hash(own) == architecture_hash(expected.backbone)


class Adapter(nn.Module):
    """A layer of low rank beside a linear one, with the names of peft."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def get_base_layer(self):
        return self.base_layer

    def merge(self):
        self.base_layer.weight.data += self.up.weight @ self.down.weight

    def forward(self, tokens):
        return F.linear(tokens, self.base_layer.weight, self.base_layer.bias) + self.up(self.down(tokens))


class Peft(nn.Module):
    """A model with adapters, which merges itself."""

    def __init__(self, model):
        super().__init__()
        self.model = adapt(model)

    def merge_and_unload(self):
        for block in self.model.blocks:
            block.attn.qkv.merge()
            block.attn.qkv = block.attn.qkv.base_layer
        return self.model

    def forward(self, images):
        return self.model(images)


def adapt(model):
    for block in model.blocks:
        block.attn.qkv = Adapter(block.attn.qkv)
    return model


@torch.no_grad()
@pytest.mark.situation(1)
@pytest.mark.parametrize("build", [adapt, Peft, lambda model: Net(Peft(model), call, nn.Identity())])
def test_adapters_are_merged_into_a_copy(build, make_model, images):
    tuned = build(copy.deepcopy(make_model()))
    before = weights_hash(tuned)
    target = as_target(tuned)
    assert weights_hash(tuned) == before and type(target.backbone.blocks[0].attn.qkv) is nn.Linear
    expected = tuned(target.normalise(images))
    torch.testing.assert_close(target(images), expected, rtol=1e-4, atol=1e-5)
    assert (expected - TargetModel(make_model())(images)).abs().max() > 1e-3
    assert "DecompX" in posthoc.methods_for(target)


@torch.no_grad()
@pytest.mark.situation(2)
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_lora_of_peft_is_explained_as_the_merged_model(library, make_model, images):
    from library_models import converted
    from peft import LoraConfig, get_peft_model

    if library == "timm":
        settings = LoraConfig(target_modules=["qkv"], modules_to_save=["head"], r=2, init_lora_weights=False)
        tuned = get_peft_model(copy.deepcopy(make_model()), settings).eval()
    else:
        settings = LoraConfig(target_modules=["query", "q_proj"], r=2, init_lora_weights=False)
        tuned = get_peft_model(copy.deepcopy(converted("transformers ViT")[0].model), settings).eval()
    target = as_target(tuned)
    output = tuned(target.normalise(images))
    torch.testing.assert_close(target(images), getattr(output, "logits", output), rtol=1e-3, atol=1e-4)
    assert "DecompX" in posthoc.methods_for(target)

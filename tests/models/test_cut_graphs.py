"""Layers without a gradient are named: a heatmap of what passes by them would be wrong, or zero."""

import copy
import warnings

import pytest
import torch
from conftest import timm_model
from torch import nn

import explainers
from explainers import posthoc
from explainers.app import choosing
from explainers.errors import UnsupportedModel
from explainers.models import TargetModel, as_target
from explainers.saved.identity import weights_hash

IMAGES = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
CLASSES = torch.tensor([1, 2])


def quantised(part):
    """A ViT with linear layers of int8: everywhere, or in one part."""
    model = timm_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantise = torch.ao.quantization.quantize_dynamic
        if part:
            whole = nn.Sequential(copy.deepcopy(model.get_submodule(part)))  # only what is inside is replaced
            model.set_submodule(part, quantise(whole, {nn.Linear})[0])
            return model
        return quantise(copy.deepcopy(model), {nn.Linear})


@pytest.fixture(scope="module")
def blocks():
    return TargetModel(quantised("blocks"))


@pytest.mark.situation(8)
@pytest.mark.parametrize("method", ["DecompX-PLUS", "AttnLRP", "GAE", "Saliency", "GradCAM", "IntegratedGradients"])
def test_a_quantised_layer_is_named(blocks, method):
    with pytest.raises(UnsupportedModel, match=f"blocks.{int(method == 'GradCAM')}.attn.qkv"):
        posthoc.build(method, blocks, blocks.grid)(IMAGES, CLASSES)


def test_what_needs_no_gradient_explains_quantised_models(blocks):
    exact = timm_model(as_target=True)
    for method in ("AttentionRollout", "Occlusion"):
        pair = [posthoc.build(method, each, each.grid)(IMAGES, CLASSES).flatten() for each in (blocks, exact)]
        assert torch.corrcoef(torch.stack(pair))[0, 1] > 0.9


@pytest.mark.situation(8)
def test_auto_takes_masks_for_quantised_models_and_says_why(capsys):
    choosing.print_once.cache_clear()
    target = as_target(quantised(None))
    assert choosing.choose(target)[1] == "Occlusion(cells=7)"
    assert capsys.readouterr().err.endswith("; GradCAM needs a model whose layers all have gradients\n")


class Halves(nn.Module):
    """Two branches: gradients pass by the first, whose output the second needs not."""

    def __init__(self, cut):
        super().__init__()
        self.cut, self.body, self.head = cut, nn.Conv2d(3, 4, 8, 8), nn.Linear(64, 5)

    def forward(self, images):
        maps = self.body(images)
        return self.head((maps + self.cut(maps)).flatten(1))


class WithoutGraph(nn.Tanh):
    def forward(self, maps):
        with torch.no_grad():
            return super().forward(maps)


class Places(nn.Module):
    def forward(self, maps):
        return torch.linspace(0, 1, maps.shape[-1]).expand(maps.shape)


def test_a_branch_without_a_graph_is_named_and_one_that_reads_no_values_is_none():
    settings = {"mean": 0.5, "std": 0.5, "image_size": 32}
    for method in ("Saliency", "IntegratedGradients"):
        with pytest.raises(UnsupportedModel, match=r"without one at model.cut \(WithoutGraph\): take a method by"):
            explainers.explain(IMAGES[0], as_target(Halves(WithoutGraph()), **settings), method=method)
        assert explainers.explain(IMAGES[0], as_target(Halves(Places()), **settings), method=method).heatmap.std() > 0


def test_quantised_weights_have_a_hash():
    first, same, other = quantised(None), quantised(None), quantised("head")
    assert weights_hash(first) == weights_hash(same) != weights_hash(other)

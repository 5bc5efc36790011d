"""Any module that classifies images as a target: same logits, untouched original, every method that is listed runs."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from explainers import posthoc
from explainers.masking import PatchGrid
from explainers.models import as_target

STATED = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.25), "image_size": 32}
CLASSES = torch.tensor([3, 0])
FAST = {
    "GradientSHAP": {"samples": 2},
    "IntegratedGradients": {"steps": 2},
    "LIME": {"samples": 100},
    "RISE": {"masks": 50, "cells": 4},
    "SmoothGrad": {"samples": 2},
}


class Net(nn.Module):
    """As a beginner writes it: functional pooling, `view`, a ReLU for all places."""

    def __init__(self, answer=lambda logits: logits, classes=5):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.normalised = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 12, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout()
        self.hidden = nn.Linear(12 * 8 * 8, 16)
        self.last = nn.Linear(16, classes)
        self.answer = answer

    def forward(self, x):
        x = F.max_pool2d(self.relu(self.normalised(self.first(x))), 2)
        x = F.max_pool2d(self.relu(self.second(x)), 2)
        x = x.view(len(x), -1)
        return self.answer(self.last(self.drop(self.relu(self.hidden(x)))))


def sequential(*last):
    """A net of modules alone, each called once."""
    first = nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU()
    return nn.Sequential(*first, *(last or (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5))))


class Tokens(nn.Module):
    """A transformer of no library."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 8, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.layer(self.embed(x).flatten(2).mT).mean(1))


class BlackBox(nn.Module):
    """Answers without gradients, as a model behind another runtime."""

    def __init__(self):
        super().__init__()
        self.net = sequential()

    @torch.no_grad()
    def forward(self, x):
        return self.net(x)


KINDS = {
    "beginner": Net,
    "sequential": sequential,
    "last map is the logits": lambda: sequential(nn.Conv2d(12, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "tokens": Tokens,
    "black box": BlackBox,
    "output with logits": lambda: Net(lambda logits: SimpleNamespace(logits=logits, loss=None)),
    "dictionary": lambda: Net(lambda logits: {"logits": logits}),
    "tuple": lambda: Net(lambda logits: (logits, None)),
    "scripted": lambda: torch.jit.script(sequential().eval()),
}


def lively(build):
    """A module whose answers differ between images."""
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
    return model


def take_logits(output):
    output = output["logits"] if isinstance(output, dict) else getattr(output, "logits", output)
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("kind", KINDS)
def test_the_target_has_the_logits_of_the_module_which_stays_as_it_is(kind, images):
    model = lively(KINDS[kind]).train(kind != "scripted")
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    state, modes = copy.deepcopy(model.state_dict()), [part.training for part in model.modules()]
    target = as_target(model, **STATED, classes=list("abcde"))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [part.training for part in model.modules()] == modes
    assert all((weight.grad == 1).all() for weight in model.parameters())
    assert all(weight.grad is None and not weight.is_meta for weight in target.parameters())
    assert not any(part.training or part._forward_hooks for part in target.modules())

    mean, std = (torch.tensor(STATED[key])[:, None, None] for key in ("mean", "std"))
    normalised = (images / 255 - mean) / std
    with torch.no_grad():
        expected = take_logits(model.eval()(normalised))
        torch.testing.assert_close(target(images), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(target(images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)), expected)
    assert target.num_classes == 5 and target.classes == list("abcde") and target.grid == PatchGrid(32, 4)


def test_the_last_linear_layer_becomes_the_head_where_that_is_exact():
    found = {kind: as_target(lively(build), **STATED) for kind, build in KINDS.items()}
    assert {kind: target.embed_dim for kind, target in found.items() if isinstance(target.head, nn.Linear)} == {
        **dict.fromkeys(["beginner", "output with logits", "dictionary", "tuple"], 16),
        **{"sequential": 12, "tokens": 8, "black box": 12},
    }
    for kind in ("last map is the logits", "scripted"):
        assert isinstance(found[kind].head, nn.Identity) and found[kind].embed_dim == 5


@pytest.mark.parametrize(
    "last", [(nn.Flatten(), nn.Linear(12 * 64, 1)), (nn.AvgPool2d(8), nn.Conv2d(12, 1, 1), nn.Flatten())]
)
def test_a_single_logit_becomes_two(last, images):
    model = sequential(*last).eval()
    target = as_target(model, mean=0, std=1, image_size=32, score="sigmoid")
    with torch.no_grad():
        expected = model(images / 255).sigmoid()
        torch.testing.assert_close(target(images).softmax(-1), torch.cat([1 - expected, expected], 1))


CAMS = {"GradCAM", "XGradCAM", "XGradCAMPlus", "GradCAMPlusPlus", "HiResCAM", "ElementWiseCAM", "LayerCAM", "ScoreCAM"}
GRADIENTS = {"Saliency", "SmoothGrad", "IntegratedGradients", "GradientSHAP", "DeepLift"}
MASKS = {"RISE", "LIME", "Occlusion", "Chance"}
EXPECTED = {
    "beginner": MASKS | GRADIENTS - {"DeepLift"} | CAMS,
    "sequential": MASKS | GRADIENTS | CAMS,
    "last map is the logits": MASKS | GRADIENTS | CAMS,
    "tokens": MASKS | GRADIENTS,
    "black box": MASKS | {"ScoreCAM"},
    "scripted": MASKS | GRADIENTS - {"DeepLift"},
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_every_listed_method_runs_and_no_other_is_built(kind, images):
    target = as_target(lively(KINDS[kind]), **STATED)
    grid = PatchGrid(32, 8)
    assert set(posthoc.methods_for(target, grid)) == EXPECTED[kind]
    for name in EXPECTED[kind]:
        heatmaps = posthoc.build(name, target, grid, FAST.get(name))(images[:2], CLASSES)
        assert heatmaps.shape == (2, 4, 4) and heatmaps.isfinite().all()
        assert (heatmaps.flatten(1).std(1) > 0).all(), name


def few_at_once(most):
    """A net that takes batches of a few images."""

    def check(logits):
        assert len(logits) <= most, f"Guard failed: {len(logits)} <= {most}"
        return logits

    return lively(lambda: Net(check)).eval()


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_module_that_takes_few_images_at_once_gets_no_more(most, capsys):
    model, images = few_at_once(most), torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    target = as_target(model, **STATED)
    with torch.no_grad():
        expected = torch.cat([model(target.normalise(image[None])) for image in images])
        torch.testing.assert_close(target(images), expected, rtol=1e-4, atol=1e-5)
    found = {1: "1", 2: "1", 5: "4"}[most]  # halves of 3 and 8
    told = [f"Net: takes at most {found} images at once, as more raise AssertionError: Guard failed: "]
    assert [line[: len(told[0])] for line in capsys.readouterr().err.splitlines()] == told
    for method in ("Occlusion", "Saliency", *(["GradCAM"] if most == 5 else [])):
        heatmaps = posthoc.build(method, target, target.grid)(images[:4], torch.tensor([3, 0, 1, 2]))
        alone = posthoc.build(method, target, target.grid)(images[3:4], torch.tensor([2]))
        torch.testing.assert_close(heatmaps[3:], alone, rtol=1e-3, atol=1e-5)
    assert "DeepLift" not in posthoc.methods_for(target)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("beginner", torch.bfloat16), ("beginner", torch.float64), ("scripted", torch.float16)]
)
def test_modules_of_other_types_are_computed_in_float32(kind, dtype, images):
    model = lively(KINDS[kind]).eval()
    own = {name: value.to(dtype) for name, value in model.state_dict().items()}
    found = as_target(copy.deepcopy(model).to(dtype), **STATED)
    model.load_state_dict(own)
    torch.testing.assert_close(found(images), as_target(model, **STATED)(images), rtol=1e-4, atol=1e-4)
    assert next(found.parameters()).dtype == torch.float32

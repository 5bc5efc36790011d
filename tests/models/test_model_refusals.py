"""What cannot be explained as it is held is refused in one line that names the argument, or what the model lacks."""

import threading
from functools import partial

import pytest
import timm
import torch
from conftest import timm_model
from held import Net as Held
from library_models import TORCHVISION, TWO_TOWERS, converted
from test_outputs import Segments, Two, region
from test_plain import STATED, Net, Tokens, lively, sequential
from torch import nn
from torch.nn import functional as F
from torchvision.models.segmentation import FCN_ResNet50_Weights

from explainers import posthoc
from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.models import TargetModel, as_target
from explainers.tve import TVE, LightNetwork


class Cast(nn.Module):
    def forward(self, x):
        return x.half()


class Locked(Net):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Random(Net):
    def forward(self, x):
        return F.dropout(super().forward(x))


class OfBatch(Net):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class NotForConstants(Net):
    def forward(self, x):
        return super().forward(x / x.std((1, 2, 3), keepdim=True))


def vit(read):
    """A module that reads a ViT otherwise."""
    return lambda: Held(timm_model(), read, nn.Identity())


def original(name):
    return lambda: converted(name)[0].model


resnet = partial(timm_model, "test_resnet")
exported = partial(torch.export.export, nn.Conv2d(3, 4, 1), (torch.zeros(1, 3, 8, 8),))
SETTINGS = {
    "a function": (lambda: len, {}, "builtin_function_or_method"),
    "a number": (lambda: 7, {"target": region}, "int"),
    "an exported program": (exported, STATED, "ExportedProgram"),
    "a mean above 1": (lambda: timm.create_model("test_vit"), {"weights": None, "mean": 127}, "mean"),
    "two means": (lambda: nn.Sequential(timm_model(), nn.ReLU()), {"mean": (0.1, 0.2)}, "mean"),
    "no deviation": (TORCHVISION["ViT"], {"std": 0}, "std"),
    "a size that is fixed": (TORCHVISION["ViT"], {"image_size": 40}, "image_size=32"),
    "a size that is no multiple": (timm_model, {"image_size": 30}, "image_size"),
    "a size without patches": (resnet, {"image_size": 331}, "330 × 330"),
    "a size as text": (timm_model, {"image_size": "48"}, "image_size"),
    "a size of another tower": (original("transformers CLIP that classifies"), {"image_size": 48}, "48 × 48"),
    "a size of no patches": (Net, STATED | {"image_size": 227}, "image_size"),
    "a size of another net": (Net, STATED | {"image_size": 28}, "(B, 3, 28, 28)"),
    "weights of a module": (timm_model, {"weights": "a.pth"}, "weights"),
    "weights of torchvision": (original("torchvision ResNet"), {"weights": "weights.pth"}, "weights"),
    "weights of no classifier": (original("torchvision ResNet"), {"weights": FCN_ResNet50_Weights.DEFAULT}, "weights"),
    "a text tower": (TWO_TOWERS["CLIP"], {}, "CLIPModel"),
    "a mean of a target": (partial(timm_model, as_target=True), {"mean": 0.5}, "mean="),
    "too few names": (timm_model, {"classes": ["tabby"]}, "class_names"),
    "nothing stated": (Net, dict.fromkeys(STATED), "no mean and no std and no image_size"),
    "no size stated": (Segments, {"target": region, "mean": 0.5, "std": 0.5}, "image_size"),
    "a second input": (Two, STATED, "'meta'"),
    "a second input without its name": (lambda: partial(Two(), torch.zeros(1, 2)), STATED, "functools.partial"),
    "no function": (Segments, STATED | {"target": 2}, "target="),
    "a function that fails": (Segments, STATED | {"target": lambda output: output["masks"]}, "target="),
    "a function of maps": (Segments, STATED | {"target": lambda output: output["out"]}, "target="),
    "a function of nothing": (Segments, STATED | {"target": lambda output: 1.0}, "target="),
    "no logits": (Segments, STATED, "target="),
}
OUTPUTS = {
    "a list": (lambda: Net(list), "list"),
    "class numbers": (lambda: Net(lambda y: y.argmax(1)), "int64"),
    "a vector": (vit(lambda vit, x: vit(x)[:, 0]), "float32"),
    "not a number": (lambda: Net(lambda y: y * torch.nan), "finite logits"),
    "constant images": (NotForConstants, "mean image"),
    "probabilities": (lambda: Net(lambda y: y.softmax(-1)), "sum to 1"),
    "probabilities of a ViT": (vit(lambda vit, x: vit(x).softmax(1)), "sum to 1"),
    "percent": (lambda: Net(lambda y: 100 * y.softmax(-1)), "sum to 100"),
    "a sigmoid": (lambda: Net(lambda y: y.sigmoid()), "score=s"),
    "a tanh": (lambda: Net(lambda y: y.tanh()), "score=value"),
    "random": (Random, "at every call"),
    "batches": (OfBatch, "in every batch"),
    "batches of a ViT": (vit(lambda vit, x: vit(x) - vit(x).mean(0)), "in every batch"),
    "own casts": (lambda: sequential(nn.Flatten(), Cast(), nn.Linear(768, 5)), "model.float()"),
    "channels": (lambda: nn.Sequential(nn.Conv2d(1, 3, 3), Net()), "1 channels"),
    "videos": (lambda: nn.Sequential(nn.Conv3d(3, 4, 3), nn.Flatten(), nn.Linear(4, 5)), "videos"),
    "an error inside": (lambda: Net(lambda y: {}[len(y)]), "KeyError: 1"),
    "no weights": (lambda: Net().to("meta"), "meta device"),
    "a lock": (Locked, "copy.deepcopy"),
}
SEVERAL = "levit_128s", "crossvit_9_240", "volo_d1_224", "efficientvit_m0"
"""With two heads, a list of heads, a head on patches besides, and a norm before the last layer."""
TARGETS = {
    "no classifier": (nn.Identity, {}, "Identity"),
    "a narrow head": (timm_model, {"head": nn.Linear(25, 3)}, "width 24"),
    "half a head": (lambda: timm_model("deit_tiny_distilled_patch16_224"), {"head": nn.Linear(24, 3)}, "width 48"),
    "a head of probabilities": (timm_model, {"head": nn.Sequential(nn.Linear(24, 4), nn.Softmax(-1))}, "head="),
    "a head of a sigmoid": (timm_model, {"head": nn.Sequential(nn.Linear(24, 4), nn.Sigmoid())}, "head="),
    "a single logit": (partial(timm_model, num_classes=1), {}, "score="),
    **{name: (partial(timm.create_model, name, num_classes=5), {}, "Linear(") for name in SEVERAL},
}


def assert_refused(call, named):
    with pytest.raises(InputError) as refused:
        call()
    assert named in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_do_not_fit_the_model_are_refused(case):
    build, settings, named = SETTINGS[case]
    model = build()
    assert_refused(lambda: as_target(model, **settings), named)


@pytest.mark.parametrize("case", OUTPUTS)
def test_what_is_no_classifier_of_images_is_refused(case):
    build, named = OUTPUTS[case]
    model = build()
    settings = {} if isinstance(model, Held) else STATED
    assert_refused(lambda: as_target(model, **settings), named)


@pytest.mark.parametrize("case", TARGETS)
def test_a_model_without_one_layer_to_its_logits_is_no_target_by_hand(case):
    build, settings, named = TARGETS[case]
    with torch.device("meta") if case in SEVERAL else torch.device("cpu"):  # in shapes alone
        model = build()
    assert_refused(lambda: TargetModel(model, **settings), named)


def test_what_a_plain_module_lacks_is_refused():
    target, tokens = as_target(Net(), **STATED), as_target(lively(Tokens), **STATED)
    light = partial(LightNetwork, blocks=[0], width=12, depth=1)
    assert_refused(lambda: posthoc.RISE(target, PatchGrid(64, 8)), "64 × 64")
    assert_refused(lambda: posthoc.Occlusion(target, target.grid, removal="drop"), "removal=drop")
    assert_refused(lambda: TVE(tokens, tokens.grid, light), "Tokens")

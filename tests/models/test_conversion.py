"""Models of other libraries give the same outputs, gradients and attributions in timm's architecture."""

import pytest
import timm
import torch
from library_models import (
    NAMES,
    SIZE,
    TORCHVISION,
    DinoVisionTransformer,
    Original,
    converted,
    hugging_face,
)
from torch import nn
from torchvision.models import ResNet18_Weights, mobilenet_v3_small
from transformers.models.timm_wrapper.configuration_timm_wrapper import TimmWrapperConfig
from transformers.models.timm_wrapper.modeling_timm_wrapper import TimmWrapperForImageClassification
from transformers.models.vit.modeling_vit import ViTConfig, ViTForImageClassification

from explainers import posthoc
from explainers.masking import PatchGrid
from explainers.models import TargetModel, as_target
from explainers.models.heads import NoHead, TextProjection
from explainers.models.mapping import Inputs
from explainers.models.torchvision_models import find_inputs
from explainers.posthoc.soft_masks import patch_means

# One of each kind: a head, a pooler, a projection; a class token, an average, attention pooling; stages and windows
TRANSFORMERS = ["torchvision ViT", "torchvision ViT with two layers in its head"] + [
    f"transformers {name}"
    for name in ("DeiT distilled", "DINOv2 with registers", "BEiT", "CLIP with its projection", "SigLIP", "DINOv3")
]
KINDS = [*TRANSFORMERS, "torchvision Swin v2", "torchvision ConvNeXt", "transformers ResNet", "transformers Hiera"]


def outputs_of(target, images):
    """Logits, or embeddings of a model without a head."""
    return target.embed(target.normalise(images)) if isinstance(target.head, NoHead) else target(images)


@torch.no_grad()
@pytest.mark.situation(7)
@pytest.mark.parametrize("name", NAMES)
def test_a_converted_model_gives_the_outputs_of_the_original(name, images):
    original, target = converted(name)
    expected = original.outputs(original.normalise(images))
    assert (expected.std(0) > 1e-3).all()  # otherwise equal outputs would say little
    torch.testing.assert_close(outputs_of(target, images), expected, rtol=1e-4, atol=1e-4 * expected.std().item())
    assert not isinstance(target.backbone, type(original.model)) and target.backbone.__module__.startswith("timm.")


@pytest.mark.parametrize("name", ["torchvision ResNet", "transformers ViT"])
def test_converting_leaves_the_original_as_it_was(name):
    original = Original(name)
    model = original.model.train()
    next(model.parameters()).requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    learns = [weight.requires_grad for weight in model.parameters()]
    target = as_target(model, image_size=None if "transformers" in name else 32)
    with torch.no_grad():
        for weight in target.parameters():
            weight.zero_()  # a weight that both share would show
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [weight.requires_grad for weight in model.parameters()] == learns
    assert all(part.training for part in model.modules()) and not target.training


@pytest.mark.parametrize("name", KINDS)
def test_an_attribution_of_the_target_is_the_gradient_of_the_original(name, images):
    original, target = converted(name)
    images = images[:2]
    pixels = original.normalise(images).requires_grad_()
    outputs = original.outputs(pixels)
    if isinstance(target.head, NoHead | TextProjection):
        weights = torch.randn(2, outputs.shape[1])
        functionals = weights if isinstance(target.head, NoHead) else weights @ target.head.weight.detach()
        found = posthoc.Saliency(target, PatchGrid(32, 8, differs=True)).explain(images, functionals)
        explained = (outputs * weights).sum()
    else:
        classes = torch.tensor([3, 0])
        found = posthoc.Saliency(target, PatchGrid(32, 8, differs=True))(images, classes)
        explained = outputs.gather(1, classes[:, None]).sum()
    (gradient,) = torch.autograd.grad(explained, pixels)
    expected = patch_means(gradient.abs().amax(1), PatchGrid(32, 8))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * expected.max().item())


@torch.no_grad()
@pytest.mark.parametrize("kind", [{}, {"chunks": 0}, {"registers": 3}, {"swiglu": True}])
def test_dinov2_of_torch_hub_is_converted_alone_and_inside(kind, images, capsys):
    torch.manual_seed(0)
    dino = DinoVisionTransformer(**kind).eval()
    larger = torch.randint(0, 256, (2, 3, 48, 48), dtype=torch.uint8)
    for size, pixels in ((None, images), (48, larger)):
        target = as_target(dino, image_size=size)
        normalised = target.normalise(pixels)
        torch.testing.assert_close(target.embed(normalised), dino(normalised), rtol=1e-4, atol=1e-4)
    assert "DinoVisionTransformer is computed in timm's architecture" in capsys.readouterr().err
    assert {"DecompX", "GAE"} <= set(posthoc.methods_for(target))
    found = as_target(nn.Sequential(dino, nn.ReLU(), nn.Linear(32, 5)))
    assert found.embed_dim == 32 and found.num_classes == 5
    assert (
        "a DinoVisionTransformer of dinov2 inside (0), with the rest as its head (ReLU, Linear)"
        in capsys.readouterr().err
    )


@torch.no_grad()
@pytest.mark.parametrize("name", ["DeiT distilled", "DINOv2 with registers", "CLIP", "Swin"])
def test_positions_are_interpolated_as_the_original_does(name):
    original, _ = converted(f"transformers {name}")
    target = as_target(original.model, image_size=48)
    images = torch.randint(0, 256, (2, 3, 48, 48), dtype=torch.uint8)
    interpolated = {} if "DINO" in name else {"interpolate_pos_encoding": True}
    expected = original.model(pixel_values=original.normalise(images), **interpolated)[original.output]
    torch.testing.assert_close(outputs_of(target, images), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.situation(13)
@pytest.mark.situation(14)
@pytest.mark.parametrize(
    ("problem", "labels", "score"),
    [
        (None, 3, "softmax"),
        (None, 1, "value"),
        ("multi_label_classification", 3, "sigmoid"),
        ("regression", 1, "value"),
        ("regression", 2, "value"),
    ],
)
def test_the_score_is_that_of_the_config_unless_another_is_given(problem, labels, score, capsys):
    model = ViTForImageClassification(ViTConfig(**SIZE, num_labels=labels, problem_type=problem)).eval()
    target = as_target(model)
    assert target.score == score and target.num_classes == labels
    assert "is computed in timm's architecture" in capsys.readouterr().err
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        torch.testing.assert_close(target(images), model(target.normalise(images)).logits, rtol=1e-4, atol=1e-4)
    assert as_target(model, score="value").score == "value"


def test_classes_have_the_names_of_the_model():
    names = {0: "cat", 1: "dog"}
    model = ViTForImageClassification(ViTConfig(**SIZE, id2label=names, label2id={"cat": 0, "dog": 1}))
    assert as_target(model).classes == ["cat", "dog"]
    assert as_target(model, classes=["tabby", "beagle"]).classes == ["tabby", "beagle"]
    assert converted("transformers ViT")[1].classes == []  # LABEL_0 is no name


def test_weights_of_torchvision_state_normalisation_size_and_classes():
    model = converted("torchvision ResNet")[0].model
    inputs = find_inputs(model, ResNet18_Weights.DEFAULT).override(Inputs(None, [0.5] * 3, None, ""))
    assert inputs.classes[:2] == ["tench", "goldfish"] and inputs.size == (224, 224)
    assert (inputs.mean, inputs.std) == ([0.5] * 3, pytest.approx([0.229, 0.224, 0.225]))
    assert find_inputs(model, ResNet18_Weights.DEFAULT, (64, 64)).transform.size == (64, 64)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: hugging_face("BEiT")[0], "its weights are not those of timm's beit_base_patch16_224 (size mismatch"),
        (lambda: mobilenet_v3_small(num_classes=5), "only VisionTransformer, SwinTransformer, ResNet, ConvNeXt of"),
        (lambda: resnet18_without_padding(), "the outputs of timm's resnet50 with its weights differ by 0."),
    ],
)
def test_a_model_without_an_equal_in_timm_stays_as_it_is_and_says_so(build, reason, capsys):
    model = build().eval()
    side = 48 if "Beit" in type(model).__name__ else 32  # timm's relative positions are not interpolated as BEiT's are
    images = torch.randint(0, 256, (2, 3, side, side), dtype=torch.uint8)
    target = as_target(model, image_size=side, mean=0.5, std=0.5)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{type(model).__name__} stays as it is, because {reason}")
    assert "no methods of transformers" in line
    with torch.no_grad():
        expected = model(images.float() / 127.5 - 1)
    torch.testing.assert_close(target(images), getattr(expected, "logits", expected), rtol=1e-4, atol=1e-5)


def resnet18_without_padding():
    model = TORCHVISION["ResNet"]()
    model.maxpool = nn.MaxPool2d(2)
    return model


def test_a_timm_model_is_taken_as_it_is(make_model):
    model = make_model()
    target = as_target(model, mean=0.5, std=(0.2, 0.3, 0.4), image_size=40, classes=list("abcde"))
    assert target.mean.flatten().tolist() == [0.5] * 3 and target.classes == list("abcde")
    assert target.grid == PatchGrid(40, 8) and model.patch_embed.img_size == (32, 32)
    assert TargetModel(target.backbone, target.head).std.flatten().tolist() == pytest.approx([0.2, 0.3, 0.4])
    assert as_target(target) is target


def test_a_timm_model_inside_of_transformers_is_taken_out():
    config = TimmWrapperConfig(architecture="test_vit", pretrained_cfg={"mean": [0.1] * 3, "std": [0.2] * 3})
    wrapped = TimmWrapperForImageClassification(config)
    target, read = as_target(wrapped), as_target(wrapped, target=lambda output: output.logits[:, 1], image_size=160)
    assert isinstance(target.backbone, timm.models.VisionTransformer)
    for each in (target, read):
        assert each.mean.flatten().tolist() == pytest.approx([0.1] * 3)

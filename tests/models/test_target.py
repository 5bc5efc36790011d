import math
from contextlib import nullcontext
from functools import partial

import pytest
import timm
import torch
from conftest import TINY_VIT
from torch import nn

from explainers import posthoc
from explainers.errors import InputError
from explainers.evaluation import Evaluation, EvaluationModule
from explainers.models import TargetModel, as_target
from explainers.models.heads import load_head, save_head
from explainers.models.names import match_classes
from explainers.shapley import Surrogate
from explainers.training import Classifier
from explainers.vectors import SelfExplaining

SWIN = {"img_size": 32, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4}
FAMILIES = {
    "vit": ("vit_tiny_patch16_224", {}),
    "vit_average": ("vit_tiny_patch16_224", {"global_pool": "avg"}),
    "vit_registers": ("vit_small_patch14_reg4_dinov2", {}),
    "deit": ("deit_tiny_patch16_224", {}),
    "deit_distilled": ("deit_tiny_distilled_patch16_224", {}),
    "siglip": ("vit_base_patch16_siglip_224", {}),
    "swin": ("swin_tiny_patch4_window7_224", SWIN),
    "resnet": ("test_resnet", {}),
    "convnext": ("test_convnext", {}),
}


@pytest.fixture(params=FAMILIES)
def model(request, make_model):
    name, arguments = FAMILIES[request.param]
    return make_model(name, **arguments)


def normalised_by_hand(model, images):
    mean, std = model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
    return torch.stack([(images[:, c] / 255 - mean[c]) / std[c] for c in range(3)], 1)


def test_head_of_backbone_is_the_models_own_answer(model, images):
    expected = model(normalised_by_hand(model, images))
    assert expected.std(0).min() > 0.01  # the images differ
    target = TargetModel(model)
    embeddings = target.embed(target.normalise(images))
    assert embeddings.shape == (5, target.embed_dim)
    torch.testing.assert_close(target.classify(embeddings), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(target(images), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(target.score_images(target.normalise(images)), expected.softmax(-1))


def test_one_forward_pass_gives_the_embedding_and_the_maps(model, images):
    target = TargetModel(model)
    calls = []
    for module in target.backbone.modules():
        if not list(module.children()) and list(module.parameters()):
            module.register_forward_hook(lambda module, *_: calls.append(module))
    normalised = target.normalise(images)
    embeddings, maps = target.embed_with_maps(normalised, [0, 1])
    assert len(calls) == len(set(calls)) > 5
    torch.testing.assert_close(embeddings, target.embed(normalised))
    assert [feature_map.shape[2] for feature_map in maps] == target.map_channels([0, 1])
    assert all(math.isqrt(feature_map.shape[1]) ** 2 == feature_map.shape[1] for feature_map in maps)


@pytest.mark.parametrize(("name", "layer"), [("vit_small_patch14_reg4_dinov2", "blocks.1"), ("test_resnet", "layer2")])
def test_a_feature_map_is_what_its_layer_says_of_each_place_row_by_row(make_target, images, name, layer):
    target, seen = make_target(name), []
    target.backbone.get_submodule(layer).register_forward_hook(lambda *call: seen.append(call[-1]))
    block = [info["module"] for info in target.backbone.feature_info].index(layer)
    _, (feature_map,) = target.embed_with_maps(target.normalise(images), [block])
    if "vit" in name:  # five tokens before the patches
        expected = seen[0][:, 5:]
    else:
        side = seen[0].shape[-1]
        expected = torch.stack([seen[0][:, :, row, column] for row in range(side) for column in range(side)], 1)
    assert feature_map.shape[1] > 1
    torch.testing.assert_close(feature_map, expected)


def test_a_head_from_a_file_takes_the_place_of_the_models_own(make_model, images, tmp_path):
    head = nn.Linear(24, 3)
    identity = TargetModel(make_model()).backbone_identity()
    path = save_head(head, tmp_path / "head.safetensors", identity, ["a", "b", "c"])
    assert load_head(path)[1] == {"target": identity, "classes": ["a", "b", "c"]}
    target = TargetModel(make_model(), head=path)
    assert target.classes == ["a", "b", "c"]
    embeddings = target.embed(target.normalise(images))
    torch.testing.assert_close(target(images), embeddings @ head.weight.T + head.bias)
    torch.testing.assert_close(TargetModel(make_model(), head=head)(images), target(images))


def test_a_head_of_other_weights_of_the_backbone_or_another_normalisation_is_refused(make_model, tmp_path):
    fitted, other = TargetModel(make_model()), make_model()
    path = save_head(nn.Linear(24, 3), tmp_path / "head.safetensors", fitted.backbone_identity(), [])
    other.pretrained_cfg["mean"] = (0.1, 0.2, 0.3)
    for model, named in ((make_model(seed=1), "backbone_sha256"), (other, "normalisation.mean")):
        with pytest.raises(InputError, match=named):
            TargetModel(model, head=path)


@pytest.mark.parametrize(("known", "names"), [([], ["a", "b"]), (["a", "b", "c"], ["b", "c", "d"])])
@pytest.mark.situation(32)
def test_other_classes_than_those_of_the_head_are_refused(make_target, known, names):
    target = make_target(num_classes=3)
    target.classes = known
    with pytest.raises(InputError, match=f"3 classes.*{', '.join(names)}"):
        match_classes(names, target)


@pytest.mark.parametrize(
    ("known", "names", "logits", "said"),
    [
        (["a", "b", "c"], ["a", "b", "c"], [0, 1, 2], ""),
        (["a", "b", "c"], ["c", "a"], [2, 0], ""),  # by name, in any order
        (["a", "b", "c"], [], [0, 1, 2], ""),  # images without labels
        pytest.param([], ["b", "c", "d"], [0, 1, 2], "the order is taken as b, c, d;", marks=pytest.mark.situation(32)),
        pytest.param([], ["0", "2", "1"], [0, 2, 1], "number is taken as its logit", marks=pytest.mark.situation(30)),
    ],
)
def test_a_label_has_the_logit_of_its_name(make_target, known, names, logits, said):
    target = make_target(num_classes=3)
    target.classes = known
    with pytest.warns(UserWarning, match=said) if said else nullcontext():
        assert match_classes(names, target) == logits


@pytest.mark.situation(31)
def test_wnids_have_their_logits_of_imagenet():
    target = TargetModel(timm.create_model("test_resnet"))
    assert match_classes(["n01531178", "n01498041"], target) == [11, 6]


def test_attributions_are_not_lost_to_the_rounding_of_logits_in_half_precision(target):
    """Two embeddings that differ by less than bfloat16 can tell apart in a logit are told apart."""
    embeddings = torch.full((2, target.embed_dim), 3.0)
    embeddings[1] *= 1 + 1e-4
    expected = target.head(embeddings)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(target.classify(embeddings), expected)
        assert target.classify(embeddings).dtype == torch.float32


def observed(module):
    """What a caller sees of a module: its parts and their flags, weights, gradients, memory formats and hooks."""
    parts = [(name, part, part.training, len(part._forward_hooks)) for name, part in module.named_modules()]
    tensors = [*module.parameters(), *module.buffers()]
    flags = [(id(value), value.requires_grad, value.device, value.stride(), value.grad) for value in tensors]
    return parts, flags, [value.clone() for value in tensors]


def assert_untouched(module, before):
    *seen, values = observed(module)
    assert seen == list(before[:2])
    assert all(torch.equal(value, was) for value, was in zip(values, before[2], strict=True))


def test_the_callers_model_stays_whole_and_can_be_taken_twice(model, images):
    next(model.parameters()).requires_grad_(False)
    list(model.children())[-1].train()
    hook = model.register_forward_hook(lambda *_: None)
    head = nn.Linear(TargetModel(model).embed_dim, 7)
    before, head_before = observed(model), observed(head)
    TargetModel(model, head=head).eval().requires_grad_(False).to("meta")
    assert_untouched(head, head_before)
    target = TargetModel(model).eval().requires_grad_(False)
    classes, logits = target.num_classes, target(images)
    with torch.no_grad():
        for weight in target.parameters():
            weight.zero_()
    target.to("meta")
    assert_untouched(model, before)
    again = TargetModel(model).eval()
    assert again.num_classes == classes == 5
    torch.testing.assert_close(again(images), logits)
    hook.remove()


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "test_resnet"])
def test_a_model_without_a_head_embeds_and_asks_for_one_to_classify(make_model, images, name):
    target = TargetModel(make_model(name, num_classes=0))
    embeddings = target.embed(target.normalise(images))
    assert embeddings.shape == (5, target.embed_dim)
    message = r"^expected a model with a classification layer, got one without: fit one with .* as head=;"
    for use in (
        lambda: target(images),
        lambda: target.num_classes,
        lambda: EvaluationModule(target, {}, Evaluation(target.grid)),
    ):
        with pytest.raises(InputError, match=message):
            use()
    fitted = Classifier(target, 3, partial(torch.optim.SGD, lr=0.1))
    torch.testing.assert_close(fitted(images), fitted.target.head(embeddings))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "test_resnet"])
def test_a_single_logit_is_the_sigmoid_of_the_second_of_two_classes(make_model, images, name):
    model = make_model(name, num_classes=1)
    target, labels = TargetModel(model, score="sigmoid"), torch.tensor([0, 1, 1, 0, 1])
    with torch.no_grad():
        z = model(normalised_by_hand(model, images))[:, 0]
    sigmoid = 1 / (1 + torch.exp(-z))
    probabilities = target.score_images(target.normalise(images))
    assert target.num_classes == 2
    torch.testing.assert_close(probabilities, torch.stack([1 - sigmoid, sigmoid], 1))
    binary = -(labels * sigmoid.log() + (1 - labels) * (1 - sigmoid).log()).mean()
    torch.testing.assert_close(nn.functional.cross_entropy(target(images), labels), binary)


TRAINING = {
    "Classifier": lambda target, grid: Classifier(target, 3, partial(torch.optim.SGD, lr=0.1), tune="all"),
    "Surrogate": lambda target, grid: Surrogate(target, grid, partial(torch.optim.SGD, lr=0.1)),
    "SelfExplaining": lambda target, grid: SelfExplaining(target, grid),
}


@pytest.mark.parametrize("build", TRAINING.values(), ids=TRAINING)
def test_modules_that_train_a_model_train_a_copy(build, target, grid):
    before = observed(target)
    module = build(target, grid)
    with torch.no_grad():
        for weight in module.parameters():
            weight.zero_()
    assert_untouched(target, before)


@pytest.mark.situation(12)
@pytest.mark.parametrize(
    ("name", "arguments", "size", "shape"),
    [
        ("vit_tiny_patch16_224", {"img_size": (24, 40)}, (24, 40), (3, 5)),
        ("swin_tiny_patch4_window7_224", SWIN | {"img_size": (32, 64)}, (32, 64), (2, 4)),
        ("test_resnet", {}, (100, 70), (10, 7)),  # as its config says, in patches of 10 pixels
    ],
)
def test_the_grid_of_a_model_that_is_not_square(make_model, name, arguments, size, shape):
    model = make_model(name, **arguments)
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 100, 70)}
    target = TargetModel(model)
    assert (target.grid.size, target.grid.shape, target.transform.size) == (size, shape, size)
    assert target(torch.zeros(1, 3, *size, dtype=torch.uint8)).shape == (1, 5)


@pytest.mark.situation(12)
def test_what_has_no_grid_of_square_patches_is_refused_with_a_way_out(make_model):
    model = make_model()
    model.patch_embed.img_size = 32, 44
    for wrong, named in ((make_model(img_size=(24, 40), patch_size=(8, 4)), "8 × 4"), (model, "image_size=(32, 40)")):
        with pytest.raises(InputError) as refused:
            repr(TargetModel(wrong).grid)
        assert named in str(refused.value)


@pytest.mark.situation(12)
def test_a_copy_of_a_target_takes_another_size_as_timm_interpolates_its_positions(make_model):
    target, by_hand = TargetModel(make_model()), make_model()
    images = torch.randint(0, 256, (2, 3, 24, 40), dtype=torch.uint8)
    by_hand.set_input_size((24, 40))
    resized = as_target(target, image_size=(24, 40))
    torch.testing.assert_close(resized(images), by_hand(target.normalise(images)))
    assert (resized.grid.shape, target.grid.shape) == ((3, 5), (4, 4))
    layers = nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    net = as_target(nn.Sequential(*layers), mean=0.5, std=0.5, image_size=(16, 24))
    assert net.grid.shape == (8, 12)
    with pytest.raises(InputError, match="^image_size: "):
        as_target(net, image_size=32)


class MeanOfPatches(timm.models.VisionTransformer):
    """A ViT that pools in its features, as that of MAE."""

    def forward_features(self, images, **_):
        return super().forward_features(images)[:, 1:].mean(1)

    def forward_head(self, features, pre_logits=False):
        return features if pre_logits else self.head(features)


@torch.no_grad()
@pytest.mark.parametrize("build", [timm.models.VisionTransformer, MeanOfPatches])
def test_a_model_that_its_class_built_states_no_mean(build, images):
    model = build(**TINY_VIT, num_classes=5).eval()
    for held in (model, nn.Sequential(model, nn.ReLU())):
        with pytest.raises(InputError, match=r"^expected mean and std of the images on which \w+ was trained, got"):
            as_target(held)
        target = as_target(held, mean=0.4, std=0.2)
        torch.testing.assert_close(target(images), held(target.normalise(images)), rtol=1e-4, atol=1e-5)
        assert ("DecompX" in posthoc.methods_for(target)) is (build is not MeanOfPatches)

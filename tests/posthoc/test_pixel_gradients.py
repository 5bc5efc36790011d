"""Gradients on pixels, against loops and against captum."""

import copy
import re
import warnings
from functools import partial

import captum.attr
import pytest
import references_masks as slow
import torch
from references import window
from torch import nn

from explainers.models import as_target
from explainers.posthoc.pixel_gradients import (
    DeepLift,
    Explained,
    GradientSHAP,
    IntegratedGradients,
    Saliency,
    SmoothGrad,
    mean_gradients,
)
from explainers.posthoc.soft_masks import gaussian_noise, patch_means
from explainers.runtime.sampling import uniform

CLASSES = torch.tensor([3, 0, 4, 1, 1])
SWIN = {"img_size": 32, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4}
MODELS = {
    "vit": ("vit_tiny_patch16_224", {}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "swin": ("swin_tiny_patch4_window7_224", SWIN),
    "resnet": ("test_resnet", {}),
}
METHODS = {
    "saliency": (Saliency, {}),
    "smooth": (SmoothGrad, {"samples": 5}),
    "integrated": (IntegratedGradients, {"steps": 5}),
    "local integrated": (IntegratedGradients, {"steps": 5, "multiply_by_inputs": False}),
    "shap": (GradientSHAP, {"samples": 5}),
    "local shap": (GradientSHAP, {"samples": 5, "multiply_by_inputs": False}),
    "deep_lift": (DeepLift, {}),
}


@pytest.fixture(params=METHODS)
def method(request):
    def build(target, grid, **changes):
        kind, settings = METHODS[request.param]
        return kind(target, grid, **settings | changes).eval()

    return build


def logit(target, label):
    return lambda normalised: target.classify(target.embed(normalised))[:, label]


def close(found, expected, relative=1e-5):
    """Compare with a tolerance relative to the largest value."""
    torch.testing.assert_close(found, expected, rtol=0, atol=relative * expected.abs().max().item())


def test_saliency_and_smooth_grad_are_the_references(target, grid, images):
    saliency = Saliency(target, grid)(images, CLASSES)
    smooth = SmoothGrad(target, grid, samples=4, seed=2)(images, CLASSES)
    noises = gaussian_noise(torch.arange(4), (3, 32, 32), seed=2)
    for i, image in enumerate(target.normalise(images)):
        score, deviation = logit(target, CLASSES[i]), 0.15 * (image.max() - image.min())
        close(saliency[i], slow.smooth_grad(score, image, [torch.zeros_like(image)], 4))
        close(smooth[i], slow.smooth_grad(score, image, list(deviation * noises), 4))


@pytest.mark.parametrize("multiply", [True, False])
def test_path_methods_are_the_references(target, grid, images, multiply):
    shap = GradientSHAP(target, grid, 6, multiply_by_inputs=multiply, seed=5)(images, CLASSES)
    integrated = IntegratedGradients(target, grid, 40, multiply_by_inputs=multiply)(images, CLASSES)
    positions = uniform(torch.arange(6), seed=5).tolist()
    middles = [(i + 0.5) / 100 for i in range(100)]
    for i, image in enumerate(target.normalise(images[:2])):
        score = logit(target, CLASSES[i])
        close(shap[i], slow.path(score, image, positions, 4, multiply))
        close(integrated[i], slow.path(score, image, middles, 4, multiply), 2e-3)  # another quadrature


@pytest.mark.filterwarnings("ignore::UserWarning")  # of captum, about itself
@pytest.mark.parametrize(("name", "multiply"), [("vit", True), ("resnet", False)])
def test_captum_computes_the_same(make_target, grid, images, multiply, name):
    target = make_target(MODELS[name][0])
    model, normalised = Explained(target), target.normalise(images)
    given = {"additional_forward_args": (CLASSES,)}
    sums = IntegratedGradients(target, grid).over_patches
    theirs = captum.attr.Saliency(model).attribute(normalised.clone(), **given)
    close(Saliency(target, grid)(images, CLASSES), patch_means(theirs.amax(1), grid))
    theirs = captum.attr.IntegratedGradients(model, multiply).attribute(normalised, n_steps=50, **given)
    close(IntegratedGradients(target, grid, 50, multiply)(images, CLASSES), sums(theirs.float().sum(1)), 1e-4)
    theirs = captum.attr.DeepLift(model, multiply).attribute(normalised, **given)
    close(DeepLift(target, grid, multiply)(images, CLASSES), sums(theirs.sum(1)))


def test_deep_lift_is_the_gradient_on_a_transformer_and_adds_up_on_a_relu_network(make_target, grid, images):
    """Max-pooling is replaced, because captum's rule for it is not exact."""
    vit, resnet = make_target(), make_target("test_resnet")
    resnet.backbone.maxpool = nn.AvgPool2d(3, 2, 1)
    gradients, _ = mean_gradients(
        vit, vit.normalise(images), CLASSES, lambda x, s: (x[:, None], x[:, None]), torch.ones(1), 64
    )
    lift = DeepLift(vit, grid)
    with pytest.warns(UserWarning, match="DeepLift has no rule for functions such as F.relu"):
        close(lift(images, CLASSES), lift.over_patches(gradients.sum(1)))
    with torch.no_grad():
        blank = resnet.classify(resnet.embed(torch.zeros(1, 3, 32, 32)))[0, CLASSES]
        difference = resnet(images).take_along_dim(CLASSES[:, None], 1)[:, 0] - blank
    torch.testing.assert_close(DeepLift(resnet, grid)(images, CLASSES).sum((1, 2)), difference, rtol=1e-3, atol=1e-3)


class FunctionalReLU(nn.Module):
    """ReLU without the module, whose calls DeepLift does not see."""

    def forward(self, x):
        return torch.nn.functional.relu(x)


@pytest.mark.parametrize(
    ("of", "hidden", "expected"),
    [
        (DeepLift, nn.ReLU, None),
        (DeepLift, FunctionalReLU, "^DeepLift: expected attributions that add up .* F.relu, .* take Integrated"),
        (partial(IntegratedGradients, multiply_by_inputs=False), FunctionalReLU, None),
        (partial(IntegratedGradients, steps=1), FunctionalReLU, ": steps=1 is too small: set steps=4, or take "),
    ],
)
def test_attributions_that_do_not_add_up_are_told(grid, images, of, hidden, expected):
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 8, 8), hidden(), nn.Conv2d(8, 8, 1), hidden(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network = nn.Sequential(*layers, nn.Linear(8, 5))
    with torch.no_grad():
        network[0].weight *= 10
        network[2].bias.fill_(-1)
    target = as_target(network, image_size=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        of(target, grid)(images, CLASSES)
    messages = [str(each.message) for each in told if "add up" in str(each.message)]
    assert bool(messages) == bool(expected) and all(re.search(expected, message) for message in messages)


def only_one_patch(target, patch):
    """A copy of the target that sees one patch alone; the other pixels are 0."""
    blind = copy.deepcopy(target)

    def hide(layer, inputs):
        seen = torch.zeros_like(inputs[0])
        seen[window(patch, 4, 8)] = inputs[0][window(patch, 4, 8)]
        return (seen,)

    blind.backbone.patch_embed.register_forward_pre_hook(hide)
    return blind


def test_only_the_patch_that_the_target_sees_is_found(method, target, grid, images):
    heatmaps = method(only_one_patch(target, 1 * 4 + 3), grid)(images, CLASSES)
    expected = torch.zeros(4, 4, dtype=torch.bool)
    expected[1, 3] = True
    assert torch.equal(heatmaps != 0, expected.expand(5, -1, -1))

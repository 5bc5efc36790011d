"""What holds for every explainer (see `explainers.Explainer`): they are all found here."""

import copy
import importlib
import inspect
import pkgutil
from functools import partial

import pytest
import torch
from conftest import timm_model
from devices import DEVICE, refusing_to_mix
from toys import PAPER, equal, three_models, vector_module

import explainers
from benchmarks.papers.general import General
from explainers import FunctionalExplainer, posthoc
from explainers.anyhead import AnyHead, AnyHeadNetwork
from explainers.errors import InputError
from explainers.evaluation.passes import count_passes, passes_taken
from explainers.masking import PatchGrid
from explainers.metrics.cost import NUMBERS
from explainers.posthoc.pixel_gradients import PixelExplainer
from explainers.posthoc.soft_masks import patch_means
from explainers.refinement import Refined
from explainers.shapley import (
    FastSHAPNetwork,
    KernelSHAP,
    LightShapleyNetwork,
    Shapley,
    ViTShapleyNetwork,
)
from explainers.text import TextExplainer, TextHead
from explainers.tve import TVE, LightNetwork, Oracle, PaperNetwork
from explainers.vectors import ExplainabilityVector, SelfExplaining
from explainers.vectors.fixed_head import FixedHead
from explainers.vectors.projections import simplex

LIGHT = partial(LightNetwork, blocks=[0, 1], width=12, depth=1)


def all_explainers():
    """Every class that a room exports and that is called with images and classes."""
    found = []
    for room in pkgutil.iter_modules(explainers.__path__, "explainers."):
        module = importlib.import_module(room.name)
        for name in getattr(module, "__all__", ()):
            exported = getattr(module, name)
            concrete = inspect.isclass(exported) and not inspect.isabstract(exported)
            call = getattr(exported, "forward", None) if concrete else None
            if call and list(inspect.signature(call).parameters)[1:] == ["images", "classes"]:
                found.append(exported)
    return [*found, General]


def general(target, grid, **settings):
    return General(target, TVE(target, grid, LIGHT), target, **settings)


def self_explaining(target, grid, classes=5):
    own = copy.deepcopy(target)
    own.head = FixedHead(simplex(classes, own.embed_dim))
    return SelfExplaining(own, grid)


def explainability_vector(target, grid, folder):
    return vector_module(target, grid, three_models(target, grid, folder, classes=5), lambda_2=[1.0])


def class_activation(target, grid, kind):
    """A method for averaged maps on a Swin, because the target of these tests has a class token."""
    windows = {"patch_size": 2, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
    swin = timm_model("swin_tiny_patch4_window7_224", img_size=grid.size, **windows, as_target=True)
    target.check_grid(grid)
    return kind(swin, grid)


def texts(target, grid):
    """Five texts as directions of the embedding, explained by DecompX."""
    directions = simplex(5, target.embed_dim, seed=3)
    head = TextHead(lambda prompts: directions[[int(prompt) for prompt in prompts]], scale=10.0)
    return TextExplainer(posthoc.DecompX(target, grid), head, list("01234"), against=list("01"))


# Those that need more than a target and a grid, and options that change what is computed
BUILDERS = {
    Oracle: {"": partial(Oracle, hops=1)},
    posthoc.CAM: {"": partial(class_activation, kind=posthoc.CAM)},
    posthoc.StagePaths: {"": partial(class_activation, kind=posthoc.StagePaths)},
    posthoc.PLUS: {"of DecompX": partial(posthoc.PLUS, of=posthoc.DecompX)},
    posthoc.SkipPLUS: {
        "of XGradCAM": partial(posthoc.SkipPLUS, of=posthoc.XGradCAM),
        "of FullGrad": partial(posthoc.SkipPLUS, of=posthoc.FullGrad),
    },
    posthoc.XGradCAM: {"": posthoc.XGradCAM, "with the rules of LibraGrad": posthoc.libra(posthoc.XGradCAM)},
    posthoc.Rollout: {
        "of GlobEnc": partial(posthoc.Rollout, of=posthoc.GlobEnc),
        "of ALTI": partial(posthoc.Rollout, of=posthoc.ALTI),
    },
    posthoc.SmoothGrad: {"": partial(posthoc.SmoothGrad, samples=4)},
    posthoc.IntegratedGradients: {"": partial(posthoc.IntegratedGradients, steps=6)},
    posthoc.GradientSHAP: {"": partial(posthoc.GradientSHAP, samples=4)},
    posthoc.RISE: {"": partial(posthoc.RISE, masks=100, cells=4)},
    posthoc.LIME: {"": partial(posthoc.LIME, samples=60)},
    posthoc.TAM: {"": partial(posthoc.TAM, steps=4)},
    posthoc.ViTCX: {"": posthoc.ViTCX, "of random masks": partial(posthoc.ViTCX, random=40)},
    posthoc.TokenTM: {
        "": posthoc.TokenTM,
        "as in LibraGrad": partial(posthoc.TokenTM, transformed="stream", scale="softmax", heads="apart"),
    },
    posthoc.GradECLIP: {
        "": posthoc.GradECLIP,
        "as released": partial(posthoc.GradECLIP, layers=2, similarity="projected"),
    },
    posthoc.MaskCLIP: {"": posthoc.MaskCLIP, "as released": partial(posthoc.MaskCLIP, block="whole")},
    KernelSHAP: {"": partial(KernelSHAP, budget=40)},
    Refined: {
        "": partial(Refined, passes=32),
        "again": partial(Refined, passes=6),
        "without a prior": partial(Refined, prior=None, passes=40),
    },
    TVE: {
        "light": partial(TVE, network=LIGHT),
        "paper": partial(TVE, network=partial(PaperNetwork, **PAPER)),
        "shared": partial(TVE, network=partial(PaperNetwork, **PAPER, shared_trunk=True)),
        "released": partial(
            TVE, network=partial(PaperNetwork, **PAPER, token_mixing=True), score="logit", h_weight=0.0, pooling=5
        ),
    },
    AnyHead: {
        "": partial(AnyHead, network=partial(AnyHeadNetwork, blocks=[0, 1], width=12, depth=1)),
        "direct": partial(AnyHead, network=partial(AnyHeadNetwork, blocks=[0, 1], width=12, depth=1, direct=[1])),
        "flow": partial(
            AnyHead, network=partial(AnyHeadNetwork, blocks=[0, 1], width=12, depth=1, direct=[0, 1], paths="flow")
        ),
    },
    TextExplainer: {"": texts},
    General: {"": general, "mapped": partial(general, class_map=[4, 3, 2, 1, 0])},
    Shapley: {
        "light": partial(Shapley, network=partial(LightShapleyNetwork, blocks=[0, 1], width=12, depth=1)),
        "vit": partial(Shapley, network=ViTShapleyNetwork),
        "fastshap": partial(Shapley, network=partial(FastSHAPNetwork, backbone="test_resnet")),
    },
    SelfExplaining: {"": self_explaining},
    ExplainabilityVector: {"": explainability_vector},
}
CASES = [(found, variant) for found in all_explainers() for variant in BUILDERS.get(found, {"": found})]
OWN_PLACES = TVE, Shapley, General, ExplainabilityVector, Oracle, posthoc.CAM, posthoc.StagePaths, posthoc.Chance
PLACED_CASES = [
    case for case in CASES if case[0] not in (*OWN_PLACES, posthoc.RISE) and case[1] not in ("of random masks", "again")
]
"""Without networks that have positions of their own, neighbours, another target, masks of single patches, and ranks."""
FUNCTIONAL_CASES = [case for case in CASES if hasattr(case[0], "explain") and case[0] is not posthoc.LibraGrad]
UNREAD = posthoc.Chance, General
"""What they explain is no class that they are given: of chance none, of a general classifier what it predicts."""
FLOAT64 = ("RISE", "LIME", "GradientSHAP", "IntegratedGradients", "ScoreCAM", "ViTCX", "KernelSHAP", "Refined")
"""They draw, sum or solve in float64, where there is one."""
METHODS = {
    *((posthoc.GAE, ""), (posthoc.PLUS, "of DecompX"), (posthoc.IntegratedGradients, ""), (posthoc.PathFlow, "")),
    *((posthoc.RISE, ""), (posthoc.StagePaths, ""), (posthoc.ViTCX, "")),
}
"""One for each way to compute: white-box, in layers, on pixels, by vectors of patches, by masks, of averaged maps."""
REPRESENTATIVES = METHODS | {
    *((TVE, "light"), (AnyHead, "flow"), (Shapley, "light"), (Refined, ""), (TextExplainer, ""), (General, "mapped")),
    *((posthoc.Chance, ""), (General, ""), (SelfExplaining, "")),
}
CLASSES = torch.tensor([3, 0, 1])
"""Of the first image, and two of the second one."""


@pytest.fixture
def grid():
    """A rectangle: what mistakes rows for columns, or expects a square, fails here."""
    return PatchGrid(image_size=(24, 40), patch_size=8)


@pytest.fixture
def target(make_target, grid):
    """A ViT of width 24 that sees 24 × 40 pixels in 3 × 5 patches and tells 5 classes apart."""
    return make_target(img_size=grid.size)


@pytest.fixture
def images():
    seen = torch.randint(0, 256, (2, 3, 24, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    return seen[[0, 1, 1]]


def name_of(case):
    found, variant = case
    return f"{found.__name__} {variant}".strip()


def of(cases, chosen=REPRESENTATIVES):
    """Parametrise by those of the cases that are chosen."""
    return pytest.mark.parametrize("explainer", [case for case in cases if case in chosen], indirect=True, ids=name_of)


def builder(case, request):
    """The function of a target and a grid that builds the explainer of a case."""
    found, variant = case
    build = BUILDERS.get(found, {"": found})[variant]
    needs_files = found is ExplainabilityVector
    return partial(build, folder=request.getfixturevalue("tmp_path")) if needs_files else build


def lively(explainer):
    """The explainer as after training: fresh networks give nearly constant heatmaps."""
    with torch.no_grad():
        for weight in (weight for name, weight in explainer.named_parameters() if "target." not in name):
            weight.add_(0.2 * torch.randn_like(weight))
    return explainer.eval()


@pytest.fixture(params=CASES, ids=name_of)
def explainer(request, target, grid):
    return lively(builder(request.param, request)(target, grid))


def condition(*modules):
    """Everything that explaining could change: weights, buffers, modes, gradients and hooks."""
    states = [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]
    parts = [part for module in modules for part in module.modules()]
    hooks = [(dict(part._forward_hooks), dict(part._backward_hooks)) for part in parts]
    gradients = [weight.grad for module in modules for weight in module.parameters()]
    return states, [part.training for part in parts], hooks, gradients, set(vars(modules[0].backbone))


def check_passes(explainer, count, images):
    """The forward passes that are announced are those that were made."""
    announced, made = getattr(explainer, "forward_passes", 1), round(count.images / len(images))
    if getattr(explainer, "passes_vary", False):
        assert 1 < made <= announced
    elif made == 0:  # a network that reads the image alone: see `passes_taken`
        assert announced == (not isinstance(explainer, posthoc.Chance))
        assert passes_taken(explainer, count, len(images)) % len(images) == 0
    else:
        assert made == announced and count.images - len(images) * made in (0, 1)  # a blank image for the batch


WRONG_GRIDS = [PatchGrid((24, 40), 4), PatchGrid((40, 24), 8)]
"""Of other patches, and of other images."""


@pytest.mark.situation(36)
@pytest.mark.situation(37)
@pytest.mark.situation(38)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_an_explainer_keeps_its_promises(case, request, target, grid, images):
    """Shape, passes, classes, signs, a model as it was; and of an image alone, on another device, the same."""
    build = builder(case, request)
    if case[0] is not posthoc.Chance:
        for wrong in WRONG_GRIDS[: 1 + (case in REPRESENTATIVES)]:
            with pytest.raises(InputError, match="grid"):
                build(target, wrong)
    explainer = lively(build(target, grid))
    before, given, classes = condition(target, explainer), images.clone(), CLASSES.clone()
    with count_passes(target, explainer) as count:
        heatmaps = explainer(images, classes)
    check_passes(explainer, count, images)
    after = condition(target, explainer)
    assert all(equal(*states) for states in zip(before[0], after[0], strict=True)) and before[1:] == after[1:]
    assert torch.equal(images, given) and torch.equal(classes, CLASSES) and not any(after[1])
    assert heatmaps.shape == (3, 3, 5) and heatmaps.is_floating_point() and heatmaps.isfinite().all()
    assert (heatmaps.flatten(1).std(1) > 1e-3).all()
    assert not torch.allclose(heatmaps[0], heatmaps[1], atol=1e-3)
    assert torch.allclose(heatmaps[1], heatmaps[2], atol=1e-4) == getattr(explainer, "ignores_classes", False)
    assert explainer.signed or not getattr(explainer, "linear", False)  # −v has the heatmap of v with the other sign
    if not isinstance(explainer, TVE | Oracle | General):  # unsigned, with values below 0
        assert explainer.signed == bool((heatmaps < 0).any()) and (heatmaps > 0).any()
    with refusing_to_mix(float64=case[0].__name__ not in FLOAT64):
        alone = explainer.to(DEVICE)(images[1:2].to(DEVICE), classes[1:2].to(DEVICE))
    assert alone.device == DEVICE
    torch.testing.assert_close(alone.cpu(), heatmaps[1:2], rtol=1e-4, atol=1e-4)


@pytest.mark.situation(12)
@pytest.mark.parametrize("explainer", PLACED_CASES, indirect=True, ids=name_of)
def test_the_patch_that_differs_from_all_others_differs_in_the_heatmap(explainer):
    """Without positions, a model sees equal patches alike, and so does a method."""
    with torch.no_grad():
        explainer.target.backbone.pos_embed.zero_()
    images = torch.full((1, 3, 24, 40), 90, dtype=torch.uint8)
    images[..., 8:16, 24:32] = 250
    heatmap = explainer(images, CLASSES[:1])[0]
    assert divmod(int((heatmap - heatmap.median()).abs().argmax()), 5) == (1, 3)


def image_methods(explainer):
    """Name → other arguments of every public method that takes images."""
    methods = inspect.getmembers(type(explainer), inspect.isfunction)
    arguments = {name: list(inspect.signature(method).parameters)[1:] for name, method in methods if name[0] != "_"}
    return {name: names[1:] for name, names in arguments.items() if names[:1] == ["images"]}


@of(CASES)
def test_images_of_another_size_or_type_and_an_empty_batch_are_refused_by_every_method(explainer, target, images):
    given = {
        "classes": lambda images: CLASSES[: len(images)],
        "functionals": lambda images: target.head.weight[CLASSES[: len(images)]].detach(),
        "functionals_of": lambda images: lambda _: target.head.weight[CLASSES[: len(images)], None].detach(),
        "heads": lambda images: [target.classify],
    }
    for name, others in image_methods(explainer).items():
        for wrong in (images.mT, images[:0]):
            with pytest.raises(InputError, match="images|empty"):
                getattr(explainer, name)(wrong, *(given[other](wrong) for other in others))
    if not isinstance(explainer, posthoc.Chance):  # reads no pixels as numbers
        with pytest.raises(InputError, match="uint8"):
            explainer(images / 255, CLASSES)


@pytest.mark.situation(33)
@of(CASES)
def test_an_explanation_is_the_same_again_and_for_classes_of_any_type_of_integers(explainer, images):
    expected = explainer(images, CLASSES)
    torch.rand(7)
    for dtype in (torch.int32, torch.uint8):
        assert torch.equal(explainer(images, CLASSES.to(dtype)), expected)


@pytest.mark.parametrize(
    "explainer", [case for case in CASES if hasattr(case[0], "details")], indirect=True, ids=name_of
)
def test_heatmaps_are_means_or_sums_of_the_saliency_map_over_patches(explainer, grid, images):
    explanation = explainer.details(images, CLASSES)
    assert torch.equal(explanation.heatmaps, explainer(images, CLASSES))
    means = patch_means(explanation.pixels, grid)
    sums = isinstance(explainer, PixelExplainer) and not isinstance(explainer, posthoc.SmoothGrad)
    torch.testing.assert_close(explanation.heatmaps, means * 64 if sums else means)
    assert explanation.pixels.shape == images[:, 0].shape and explanation.pixels.isfinite().all()
    assert explanation.numbers.keys() <= NUMBERS.keys()
    assert all(values.shape == (3,) for values in explanation.numbers.values())


@of(CASES)
def test_classes_that_the_model_does_not_have_are_refused_or_not_read(explainer, images):
    if isinstance(explainer, UNREAD) and getattr(explainer, "class_map", None) is None:
        assert explainer.ignores_classes
        assert torch.equal(explainer(images, CLASSES + 1000), explainer(images, CLASSES))
        return
    negative, high = (CLASSES.index_fill(0, torch.tensor([2]), wrong) for wrong in (-1, 5))
    for wrong in (negative, high, CLASSES[:2], CLASSES.float()):
        with pytest.raises(InputError, match="class"):
            explainer(images, wrong)


@of(CASES, METHODS)
def test_a_method_depends_on_the_weights_of_the_model_and_hardly_on_bfloat16(explainer, images):
    before = explainer(images, CLASSES)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = explainer(images, CLASSES)
    for exact, low in zip(before.flatten(1), rounded.flatten(1), strict=True):
        assert torch.corrcoef(torch.stack([exact, low]))[0, 1] > 0.9
    with torch.no_grad():
        for weight in explainer.parameters():
            weight.copy_(weight[torch.randperm(len(weight))])  # the same values at other places
    assert not torch.allclose(explainer(images, CLASSES), before, rtol=0.01, atol=1e-4)


OWN_WAYS = {(getattr(posthoc, name), "") for name in ("TAM", "LeGrad", "TransformerAttribution", "GradSAM", "FullGrad")}
"""Methods that go through the model in a way of their own."""


@of(FUNCTIONAL_CASES, REPRESENTATIVES | OWN_WAYS)
def test_a_class_is_the_functional_in_its_row_of_the_head_alone_and_among_others(explainer, images):
    rows = explainer.target.head.weight[CLASSES].detach()
    heatmaps = explainer.explain(images, rows)
    torch.testing.assert_close(heatmaps, explainer(images, CLASSES), rtol=1e-4, atol=1e-5)
    together = explainer.explain(images, torch.stack([-rows, rows.roll(1, 1), rows], 1))
    size = heatmaps.abs().max().item()
    torch.testing.assert_close(together[:, 2], heatmaps, rtol=1e-3, atol=1e-4 * size)


PREPARED_CASES = [case for case in CASES if hasattr(case[0], "prepare")]


@pytest.mark.parametrize("explainer", PREPARED_CASES, indirect=True, ids=name_of)
def test_prepared_images_are_explained_for_any_class_without_another_pass(explainer, target, images, monkeypatch):
    prepared = explainer.prepare(images)
    expected = {classes: explainer(images, classes) for classes in (CLASSES, CLASSES.flip(0))}
    monkeypatch.setattr(target.backbone, "forward_features", lambda _: pytest.fail("another pass"))
    for classes, heatmaps in expected.items():
        torch.testing.assert_close(prepared(classes), heatmaps)


def test_the_explainers_of_the_library_are_found():
    found = set(all_explainers())
    assert {posthoc.Chance, Oracle, TVE, General, KernelSHAP, Shapley, SelfExplaining, ExplainabilityVector} < found
    assert issubclass(posthoc.GAE, FunctionalExplainer) and len(FUNCTIONAL_CASES) > 30
    assert {case[0] for case in PREPARED_CASES} == {TVE, AnyHead, Shapley, TextExplainer}
    assert len([method for method in found if method.__module__.startswith("explainers.posthoc.")]) >= 40
    assert set(CASES) >= REPRESENTATIVES and len(REPRESENTATIVES) == 16


def test_chance_favours_no_patch(grid):
    images = torch.randint(0, 256, (2000, 3, 24, 40), dtype=torch.uint8)
    heatmaps = posthoc.Chance(None, grid)(images, torch.zeros(2000, dtype=torch.long))
    peaks = heatmaps.flatten(1).argmax(1).bincount(minlength=15)
    assert (peaks - 133).abs().max() < 60  # five standard deviations
    assert (heatmaps.mean(0) - 0.5).abs().max() < 0.04

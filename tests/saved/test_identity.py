"""What changes the function of a model, the rows of a source or the use of weights changes their identity.

Constructor arguments are found by introspection: a new one makes a test fail until it is said here what it does.
"""

import importlib
import inspect
import json
import pkgutil
from functools import partial

import pytest
import timm
import torch
from conftest import TINY_VIT
from torch import nn
from toys import PAPER

import explainers
from explainers import anyhead, shapley, tve
from explainers.anyhead import AnyHead, AnyHeadNetwork, CoalitionTeacher, PropagationTeacher
from explainers.learned.network_explainer import NOT_IDENTITY
from explainers.learned.sources import Features, Pixels, Source
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.saved.identity import WITHOUT_EFFECT, architecture_hash, find_changes, recipe, weights_hash
from explainers.shapley import Shapley, ShapleyLabels, ShapleyLoss
from explainers.shapley.coalition_values import CoalitionValues
from explainers.tve import TVE, Oracle, TVELoss
from explainers.vectors.method_labels import MethodLabels

GRID = PatchGrid(image_size=32, patch_size=8)
OTHER_GRID = PatchGrid(image_size=32, patch_size=16, differs=True)


def arguments(kind):
    return set(inspect.signature(kind).parameters)


# Of a model


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("vit_tiny_patch16_224", {"num_heads": 2}),
        ("vit_tiny_patch16_224", {"norm_layer": partial(nn.LayerNorm, eps=0.1)}),
        ("test_resnet", {"act_layer": "silu"}),
        ("test_resnet", {"global_pool": "max"}),
    ],
    ids=str,
)
def test_two_functions_of_equal_weights_have_two_identities(name, change):
    own = TINY_VIT if "vit" in name else {}
    one, other = (timm.create_model(name, num_classes=3, **own | settings).eval() for settings in ({}, change))
    assert other.load_state_dict(one.state_dict())
    images = torch.randn(2, 3, 32, 32) if "vit" in name else torch.randn(2, 3, 64, 64)
    assert not torch.allclose(one(images), other(images))
    assert weights_hash(one) == weights_hash(other)
    assert architecture_hash(one) != architecture_hash(other)


@pytest.mark.parametrize("change", [{"drop_path_rate": 0.5}, {"proj_drop_rate": 0.1, "attn_drop_rate": 0.2}], ids=str)
def test_what_is_off_in_evaluation_is_no_part_of_the_identity(make_model, make_target, change):
    assert architecture_hash(make_model()) == architecture_hash(make_model(**change))
    target = make_target()
    before = target.identity()
    target.train()
    target.backbone.set_grad_checkpointing()
    assert target.identity() == before


def test_a_target_is_its_backbone_its_normalisation_and_its_head(make_model):
    one = TargetModel(make_model()).identity()
    assert one == TargetModel(make_model()).identity() == json.loads(json.dumps(one))
    brighter, same = make_model(), TargetModel(make_model())
    brighter.pretrained_cfg["std"] = (0.2, 0.2, 0.2)
    assert TargetModel(brighter).identity() == one | {"normalisation": {"mean": [0.5] * 3, "std": [0.2] * 3}}
    same.head = nn.Linear(24, 5)
    assert {key for key in one if same.identity()[key] != one[key]} == {"head_sha256"}
    assert same.backbone_identity() == TargetModel(make_model()).backbone_identity()


@pytest.mark.parametrize("write", [lambda w: w.data.add_(1), lambda w: w.detach().add_(1), lambda w: nn.init.zeros_(w)])
def test_every_way_to_write_weights_changes_their_hash(write):
    layer = nn.Linear(3, 2)
    before = weights_hash(layer)
    write(layer.weight)
    assert weights_hash(layer) != before


def test_what_a_caller_adds_to_a_model_is_part_of_its_identity_and_what_a_library_adds_is_not(make_model):
    before, model = architecture_hash(make_model()), make_model()
    model.blocks[0].register_forward_hook(Features.__call__)
    assert find_changes(model) == [] and architecture_hash(model) == before
    model.blocks[1].forward = lambda tokens, *_, **__: tokens
    assert find_changes(model) == ["blocks.1"] and architecture_hash(model) != before


# Of sources


def all_sources():
    """Every class with the methods of a source."""
    names = [module.name for module in pkgutil.walk_packages(explainers.__path__, "explainers.")]
    classes = {kind for name in names for _, kind in inspect.getmembers(importlib.import_module(name), inspect.isclass)}
    own = {kind for kind in classes if {"key", "__call__"} <= vars(kind).keys()} - {Source}
    return own | {kind for kind in classes if issubclass(kind, tuple(own)) and not issubclass(kind, nn.Module)}


SOURCES = {
    Features: ({}, {"blocks": [1], "direct": [0], "paths": "flow"}),
    Pixels: ({}, {}),
    TVELoss: ({"grid": GRID}, {"grid": OTHER_GRID, "hops": [1], "patches_per_image": 2, "seed": 1}),
    ShapleyLoss: ({"grid": GRID}, {"grid": OTHER_GRID, "coalitions": 2, "seed": 1, "paired": False}),
    CoalitionValues: (
        {"grid": GRID, "count": 4},
        {"grid": OTHER_GRID, "count": 6, "seed": 1, "paired": False, "score": "logit", "removal": "black"},
    ),
    ShapleyLabels: (
        {"grid": GRID, "budget": 4},
        {
            **{"grid": OTHER_GRID, "budget": 6, "seed": 1, "paired": False, "score": "logit", "removal": "black"},
            **{"classes": "all", "prior": "InputXGradient"},
        },
    ),
    CoalitionTeacher: (
        {"grid": GRID, "pairs": 4},
        {"grid": OTHER_GRID, "pairs": 6, "seed": 1, "fit": "shapley", "removals": ["zero", "black"]},
    ),
    PropagationTeacher: (
        {"grid": GRID},
        {"grid": OTHER_GRID, "seed": 1, "method": "AttnLRP-PLUS", "functionals": ["isotropic"]},
    ),
    MethodLabels: ({"grid": GRID}, {"grid": OTHER_GRID, "method": "AttnLRP-PLUS"}),
}
"""Source → arguments besides its model, and another value of every argument that its rows depend on."""


LOSSES = {
    CoalitionTeacher: {"functionals": "isotropic"},
    TVELoss: {"reduction": "mean"},
}
"""Teacher → another value of every argument that changes its loss, not its rows."""
OF_TEXTS = {CoalitionTeacher: {"vocabulary", "text_head"}}
"""Teacher → arguments that functionals=texts needs; tests/anyhead/test_learned.py has their keys."""


def test_no_source_is_missing():
    assert all_sources() == SOURCES.keys()


@pytest.mark.parametrize("kind", SOURCES, ids=lambda kind: kind.__name__)
def test_the_key_of_a_source_changes_with_every_argument_but_those_without_effect(kind, make_target):
    given, changes = SOURCES[kind]
    target, other = make_target(), make_target(seed=1)
    models = {name: target for name in ("target", "model") if name in arguments(kind)}
    known = {*models, *changes, *LOSSES.get(kind, {}), *OF_TEXTS.get(kind, ())}
    assert arguments(kind) == known | (arguments(kind) & WITHOUT_EFFECT.keys())
    key = kind(**models, **given).key()
    assert key == kind(**models, **given).key() == json.loads(json.dumps(key))
    for name, value in {**changes, **dict.fromkeys(models, other)}.items():
        assert kind(**models | given | {name: value}).key() != key, name
    for name, value in LOSSES.get(kind, {}).items():
        assert kind(**models, **given, **{name: value}).key() == key, name
    for name in arguments(kind) & WITHOUT_EFFECT.keys():
        assert kind(**models, **given, **{name: 3}).key() == key, name


def test_rows_that_a_head_computes_depend_on_it_and_those_that_read_labels_on_them(make_target):
    target, other = make_target(), make_target()
    other.head = nn.Linear(24, 5)
    for kind, (given, _) in SOURCES.items():
        if kind is not Pixels:
            same = kind(target, **given).key() == kind(other, **given).key()
            assert same == (kind in (Features, TVELoss, CoalitionTeacher)), kind
            assert kind(target, **given).entries[:1] == ("image",), kind
    entries = {classes: ShapleyLabels(target, GRID, 4, classes=classes).entries for classes in ("label", "predicted")}
    assert entries == {"label": ("image", "label"), "predicted": ("image",)}


# Of networks and learned explainers


NETWORKS = {
    tve.LightNetwork: ({"blocks": [0, 1]}, {"blocks": [1], "hops": [1, 2], "width": 24, "depth": 1}),
    shapley.LightShapleyNetwork: ({"blocks": [0, 1]}, {"blocks": [1], "hops": [2], "width": 24, "depth": 1}),
    tve.PaperNetwork: (
        PAPER,
        {"encoder": PAPER["encoder"] | {"depth": 2}, "decoder": PAPER["decoder"] | {"depth": 2}, "head_layers": 6}
        | {"reconstruct": False, "token_mixing": True, "shared_trunk": True},
    ),
    shapley.ViTShapleyNetwork: ({}, {"freeze": True, "ratio": 2, "tanh": False}),
    AnyHeadNetwork: (
        {"blocks": [0, 1], "direct": [1]},
        {"blocks": [1], "width": 24, "depth": 1, "heads": 2, "head_width": 8, "direct": [0, 1], "paths": "flow"},
    ),
    shapley.FastSHAPNetwork: ({"backbone": "test_resnet"}, {"backbone": "test_convnext"}),
}
"""Network → arguments besides target and grid, and another value of every argument that its function depends on."""


def test_no_network_is_missing():
    assert NETWORKS.keys() == {
        getattr(room, name) for room in (tve, shapley, anyhead) for name in room.__all__ if name.endswith("Network")
    }


@pytest.mark.parametrize("kind", NETWORKS, ids=lambda kind: kind.__name__)
def test_weights_are_refused_by_a_network_of_another_recipe(kind, target, tmp_path):
    given, changes = NETWORKS[kind]
    assert arguments(kind) - {"target", "grid", *getattr(kind, "initial", ())} == changes.keys()
    shapley = "Shap" in kind.__name__ or "SHAP" in kind.__name__
    module = Shapley if shapley else AnyHead if kind is AnyHeadNetwork else TVE
    build = lambda settings, **more: module(target, GRID, partial(kind, **given | settings), **more)  # noqa: E731
    weights = str(build({}).export(tmp_path))
    build({}, weights=weights)
    for name, value in changes.items():
        with pytest.raises(ValueError, match=rf"network\.{name}.*: .* → "):
            build({name: value}, weights=weights)


LIGHT = partial(tve.LightNetwork, blocks=[0], width=8, depth=1)
LIGHT_SHAPLEY = partial(shapley.LightShapleyNetwork, blocks=[0], width=8, depth=1)
VECTORS = partial(AnyHeadNetwork, blocks=[0], width=8, depth=1)
LEARNED = {
    TVE: (LIGHT, {"grid": OTHER_GRID, "hops": [1]}),
    AnyHead: (VECTORS, {"grid": OTHER_GRID}),
    Shapley: (LIGHT_SHAPLEY, {"grid": OTHER_GRID, "normalisation": "none"}),
}
"""Explainer → network, and another value of what its weights depend on."""


@pytest.mark.parametrize("kind", LEARNED, ids=lambda kind: kind.__name__)
def test_every_argument_of_a_learned_explainer_is_compared_or_reads_what_is_compared(kind, target, make_target):
    network, changes = LEARNED[kind]
    weights = arguments(kind) & {*NOT_IDENTITY}
    assert arguments(kind) == {"target", "network", *changes, *weights, *kind.READING}
    given = {"target": target, "grid": GRID, "network": network}
    identity = kind(**given).identity()
    assert identity == json.loads(json.dumps(identity))
    others = {"target": make_target(seed=1), "network": partial(network, width=12), **changes}
    for name, value in others.items():
        assert kind(**given | {name: value}).identity() != identity, name


def test_a_network_that_hides_an_argument_is_told_so():
    class Hiding(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()

    with pytest.raises(TypeError, match="expected Hiding to keep its argument width, .*: add self.width = width"):
        recipe(Hiding(3))


@pytest.mark.parametrize("change", [{"hops": 1}, {"grid": OTHER_GRID}, {"seed": 1}, {"dtype": torch.float16}], ids=str)
def test_the_oracle_reuses_nothing_of_other_settings(make_target, images, tmp_path, change):
    assert arguments(Oracle) - WITHOUT_EFFECT.keys() == {"target", "grid", "hops", "cache_dir"}
    same = {"grid": GRID, "hops": 2, "seed": 0, "dtype": torch.bfloat16}
    for settings in (same, same | change, same):
        oracle = Oracle(make_target(seed=settings["seed"]), settings["grid"], settings["hops"], tmp_path)
        with torch.autocast("cpu", settings["dtype"]):
            oracle(images[:2], torch.tensor([0, 1]))
    assert len(list(tmp_path.glob("*.safetensors"))) == 4

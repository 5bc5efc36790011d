"""What cannot be learned, added or transferred is refused in one line, which names the setting, the file or the key."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import timm_model
from refusals import check_refused
from toys import exported, three_models, vector_module

from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.models.fetching import save_target
from explainers.saved.weights import read_weights, save_weights
from explainers.shapley import ShapleyLabels
from explainers.vectors import SelfExplaining, VectorSources
from explainers.vectors.fixed_head import FixedHead
from explainers.vectors.model_files import exported_target
from explainers.vectors.projections import prototypes, prototypes_of, simplex, simplex_of
from explainers.vectors.self_distillation import SelfDistillation
from explainers.vectors.self_explaining import HeadBuilder, SelfExplainingTraining
from explainers.vectors.task_arithmetic import cosine, subtract, transfer

ADAM = partial(torch.optim.Adam, lr=1e-3)


@pytest.fixture(scope="module")
def three_files(tmp_path_factory):
    target = timm_model(as_target=True)
    return three_models(target, target.grid, tmp_path_factory.mktemp("models"))


@pytest.fixture
def move(target, grid, three_files):
    """Builds a transfer with other settings, or other files of the source's models."""
    usual = VectorSources([three_files["explaining"]], [three_files["predicting"]])

    def build(settings=None, **files):
        return vector_module(target, grid, three_files, **({"vector": replace(usual, **files)} | (settings or {})))

    return build


@pytest.fixture
def other(target, grid, tmp_path):
    """Writes the file of another model with attributions."""

    def write(base=target, grid=grid, **changes):
        return exported(base, grid, tmp_path / "other", **({"alpha": 0.8, "seed": 2} | changes))

    return write


@pytest.fixture
def changed(target, grid, three_files, tmp_path):
    """Writes the model of the source task after a change."""

    def write(change):
        module = SelfExplaining(target, grid, three_files["predicting"])
        change(module.target)
        return str(module.export(tmp_path, alpha=0.8))

    return write


@pytest.fixture
def train(target, grid, three_files):
    """Builds the training of a self-explaining model."""

    def build(base=target, head=None, labels=ShapleyLabels, alpha=0.8, twin=three_files["predicting"], **settings):
        head = head or HeadBuilder(simplex_of)
        return SelfExplainingTraining(SelfExplaining(base, grid), head, labels, twin, alpha, optimizer=ADAM, **settings)

    return build


def name_classes(target):
    target.classes = ["cat", "dog", "bird"]


def read_differences(target):
    target.head = target.head.read_as("difference", 0.3)


def data_of(samples, classes="abc"):
    return SimpleNamespace(dataset=lambda _: samples, classes=classes, num_workers=0)


def weights_of(**shapes):
    return {name: torch.ones(shape) for name, shape in shapes.items()}


SHAPES = {"a": (2,), "b": (3, 1), "c": (1,)}
ONE, OTHER = weights_of(**SHAPES), weights_of(**SHAPES | {"b": (1, 3), "c": (9,)})


def read_a_classifier(target, tmp_path):
    save_target(target, tmp_path / "target.safetensors")
    exported_target(target, tmp_path / "target.safetensors")


def read_integers(target, three_files, tmp_path):
    identity, weights = read_weights(three_files["onto"])
    weights["backbone.norm.weight"] = torch.ones(24).int()
    exported_target(target, save_weights(weights, tmp_path / "whole", identity))


REFUSED = [
    # a transfer: files of other roles, of another architecture, of another base model or of another task
    ("explaining", lambda move, three_files: move(explaining=[three_files["predicting"]])),
    ("predicting", lambda move, three_files: move(predicting=[three_files["explaining"]])),
    ("onto", lambda move, three_files: move({"onto": three_files["explaining"]})),
    ("onto", lambda move, tmp_path: move({"onto": str(move().export(tmp_path))})),
    (
        "cls_token",
        lambda move, other, make_target: move({"onto": other(make_target("test_resnet"), PatchGrid(32, 32))}),
    ),
    ("base_sha256", lambda move, other, make_target: move(predicting=[other(make_target(seed=1))])),
    ("head_sha256", lambda move, other: move(explaining=[other(turn=1)])),
    ("num_classes", lambda move, other: move(explaining=[other(classes=4)])),
    ("classes", lambda move, changed: move(explaining=[changed(name_classes)])),
    (
        "reading",
        lambda move, changed, other: move(explaining=[other(), changed(read_differences)], predicting=[None, None]),
    ),
    # nothing to compare with or to try
    ("labels.classes", lambda move: move({"labels": partial(ShapleyLabels, budget=20, classes="all")})),
    ("lambda_2", lambda move: move({"lambda_2": []})),
    ("lambda_1", lambda move: move({"lambda_1": math.inf})),
    ("explaining", lambda move: move(predicting=[None, None])),
    ("explaining", lambda move: move(ratios=[1.0, 2.0])),
    ("explaining", lambda move, three_files: move(explaining=[three_files["explaining"]] * 2, predicting=None)),
    # a training
    ("alpha", lambda train: train(alpha=1.1)),
    ("alpha", lambda target, grid: SelfDistillation(SelfExplaining(target, grid), HeadBuilder(), None, alpha=1)),
    ("twin", lambda train: train(twin=None)),
    ("patch_scale", lambda train: train(head=HeadBuilder(simplex_of, patch_scale=None))),
    ("last_blocks", lambda train: train(alpha=1, last_blocks=99)),
    # heads
    ("path_blocks", lambda: FixedHead(torch.eye(2), blocks=[0])),
    ("path_blocks", lambda target, grid, three_files: SelfExplaining(target, grid, three_files["onto"], path_blocks=1)),
    ("width 9", lambda make_model: TargetModel(make_model(), head=FixedHead(simplex(3, 9)))),
    ("classes", lambda: simplex(5, 4)),
    ("classes", lambda: prototypes(torch.randn(4, 6), torch.tensor([0, 0, 2, 3]), 4)),
    ("train images", lambda target: prototypes_of(target, data_of([None] * 4))),
    # files of models
    ("cls_token", lambda make_model, three_files: exported_target(make_model(embed_dim=48), three_files["onto"])),
    ("target.safetensors", read_a_classifier),
    ("backbone.norm.weight", read_integers),
    # arithmetic on weights of two architectures: a key that one lacks, or shapes that differ, the first one first
    ("nothing for b", lambda: subtract(ONE, weights_of(a=(2,)))),
    ("nothing and [4] for z", lambda: cosine(ONE, ONE | weights_of(z=(4,)))),
    ("[3, 1] and [1, 3] for b", lambda: transfer(ONE, OTHER, subtract(OTHER, OTHER))),
    ("more", lambda: transfer(ONE, ONE, ONE | weights_of(more=(1,)))),
]


@pytest.mark.parametrize(("told", "call"), REFUSED)
def test_what_does_not_fit_is_refused(told, call, request):
    check_refused(request, told, call)

"""What an evaluation and a study refuse, or leave out of their numbers."""

import copy

import pytest
import torch
from lightning import Trainer
from refusals import check_refused
from torch import nn
from torch.utils.data import DataLoader
from toys import SILENT

from benchmarks.papers.approximation import Subsets, TwoPointStudy
from callbacks.labels import LabelsAsLogits
from datamodules.digits import Digits
from explainers.evaluation import Evaluation, EvaluationModule
from explainers.evaluation.measurement import Measurement
from explainers.evaluation.result import text_table
from explainers.evaluation.sweep import Sweep
from explainers.masking import PatchGrid
from explainers.posthoc.baselines import Chance
from explainers.report.tables import markdown, rows
from explainers.vectors.fixed_head import FixedHead
from explainers.vectors.projections import simplex
from explainers.vectors.self_explaining import SelfExplaining

COARSE = PatchGrid(32, 16)
MODULES = {
    "evaluation": lambda target, grid, explainers: EvaluationModule(target, explainers, Evaluation(grid, levels=3)),
    "study": lambda target, grid, explainers: TwoPointStudy(target, explainers, Subsets(grid, 1, 4)),
}


@pytest.fixture(params=MODULES)
def build(request):
    """Builds an evaluation, or a study, of a target, a grid and explainers."""
    return MODULES[request.param]


@pytest.fixture(scope="module")
def digits():
    return list(Digits("test", size=7, image_size=32))


@pytest.fixture
def target(make_target):
    return make_target(num_classes=10)


def measure(module, samples, callbacks=()):
    """The module after a test, and what it logged."""
    trainer = Trainer(accelerator="cpu", callbacks=list(callbacks), **SILENT)
    trainer.test(module, DataLoader(samples, batch_size=3), verbose=False)
    return module, trainer.callback_metrics


def relabelled(samples, labels):
    return [sample | {"label": torch.tensor(label)} for sample, label in zip(samples, labels, strict=True)]


class Sick(nn.Module):
    """Uniform heatmaps, of which one score of one image is not a number."""

    def __init__(self, value, side=4):
        super().__init__()
        self.value, self.side = value, side

    def forward(self, images, classes):
        heatmaps = torch.rand(len(images), self.side, self.side)
        heatmaps[-1, 2, 1] = self.value
        return heatmaps


@pytest.fixture
def run(target, grid, digits):
    """Measures chance, or other explainers, of the target, or of another head, with other settings."""

    def measured(explainers=None, samples=digits, head=None, module=EvaluationModule, train=False, **settings):
        target.head = head or target.head
        made = Subsets if module is TwoPointStudy else Evaluation
        explainers = explainers or {"chance": Chance(None, grid)}
        measure(module(target.train(train), explainers, made(grid, **settings)), samples)

    return measured


STUDY = {"module": TwoPointStudy, "patches": 4}
SICK, SINGLE = {"sick": Sick(torch.nan)}, FixedHead(torch.ones(1, 24))
REFUSED = [
    ("sick", lambda run: run(SICK)),
    ("sick", lambda run: run(SICK, **STUDY)),
    ("sick", lambda run: run({"sick": Sick(-torch.inf)})),
    ("[3, 8, 8]", lambda run: run({"fine": Sick(0.0, side=8)})),
    ("[3, 8, 8]", lambda run: run({"fine": Sick(0.0, side=8)}, **STUDY)),
    ("2 classes", lambda run: run(head=SINGLE)),  # no linear layer of a single logit, which has two classes
    ("2 classes", lambda run: run(head=SINGLE, **STUDY)),
    ("labels", lambda run, digits: run(samples=relabelled(digits, [3, 3, 10] * 2 + [3]), classes="label")),
    ("labels", lambda run, digits: run(samples=relabelled(digits, [3, 3, -1] * 2 + [3]), classes="label")),
    ("k", lambda run: run(agreement=["iou"], k=17)),
    ("probes", lambda make_target: Measurement(make_target(patch_size=16), {}, Evaluation(COARSE, probes=["saco"]))),
    ("probes", lambda run: run(train=True, probes=["randomisation"])),
    ("reference", lambda run: run(reference="orakel")),
    ("removals", lambda run: run(removals=[])),
    (
        "removal",
        lambda make_target, grid: Measurement(make_target("test_resnet"), {}, Evaluation(grid, removals=["drop"])),
    ),
    ("order", lambda target, grid: Sweep(target, Evaluation(grid, order="saliency"), "drop")),
    ("patches", lambda run: run(module=TwoPointStudy, patches=17)),
    ("subsets", lambda run: run(module=TwoPointStudy, subsets=(16, 0))),
]


@pytest.mark.parametrize(("told", "call"), REFUSED)
def test_what_cannot_be_measured_is_refused(told, call, request):
    check_refused(request, told, call)


def test_an_explainer_may_have_any_name(build, target, grid, digits):
    names = ["keys", "forward", "a.b", "", "parts", "ViT/B"]
    explainers = {name: Chance(None, grid, seed) for seed, name in enumerate(names)}
    module = build(target, grid, explainers)
    assert {*explainers.values()} <= {*module.modules()} and not any(module.forward_passes[name] for name in names)
    results = measure(module, digits)[0].results
    assert len({str(results[name]) for name in names}) == len(names)


def test_images_without_a_label_do_not_count_in_the_accuracy(build, target, grid, digits):
    predicted = [target(sample["image"][None]).argmax().item() for sample in digits]
    labels = [predicted[0], predicted[1], (predicted[2] + 1) % 10, -1, -1, -1, -1]
    for known, accuracy in ((labels, pytest.approx(2 / 3)), ([-1] * 7, None)):
        module, logged = measure(build(target, grid, {"chance": Chance(None, grid)}), relabelled(digits, known))
        assert module.identity().get("accuracy") == accuracy and module.identity()["images"] == 7
        assert logged.get("accuracy") in (None, accuracy)


@pytest.mark.situation(31)
def test_a_label_counts_as_the_logit_of_its_class(build, target, grid, digits):
    predicted = [target(sample["image"][None]).argmax().item() for sample in digits]
    logit_of = [predicted[1], (predicted[2] + 1) % 10]
    samples = relabelled(digits, [1, 0, 1, -1, -1, -1, -1])
    module = build(target, grid, {"chance": Chance(None, grid)})
    measure(module, samples, [LabelsAsLogits(logit_of)])
    right = [logit_of[label] == own for label, own in zip([1, 0, 1], predicted, strict=False)]
    assert right[1:] == [True, False] and module.identity()["accuracy"] == pytest.approx(sum(right) / 3)


@pytest.mark.parametrize(("known", "accuracy"), [(2, 0.5), (0, None)])
def test_the_accuracy_of_an_explainer_is_that_on_labelled_images(target, grid, digits, known, accuracy):
    own = copy.deepcopy(target)
    own.head = FixedHead(simplex(10, own.embed_dim))
    explaining = SelfExplaining(own, grid)
    with torch.no_grad():
        predicted = [explaining.logits(sample["image"][None]).argmax().item() for sample in digits]
    labels = [predicted[0], (predicted[1] + 1) % 10][:known] + [-1] * (7 - known)
    module, _ = measure(
        EvaluationModule(target, {"own": explaining}, Evaluation(grid, levels=3)), relabelled(digits, labels)
    )
    assert module.results["own"].get("accuracy") == accuracy


def test_a_single_image_has_no_standard_error_in_results_and_tables(target, grid, digits):
    one, several = (
        measure(EvaluationModule(target, {"chance": Chance(None, grid)}, Evaluation(grid, levels=3)), digits[:count])[0]
        for count in (1, 2)
    )
    assert "fidelity_plus_error" not in one.results["chance"] and "fidelity_plus_error" in several.results["chance"]
    table = markdown(rows({"digit": one.results}, one.columns))
    assert f"{one.results['chance']['fidelity_plus']:.3f} " in table and "±" not in table
    assert markdown(rows({"digit": several.results}, several.columns)).count("±") == 4
    assert text_table({"a": {"x": 100.0, "x_error": 10.02}}, {"x": "X"}, "").endswith(" 100.000 ± 10.020")

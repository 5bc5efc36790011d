"""What an evaluation and a study refuse, or leave out of their numbers."""

import copy

import pytest
import torch
from lightning import Trainer
from torch import nn
from torch.utils.data import DataLoader
from toys import SILENT

from benchmarks.papers.approximation import Subsets, TwoPointStudy
from callbacks.labels import LabelsAsLogits
from datamodules.digits import Digits
from explainers.errors import InputError
from explainers.evaluation import Evaluation, EvaluationModule
from explainers.evaluation.probes import PROBES
from explainers.evaluation.result import text_table
from explainers.masking import PatchGrid
from explainers.posthoc.baselines import Chance
from explainers.report.tables import markdown, rows
from explainers.vectors.fixed_head import FixedHead
from explainers.vectors.projections import simplex
from explainers.vectors.self_explaining import SelfExplaining

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


def test_heatmaps_that_are_no_numbers_are_refused_and_their_explainer_is_named(build, target, grid, digits):
    for value in (torch.nan, -torch.inf):
        module = build(target, grid, {"chance": Chance(None, grid), "sick": Sick(value)})
        with pytest.raises(
            InputError, match="^expected finite heatmaps, got NaN or infinity from sick: leave it out, or"
        ):
            measure(module, digits)
    measure(build(target, grid, {"sick": Sick(1e30)}), digits)


def test_heatmaps_of_another_grid_are_refused_with_both_shapes(build, target, grid, digits):
    module = build(target, grid, {"fine": Sick(0.0, side=8)})
    with pytest.raises(InputError, match=r"^expected heatmaps of shape \[3, 4, 4\] from fine, got \[3, 8, 8\]: give"):
        measure(module, digits)


def test_a_target_with_a_single_class_is_refused(build, target, grid):
    target.head = FixedHead(torch.ones(1, target.embed_dim))  # no linear layer of a single logit, which has two classes
    with pytest.raises(InputError, match="^expected a target with 2 classes or more, got 1: the probability"):
        build(target, grid, {})


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


@pytest.mark.parametrize("label", [-1, 10])
def test_a_label_that_is_no_class_cannot_be_explained(target, grid, digits, label):
    module = EvaluationModule(target, {"chance": Chance(None, grid)}, Evaluation(grid, levels=3, classes="label"))
    message = f"^expected labels from 0 to 9, got {min(label, 3)} to {max(label, 3)}, where -1 is an image without a"
    with pytest.raises(InputError, match=f"{message} label: take labelled images, or classes=predicted$"):
        measure(module, relabelled(digits, [3, 3, label] * 2 + [3]))


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


def test_k_is_checked_where_iou_reads_it(grid):
    for k in (0, 17):
        with pytest.raises(InputError, match=f"^expected k from 1 to 16, got k={k}$"):
            Evaluation(grid, agreement=["iou"], k=k)
    assert Evaluation(grid, agreement=["e_rmse"], k=17).k == 17


def test_only_groups_of_patches_need_many_patches(make_target, digits):
    target, grid, probes = make_target(num_classes=10, patch_size=16), PatchGrid(32, 16), {*PROBES} - {"saco"}
    results = measure(
        EvaluationModule(target, {"chance": Chance(None, grid)}, Evaluation(grid, levels=3, probes=[*probes])), digits
    )[0]
    assert probes <= results.results["chance"].keys()
    with pytest.raises(InputError, match=r"^probes=saco needs 10 patches or more, got 4: leave it out, or take"):
        EvaluationModule(target, {}, Evaluation(grid, probes=["saco"]))


def test_random_weights_need_the_target_that_explainers_read(target, grid):
    with pytest.raises(InputError, match="probes=randomisation"):
        EvaluationModule(target.train(), {}, Evaluation(grid, probes=["randomisation"]))


@pytest.mark.parametrize("settings", [{"patches": 17}, {"subsets": (16, 0)}])
def test_numbers_of_a_study_are_checked(grid, settings):
    with pytest.raises(InputError, match=next(iter(settings))):
        Subsets(grid, **settings)

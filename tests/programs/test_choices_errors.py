"""A misspelt choice on the command line ends in one line that names all that there are."""

import pytest
from commands import DIGITS, QUIET, TVE_RUN, composed, evaluate, train
from hydra.utils import instantiate
from test_errors import error
from toys import exported


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluation.classes=predictd"], "expected classes predicted or label, got predictd"),
        (
            ["evaluation.removals=[blak]"],
            "expected removals as a list of zero, black or drop, got ['blak']",
        ),
        (
            ["evaluation.agreement=[rank_corelation]"],
            "expected agreement as a list of e_rmse, relative_error, iou or rank_correlation, got ['rank_corelation']",
        ),
        (
            ["evaluation.agreement=iou"],
            "expected agreement as a list of e_rmse, relative_error, iou or rank_correlation, got iou",
        ),
        (
            ["evaluation.reference=orakel"],
            "expected reference to be one of the explainers chance, oracle, got orakel: add it to them, or compare"
            " with none (evaluation.reference=null)",
        ),
        (
            ["explainers=[kernel_shap]", "explainers.kernel_shap.score=probabilty"],
            "expected score probability, log_probability or logit, got probabilty",
        ),
        (["methods=[{GAE:{output:prob}}]"], "expected output logit, probability or log_odds, got prob"),
    ],
)
def test_a_misspelt_choice_of_an_evaluation_is_refused(tmp_path, overrides, message):
    common = ("target=tiny", "tasks=[digits]", "explainers=[chance,oracle]", "evaluation.levels=3", "~figures", *QUIET)
    size = ("tasks.digits.data.size.test=2",)
    assert error(evaluate, *common, *size, *overrides, folder=tmp_path) == f"error: {message}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["module.loss.reduction=maen"], "expected reduction sum or mean, got maen"),
        (["explainer.score=logits"], "expected score log_probability or logit, got logits"),
    ],
)
def test_a_misspelt_choice_of_tve_is_refused(tmp_path, overrides, message):
    assert error(train, *TVE_RUN, *DIGITS, *overrides, folder=tmp_path) == f"error: {message}"


def test_a_misspelt_choice_of_what_to_tune_is_refused(tmp_path):
    command = ("experiment=linear_head", "target=tiny", *DIGITS, *QUIET, "module.tune=haed")
    assert error(train, *command, folder=tmp_path) == "error: expected tune head or all, got haed"


def test_a_misspelt_choice_of_labels_is_refused(tmp_path):
    command = (
        "experiment=self_explaining",
        "target=tiny",
        "grid.patch_size=16",
        "++grid.differs=true",
        *DIGITS,
        *QUIET,
    )
    command += ("projection@module.projection=simplex",)
    cfg = composed(*command, folder=tmp_path)
    teacher = exported(instantiate(cfg.target), instantiate(cfg.grid), tmp_path / "teacher", classes=10)
    wrong = (f"module.teacher={teacher}", "module.labels.classes=labels")
    message = error(train, *command, *wrong, folder=tmp_path / "run")
    assert message == "error: expected classes label, predicted or all, got labels"

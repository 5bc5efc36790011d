"""Sums of several explainability vectors (Equation 1), against loops over single numbers."""

import copy
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from toys import exported, three_models, validate, vector_module

from explainers.errors import InputError
from explainers.saved.weights import read_weights
from explainers.training.state_dicts import part
from explainers.vectors.model_files import exported_target
from explainers.vectors.self_explaining import SelfExplaining
from explainers.vectors.task_arithmetic import combine

RATIOS = [[1.0, 1.0], [1.0, -0.5]]


@pytest.fixture
def files(target, grid, tmp_path):
    """Two sources, one of the base model's own task, and a model of the target task."""
    models = three_models(target, grid, tmp_path / "first")
    other = exported(target, grid, tmp_path / "second", alpha=0.8, seed=5, classes=4, turn=1)
    return {
        "predicting": [models["predicting"], None],
        "explaining": [models["explaining"], other],
        "onto": models["onto"],
    }


@pytest.fixture
def build(target, grid, files):
    return partial(vector_module, target, grid, files, lambda_1=[0.7], lambda_2=[0.0, 0.4])


def summed(target, files, one, two, ratios):
    """θ_base + λ₁ (θ_onto − θ_base) + λ₂ Σ_m r_m τ_m, one number after the other."""

    base, onto = target.backbone.state_dict(), part(read_weights(files["onto"])[1], "backbone")
    predicting, explaining = (
        [base if path is None else part(read_weights(path)[1], "backbone") for path in files[role]]
        for role in ("predicting", "explaining")
    )
    moved = {}
    for name, weights in base.items():
        columns = zip(
            *(state[name].flatten().tolist() for state in (base, onto, *predicting, *explaining)), strict=True
        )
        values = []
        for b, t, p_1, p_2, e_1, e_2 in columns:
            values.append(b + one * (t - b) + two * (ratios[0] * (e_1 - p_1) + ratios[1] * (e_2 - p_2)))
        moved[name] = torch.tensor(values).view(weights.shape)
    return moved


def test_the_sum_is_that_of_every_single_number():
    vectors = [{"weight": torch.randn(3, 2), "bias": torch.randn(())} for _ in range(3)]
    found = combine(vectors, [1.0, 0.0, -2.0])
    for name in ("weight", "bias"):
        columns = zip(*(vector[name].flatten().tolist() for vector in vectors), strict=True)
        assert found[name].flatten().tolist() == pytest.approx([a - 2 * c for a, _, c in columns], abs=1e-6)
        assert found[name].shape == vectors[0][name].shape
    assert combine(vectors[:1], [1.0]) is vectors[0]
    with pytest.raises(InputError, match="of one architecture"):
        combine([vectors[0], {"weight": torch.ones(3, 2)}], [1.0, 1.0])


@pytest.mark.slow
def test_a_sum_is_swept_selected_exported_and_says_what_it_was_computed_from(build, target, files, tmp_path):
    module = build(ratios=RATIOS, select="iou", tolerance=1)
    trainer = validate(module)
    assert module.points == [(1, 0, 1, 1), (0.7, 0, 1, 1), (0.7, 0.4, 1, 1), (0.7, 0.4, 1, -0.5)]
    assert len({row["e_rmse"] for row in module.sweep}) == 4
    assert {f"val/{name}" for name in ("ratio_1", "ratio_2", "cosine_1")} <= trainer.callback_metrics.keys()
    assert "val/cosine_2" not in trainer.callback_metrics  # without a predicting model
    module.best = (0.7, 0.4, 1.0, -0.5)
    path = module.export(tmp_path)
    found, expected = exported_target(target, path).backbone.state_dict(), summed(target, files, 0.7, 0.4, RATIOS[1])
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    identity, of_vector = (read_weights(tmp_path / f"{name}.safetensors")[0] for name in ("model", "vector"))
    point = {"lambda_1": 0.7, "lambda_2": 0.4, "ratio_1": 1.0, "ratio_2": -0.5}
    assert point == {name: identity[name] for name in point}
    roles = ("base", "predicting_1", "explaining_1", "explaining_2", "onto")
    hashes = [identity[f"{role}_sha256"] for role in roles]
    assert hashes == [of_vector[role] for role in roles] and len(set(hashes)) == 5
    assert "predicting_2_sha256" not in identity and of_vector["ratio_2"] == -0.5
    alone = {name: value - 0.7 * load_file(files["onto"])[f"backbone.{name}"] for name, value in expected.items()}
    for name, value in load_file(tmp_path / "vector.safetensors").items():
        difference = alone[name] - 0.3 * target.backbone.state_dict()[name]
        torch.testing.assert_close(0.4 * value, difference, rtol=1e-4, atol=1e-5)


def test_one_source_in_a_list_is_that_source(build, files):
    single = {role: files[role][0] for role in ("predicting", "explaining")}
    one, listed = build(**single), build(**{role: [path] for role, path in single.items()})
    assert one.points == [(1, 0), (0.7, 0), (0.7, 0.4)]
    assert all(torch.equal(value, listed.taus[0][name]) for name, value in one.taus[0].items())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"predicting": [None]}, r"as many models in module\.predicting as in .*explaining .* got 1 and 2"),
        ({"ratios": [[1.0]]}, r"lists of 2 numbers, one for each source, .* got ratios=\[\[1\.0\]\]"),
        ({"ratios": []}, r"lists of 2 numbers, one"),
        ({"ratios": [[1, 2], [1, 2]]}, r"each of ratios once, got \(1, 2\), \(1, 2\)"),
    ],
)
def test_sources_and_ratios_that_do_not_fit_are_refused(build, settings, told):
    with pytest.raises(InputError, match=told):
        build(**settings)


def test_one_source_has_no_ratio_and_each_source_is_listed_once(build, files):
    path = files["explaining"][1]
    with pytest.raises(InputError, match=r"or None for a single one, got ratios=\[\[1\.0\]\]"):
        build(predicting=None, explaining=path, ratios=[[1.0]])
    with pytest.raises(InputError, match=r"expected each of module\.explaining once"):
        build(predicting=[None, None], explaining=[path, path])


def test_sources_read_patches_alike(build, target, grid, files, tmp_path):
    module = SelfExplaining(
        copy.deepcopy(target), grid, reading="difference", alpha=0.8, weights=files["predicting"][0]
    )
    path = str(module.export(tmp_path))
    with pytest.raises(InputError, match=rf"read patches alike .* got patch in .*first.* and difference in {path}"):
        build(predicting=[None, None], explaining=[files["explaining"][0], path])

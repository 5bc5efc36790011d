import math

import pytest
import torch
from conftest import timm_model

from explainers.vectors.task_arithmetic import cosine, keep_largest, subtract, transfer

STEP = "bn1.num_batches_tracked"


def state(seed):
    """Of a small ResNet: floating-point weights and statistics, and BatchNorm's counts, which are integers."""
    weights = timm_model("test_resnet", seed=seed).state_dict()
    for value in weights.values():
        if not value.is_floating_point():
            value.fill_(seed)
    return weights


def equal_bytes(first, second):
    return list(first) == list(second) and all(
        first[name].dtype == second[name].dtype and first[name].numpy().tobytes() == second[name].numpy().tobytes()
        for name in first
    )


def of_parameters(weights):
    """What a ResNet has as parameters."""
    names = dict(timm_model("test_resnet").named_parameters())
    return {name: value for name, value in weights.items() if name in names}


def flat(weights):
    return torch.cat([value.double().flatten() for value in weights.values()])


@pytest.fixture
def models():
    """A base model, one for the target task, and the source task's without and with explanations."""
    return [state(seed) for seed in range(4)]


def test_no_vector_leaves_the_target_bit_for_bit(models):
    base, target, predicting, explaining = models
    target["conv1.0.weight"].flatten()[0] = -0.0  # adding 0 would make it +0
    target["bn1.weight"][0] = math.nan
    assert equal_bytes(transfer(base, target, subtract(explaining, predicting), 1, 0), target)
    assert equal_bytes(transfer(base, target, subtract(explaining, predicting), lambda_2=0.0), target)


@pytest.mark.parametrize(("one", "two"), [(1, 0.3), (0.5, 1.7), (0.25, 0), (1, -0.5)])
def test_arithmetic_is_that_of_every_single_number(one, two):
    names = {"weight": (3, 2), "bias": (2,), "scale": ()}
    base, target, predicting, explaining = [
        {name: torch.randn(shape) for name, shape in names.items()} for _ in range(4)
    ]
    moved = transfer(base, target, subtract(explaining, predicting), one, two)
    assert list(moved) == list(names)
    for name in names:
        numbers = [state[name].flatten().tolist() for state in (moved, base, target, predicting, explaining)]
        for got, b, t, p, e in zip(*numbers, strict=True):
            assert got == pytest.approx(b + one * (t - b) + two * (e - p), abs=1e-5)


def test_counts_and_statistics_of_batches_are_the_targets_and_take_no_part(models):
    base, target, predicting, explaining = models
    difference = subtract(explaining, predicting)
    kept = {name: value for name, value in target.items() if name not in of_parameters(target)}
    assert {STEP, "bn1.running_mean", "bn1.running_var"} <= kept.keys()
    assert difference.keys() == of_parameters(target).keys()
    before = {name: value.clone() for name, value in difference.items()}
    for point in ((1, 0), (1, 1), (0.5, 0), (0.5, 2)):
        moved = transfer(base, target, difference, *point)
        assert moved.keys() == target.keys() and moved[STEP].dtype == torch.int64
        assert equal_bytes({name: moved[name] for name in kept}, kept) and moved is not target
    assert all(equal_bytes(weights, state(seed)) for seed, weights in enumerate(models))  # nothing given is changed
    assert equal_bytes(difference, before)


def test_a_share_of_the_entries_is_kept_also_where_floats_round_it_down():
    for tenths in range(1, 11):
        kept = keep_largest({"weight": torch.arange(1.0, 101)}, tenths / 10)["weight"]
        assert kept.nonzero()[:, 0].tolist() == [*range(100 - 10 * tenths, 100)]


def test_the_cosine_is_that_of_one_long_vector(models):
    base, target, predicting, explaining = models
    first, second = subtract(target, base), subtract(explaining, predicting)
    expected = torch.nn.functional.cosine_similarity(flat(first), flat(second), dim=0).item()
    assert abs(expected) < 0.9
    assert cosine(first, second) == pytest.approx(expected, abs=1e-12)
    assert cosine(second, first) == pytest.approx(expected, abs=1e-12)
    zero = {name: torch.zeros_like(value) for name, value in first.items()}
    assert math.isnan(cosine(first, zero)) and math.isnan(cosine(zero, zero))

import captum.metrics
import pytest
import references_faithfulness
import torch

from explainers.errors import InputError
from explainers.metrics.additivity import (
    Infidelity,
    SensitivityN,
    infidelity,
    sensitivity_n,
    sized_coalitions,
)

INDEX = torch.tensor([0, 5, 2**35])


@pytest.fixture
def keep():
    return sized_coalitions(INDEX, num_patches=16, sizes=[2, 5, 11], count=6)


def removed(keep):
    return [set((~mask).nonzero()[:, 0].tolist()) for mask in keep]


@pytest.mark.parametrize(("metric", "tolerance"), [("sensitivity_n", 1e-9), ("infidelity", 1e-7)])
def test_values_are_those_of_loops(keep, metric, tolerance):
    scores, drops = torch.randn(3, 16), torch.randn(3, 18)
    found = {"sensitivity_n": sensitivity_n, "infidelity": infidelity}[metric](scores, keep, drops)
    loops = getattr(references_faithfulness, metric)
    expected = [loops(scores[i].tolist(), removed(keep[i]), drops[i].tolist()) for i in range(3)]
    assert found.tolist() == pytest.approx(expected, abs=tolerance)


def test_infidelity_is_captums_in_units_of_the_squared_drops(keep):
    weight = torch.randn(16, 16)
    inputs, scores = torch.randn(3, 16), torch.randn(3, 16)

    def model(features):
        return ((features @ weight).tanh() @ weight[0]).sigmoid()

    def perturb(repeated):
        masks = keep.flatten(0, 1)
        return (~masks).float(), repeated * masks

    drops = model(inputs)[:, None] - model(inputs[:, None] * keep)
    expected = captum.metrics.infidelity(model, perturb, inputs, scores, n_perturb_samples=18, normalize=True)
    found = infidelity(scores, keep, drops)
    torch.testing.assert_close(found.float(), expected / drops.square().mean(1), rtol=1e-4, atol=1e-5)


def test_coalitions_of_an_image_have_the_sizes_asked_for_and_depend_on_nothing_else(keep):
    assert keep.shape == (3, 18, 16) and keep.dtype == torch.bool
    assert (~keep).sum(-1).tolist() == [[2] * 6 + [5] * 6 + [11] * 6] * 3
    assert torch.equal(sized_coalitions(INDEX[1:2], 16, [2, 5, 11], 6), keep[1:2])
    neighbours = sized_coalitions(torch.arange(4), 16, [8], 6)
    assert len(neighbours.flatten(0, 1).unique(dim=0)) == 24
    assert not torch.equal(sized_coalitions(INDEX, 16, [2, 5, 11], 6, seed=1), keep)


def test_a_linear_function_is_explained_by_its_terms_in_any_unit(keep):
    worth = torch.randn(3, 16).double()
    drops = ((~keep).double() @ worth[..., None])[..., 0]
    ones, zeros = torch.ones(3).double(), torch.zeros(3).double()
    torch.testing.assert_close(sensitivity_n(7 * worth + 3, keep, drops), ones)
    torch.testing.assert_close(sensitivity_n(-worth, keep, drops), -ones)
    torch.testing.assert_close(infidelity(7 * worth, keep, drops), zeros)
    torch.testing.assert_close(infidelity(-worth, keep, drops), zeros)
    assert (infidelity(7 * worth + 3, keep, drops) > 0.1).all()


@pytest.mark.parametrize("value", [0.0, 0.1, -3.3])
def test_equal_scores_have_no_sensitivity_and_explain_only_the_sizes(keep, value):
    scores, drops = torch.full((3, 16), value, dtype=torch.double), torch.rand(3, 18)
    assert (sensitivity_n(scores, keep, drops) == 0).all()
    if value == 0:
        assert infidelity(scores, keep, drops).tolist() == pytest.approx([1, 1, 1])
        return
    sizes = (~keep).sum(-1).double()
    cosine = torch.nn.functional.cosine_similarity(sizes, drops.double(), dim=1)
    torch.testing.assert_close(infidelity(scores, keep, drops), 1 - cosine.square())


def test_sizes_for_which_nothing_changes_are_left_out(keep):
    scores, drops = torch.randn(3, 16), torch.randn(3, 18)
    drops[:, 6:12] = 0.3
    rest = torch.cat([keep[:, :6], keep[:, 12:]], 1), torch.cat([drops[:, :6], drops[:, 12:]], 1)
    torch.testing.assert_close(sensitivity_n(scores, keep, drops), sensitivity_n(scores, *rest))
    assert sensitivity_n(scores, keep, torch.full((3, 18), 0.3)).isnan().all()
    assert infidelity(scores, keep, torch.zeros(3, 18)).isnan().all()


@pytest.mark.parametrize(
    ("sizes", "count", "message"),
    [
        ([3, 16], 3, "expected size from 1 to 15, got size=16"),
        ([3], 1, "expected count of at least 2, got count=1"),
    ],
)
def test_subsets_without_a_correlation_are_refused(sizes, count, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        sized_coalitions(INDEX, 16, sizes, count)


@pytest.mark.parametrize(("metric", "function"), [(SensitivityN, sensitivity_n), (Infidelity, infidelity)])
def test_the_metrics_are_means_over_images_for_which_they_are_defined(keep, metric, function):
    heatmaps, drops = torch.randn(3, 4, 4), torch.randn(3, 18)
    drops[1] = 0
    mean = metric()
    mean.update(heatmaps, keep, drops)
    expected = function(heatmaps.flatten(1), keep, drops)[[0, 2]].mean().item()
    assert mean.compute().item() == pytest.approx(expected, abs=1e-6)

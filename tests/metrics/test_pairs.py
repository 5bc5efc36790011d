import pytest
import references_pairs as slow
import torch
from scipy.stats import binomtest, ttest_1samp, ttest_rel

from explainers.metrics.pairs import holm, paired_differences


@pytest.fixture
def numbers():
    """Of 12 images and 4 explainers: images differ far more than explainers, and some have no number."""
    numbers = 10 * torch.randn(12, 1) + torch.tensor([0.0, 0.1, 1.0, 3.0]) + torch.randn(12, 4)
    numbers[2, 1] = numbers[7, 1] = numbers[7, 3] = torch.nan
    return numbers.double()


def test_pairs_are_those_of_loops_and_of_scipy(numbers):
    found = paired_differences(numbers)
    p = {}
    for i in range(4):
        for j in range(4):
            one, other = numbers[:, i].tolist(), numbers[:, j].tolist()
            mean, error, images = slow.difference(one, other)
            assert found.mean[i, j] == pytest.approx(mean) and found.error[i, j] == pytest.approx(error)
            assert found.images[i, j] == images
            if i == j:
                continue
            peer = ttest_rel(one, other, nan_policy="omit")
            assert found.p[i, j].item() == pytest.approx(peer.pvalue)
            low, high = peer.confidence_interval(0.95)
            assert found.half_width[i, j].item() == pytest.approx((high - low) / 2)
            p |= {(i, j): peer.pvalue} if i < j else {}
    corrected = dict(zip(p, slow.holm(list(p.values())), strict=True))
    for (i, j), value in corrected.items():
        assert found.corrected[i, j].item() == found.corrected[j, i].item() == pytest.approx(value)
        assert found.significant[i, j] == (value < 0.05)
    assert found.corrected.diagonal().isnan().all() and not found.significant.diagonal().any()


@pytest.mark.parametrize(
    "differences",
    [
        [0.5] * 5,  # a t-test alone would be certain
        [0.1 + 1e-9, 0.1, 0.1 - 1e-9, 0.1],  # equal but for rounding
        [1.0] * 12 + [-1.0],
        [1.0] * 3 + [0.0] * 97,
        [0.1] * 12 + [-9.0],  # most are positive, but the mean is negative
    ],
)
def test_few_different_differences_are_no_surer_than_their_signs(differences):
    column = torch.tensor(differences, dtype=torch.double)
    found = paired_differences(torch.stack([column, 0 * column], 1))
    signs = [difference > 0 for difference in differences if difference]
    of_signs = binomtest(sum(signs), len(signs)).pvalue
    of_mean = ttest_1samp(differences, 0).pvalue if column.std() > 1e-6 else 0
    assert found.p[0, 1].item() == found.p[1, 0].item() == pytest.approx(max(of_signs, of_mean))


def test_without_two_shared_images_there_is_no_difference():
    numbers = torch.tensor([[1.0, torch.nan, 2.0], [3.0, 4.0, 5.0], [torch.nan, 6.0, torch.nan]])
    found = paired_differences(numbers)
    assert found.images.tolist() == [[2, 1, 2], [1, 2, 1], [2, 1, 2]]
    for values in (found.mean, found.error, found.half_width, found.p, found.corrected):
        assert values[0, 1].isnan() and values[2, 1].isnan()
    assert found.mean[2, 0] == 1.5 and found.corrected[2, 0] == found.p[2, 0]  # the only pair
    assert paired_differences(torch.randn(5, 1).double().expand(5, 2)).p[0, 1] == 1  # equal explainers


@pytest.mark.parametrize("p", [[0.01, 0.04, 0.03, 0.005], []])
def test_holm_is_that_of_loops(p):
    assert holm(torch.tensor(p).double()).tolist() == pytest.approx(slow.holm(p))

"""KernelSHAP with a prior: what the regression chooses, and when it helps."""

import pytest
import references
import torch
from toys import Marked

from explainers.posthoc import build
from explainers.shapley.coalition_draws import shapley_coalitions
from explainers.shapley.kernel_shap import STRENGTHS, KernelSHAP, ShapleyLabels, fit_shapley, fit_with_prior


def noisy_game(count, noise, paired=True, images=6):
    """Coalitions of 16 patches, v of them with noise, and the attributions (B, N) without it."""
    random = torch.Generator().manual_seed(0)
    keep = shapley_coalitions(torch.arange(images), 16, count, seed=0, paired=paired)
    phi = torch.randn(images, 16, generator=random)
    values = (keep.float() @ phi[..., None]) + noise * torch.randn(images, count, 1, generator=random)
    return (keep, values, torch.zeros(images, 1), phi.sum(1, keepdim=True)), phi


@pytest.mark.parametrize(("paired", "count"), [(True, 10), (False, 60)])
def test_the_fit_is_that_of_a_loop_which_leaves_out_one_observation_after_the_other(count, paired):
    (keep, values, null, grand), phi = noisy_game(count, noise=0.7, paired=paired, images=3)
    prior = phi + torch.randn(phi.shape, generator=torch.Generator().manual_seed(3))
    found = fit_with_prior(keep, values, null, grand, prior[..., None], paired)[..., 0]
    for image in range(3):
        even = grand[image].item() / 16
        rows = [[float(z) - row.sum().item() / 16 for z in row] for row in keep[image]]
        gains = [v - row.sum().item() * even for v, row in zip(values[image, :, 0].tolist(), keep[image], strict=True)]
        if paired:
            gains = [(a - b) / 2 for a, b in zip(gains[::2], gains[1::2], strict=True)]
            rows = rows[::2]
        largest = torch.linalg.matrix_norm(torch.tensor(rows).double(), 2).item() ** 2
        strengths = (STRENGTHS * largest).tolist()
        expected = references.regression_with_prior(rows, gains, prior[image].tolist(), strengths) + even
        torch.testing.assert_close(found[image], torch.tensor(expected).float(), rtol=1e-3, atol=1e-4)


def error(found, phi):
    return (found[..., 0] - phi).square().mean().sqrt().item()


def test_a_good_prior_helps_where_coalitions_are_few_and_a_bad_one_does_no_harm():
    for count in (20, 60):
        rows, phi = noisy_game(count, noise=1.0, images=40)
        plain = error(fit_shapley(*rows), phi)
        good = phi + 0.5 * torch.randn(phi.shape, generator=torch.Generator().manual_seed(1))
        bad = torch.randn(phi.shape, generator=torch.Generator().manual_seed(2))
        assert error(fit_with_prior(*rows, good[..., None]), phi) < 0.75 * plain
        assert error(fit_with_prior(*rows, bad[..., None]), phi) < 1.1 * plain
        assert error(fit_with_prior(*rows, -good[..., None]), phi) < 1.1 * plain


@pytest.mark.parametrize("prior", [torch.zeros(6, 16, 1), torch.randn(6, 16, 1)])
def test_without_noise_the_prior_is_forgotten_and_attributions_add_up(prior):
    rows, phi = noisy_game(80, noise=0.0)
    found = fit_with_prior(*rows, prior)
    torch.testing.assert_close(found[..., 0], phi, rtol=0, atol=1e-3)
    torch.testing.assert_close(fit_with_prior(*noisy_game(80, 1.0)[0], prior).sum(1), rows[3], rtol=0, atol=1e-4)


def test_labels_start_from_the_heatmaps_of_the_method(target, grid):
    batch = Marked(4)[torch.arange(4)]
    labels = ShapleyLabels(target, grid, budget=20, prior="DecompX-PLUS")
    found, rows = labels(batch), labels.values(batch)
    values, null, grand = (
        rows[name].take_along_dim(batch["label"].view(-1, *[1] * (rows[name].dim() - 1)), -1)
        for name in ("values", "null", "grand")
    )
    prior = build("DecompX-PLUS", target, grid)(batch["image"], batch["label"]).flatten(1)[..., None]
    expected = fit_with_prior(rows["keep"], values, null, grand, prior)[..., 0]
    torch.testing.assert_close(found["shapley"], expected)
    assert labels.key() == ShapleyLabels(target, grid, budget=20).key() | {"prior": "DecompX-PLUS"}
    heatmaps = KernelSHAP(target, grid, budget=20, seed=0, prior="DecompX-PLUS")(batch["image"], batch["label"])
    assert heatmaps.shape == (4, 4, 4)
    torch.testing.assert_close(heatmaps.sum((1, 2)), (grand - null)[:, 0], rtol=0, atol=1e-4)

"""LIME, against its normal equations and against captum."""

import captum.attr
import references_masks as slow
import torch
from captum._utils.models.linear_model import SkLearnLasso
from test_pixel_gradients import CLASSES, close

from explainers.posthoc.lime import LIME, fit_linear


@torch.no_grad()
def test_lime_is_the_reference(target, grid, images):
    explainer = LIME(target, grid, samples=50, alpha=0.3, kernel_width=0.5, seed=4)
    heatmaps = explainer(images[:3], CLASSES[:3])
    keeps = read_samples(explainer)
    for i, image in enumerate(target.normalise(images[:3])):
        expected = slow.lime(target.score_images, image, CLASSES[i], keeps.tolist(), 0.3, 0.5)
        close(heatmaps[i].flatten().double(), expected)


def read_samples(explainer):
    """The samples that an explainer takes, read off the images that its target sees."""
    seen, target = [], explainer.target
    original = target.embed
    target.embed = lambda normalised: seen.append(normalised) or original(normalised)
    white = torch.full((1, 3, 32, 32), 255, dtype=torch.uint8)
    explainer(white, torch.tensor([0]))
    del target.embed
    return torch.cat(seen)[:, 0, ::8, ::8].flatten(1) != 0


@torch.no_grad()
def test_lime_with_the_lasso_is_captums_on_the_same_samples(target, grid, images):
    alpha = 0.005  # some coefficients are 0
    explainer = LIME(target, grid, samples=80, regression="lasso", alpha=alpha)
    found, keeps = explainer(images[:2], CLASSES[:2]), read_samples(explainer)
    patches = torch.arange(16).view(1, 1, 4, 4).repeat_interleave(8, -1).repeat_interleave(8, -2)

    def draw(*_, **settings):
        yield from (keep[None].long() for keep in keeps)

    for i, normalised in enumerate(target.normalise(images[:2])):
        method = captum.attr.Lime(target.score_images, interpretable_model=SkLearnLasso(alpha=alpha), perturb_func=draw)
        settings = {"feature_mask": patches, "n_samples": 80, "return_input_shape": False}
        theirs = method.attribute(normalised[None], 0, int(CLASSES[i]), **settings)
        torch.testing.assert_close(found[i].flatten(), theirs[0], rtol=0, atol=1e-4)


def test_a_linear_model_is_recovered_and_a_lasso_leaves_out_small_coefficients():
    keep = torch.rand(300, 6) < 0.5
    slopes = torch.tensor([[0.5, 0.0, -0.3, 0.01, 0.0, 0.2], [0.0, 0.1, 0.0, 0.0, 0.9, -0.01]])
    scores, weights = 0.3 + slopes @ keep.float().mT, torch.rand(2, 300) + 0.1
    torch.testing.assert_close(fit_linear(keep, scores, weights, alpha=1e-6), slopes, rtol=0, atol=1e-5)
    found = fit_linear(keep, scores, weights, alpha=0.01, lasso=True)
    assert torch.equal(found != 0, slopes.abs() > 0.04)


def test_samples_that_do_not_determine_the_coefficients_are_no_error(target, grid, images):
    for samples in (1, 5):
        assert LIME(target, grid, samples=samples)(images, CLASSES).isfinite().all()

"""The three scores of logits, against formulas by hand, and what every method and metric makes of them."""

from itertools import product

import pytest
import torch
from conftest import timm_model
from torch import nn

from explainers import posthoc
from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.models.functionals import choose_temperature, head_functionals
from explainers.models.scores import log_odds, log_probabilities, scale_logits
from explainers.posthoc.white_box import class_functionals
from explainers.tve.tve import transfer

SCORES = ("softmax", "sigmoid", "value")
LOGITS = torch.tensor([[2.0, -1.0, 0.5], [30.0, 1.0, -40.0]], dtype=torch.double)


def by_hand(logits, score):
    if score == "softmax":
        return logits.exp() / logits.exp().sum(-1, keepdim=True)
    return 1 / (1 + (-logits).exp()) if score == "sigmoid" else logits


def scored(score, num_classes=3):
    return TargetModel(timm_model(num_classes=num_classes), score=score).eval()


@pytest.mark.parametrize("score", SCORES)
def test_scores_are_those_of_the_formula(score):
    torch.testing.assert_close(scale_logits(LOGITS, score), by_hand(LOGITS, score))
    assert scored(score).score == score


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_logarithms_and_log_odds_are_those_of_the_probabilities(score):
    p, classes = by_hand(LOGITS[:1], score), torch.tensor([1])
    torch.testing.assert_close(log_probabilities(LOGITS[:1], score), p.log())
    torch.testing.assert_close(log_odds(LOGITS[:1], classes, score), (p[:, 1] / (1 - p[:, 1])).log())
    assert log_odds(LOGITS, torch.tensor([0, 2]), score).isfinite().all()  # also where p is 0 or 1 in float64
    assert log_probabilities(LOGITS, "value").isnan().all()


OUTPUTS = ("logit", "probability", "log_odds")


@pytest.mark.parametrize(("score", "output"), [*product(SCORES, OUTPUTS)][:-1])  # a value has no odds
def test_functionals_are_the_gradients_of_the_score(score, output):
    target, classes = scored(score), torch.tensor([2, 0])
    embeddings = torch.randn(2, 24)
    found = class_functionals(target, embeddings, classes, output)
    for i, k in enumerate(classes.tolist()):
        e = embeddings[i].double().requires_grad_()
        z = target.head.double()(e)
        target.head.float()
        p = by_hand(z, score)[k]
        wanted = {"logit": z[k], "probability": p, "log_odds": (p / (1 - p)).log()}[output]
        expected = torch.autograd.grad(wanted, e)[0].float()
        torch.testing.assert_close(found[i], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("score", ["sigmoid", "value"])
def test_classes_that_do_not_compete_are_explained_by_their_rows(score):
    target, classes = scored(score), torch.tensor([2, 0])
    found = head_functionals(target.head, torch.randn(2, 24), choose_temperature(score, 2.0), classes)
    torch.testing.assert_close(found, target.head.weight[classes].detach())


def test_tve_compares_the_probabilities_of_a_sigmoid():
    meta = torch.randn(2, 4, 2, 3)
    g, h = (by_hand(meta[:, :, i], "sigmoid").log() for i in (0, 1))
    torch.testing.assert_close(transfer(nn.Identity(), meta, outputs="sigmoid"), (g - h).mT)


@pytest.mark.situation(14)
def test_masks_of_a_value_measure_its_drop(images, grid):
    model = timm_model(num_classes=1)
    with torch.no_grad():
        model.head.bias.fill_(37.5)
    target, x = TargetModel(model, score="value").eval(), images[:1]
    heatmap = posthoc.build("Occlusion", target, grid)(x, torch.tensor([0]))[0]
    normalised, expected = target.normalise(x), torch.zeros(grid.shape)
    with torch.no_grad():
        for i in range(grid.shape[0]):
            for j in range(grid.shape[1]):
                hidden = normalised.clone()
                hidden[..., i * 8 : (i + 1) * 8, j * 8 : (j + 1) * 8] = 0
                expected[i, j] = (model(normalised) - model(hidden))[0, 0]
    torch.testing.assert_close(heatmap, expected, rtol=1e-3, atol=1e-4)
    rise = [posthoc.build("RISE", target, grid, {"masks": 40})(x, torch.tensor([0]))]
    with torch.no_grad():
        target.head.bias.zero_()
    rise.append(posthoc.build("RISE", target, grid, {"masks": 40})(x, torch.tensor([0])))
    assert rise[0].std() > 0
    torch.testing.assert_close(*rise, rtol=1e-2, atol=1e-3)  # a constant of all values shows no density of masks


@pytest.mark.situation(13)
def test_masks_of_a_label_do_not_see_another_label(images, grid):
    model = timm_model(num_classes=3)
    with torch.no_grad():
        model.head.bias.copy_(torch.tensor([1.0, 60.0, -60.0]))
    target = TargetModel(model, score="sigmoid").eval()
    alone = TargetModel(timm_model(num_classes=3), nn.Linear(24, 1), "sigmoid").eval()
    with torch.no_grad():
        alone.head.weight.copy_(torch.stack([-model.head.weight[0], model.head.weight[0]]) / 2)
        alone.head.bias.copy_(torch.tensor([-0.5, 0.5]))
    for method in ("Occlusion", "LIME"):
        of_label = posthoc.build(method, target, grid)(images[:1], torch.tensor([0]))
        of_alone = posthoc.build(method, alone, grid)(images[:1], torch.tensor([1]))
        assert of_label.std() > 0
        torch.testing.assert_close(of_label, of_alone, rtol=1e-3, atol=1e-6)


def test_what_needs_probabilities_is_refused_for_a_value(grid):
    target = scored("value")
    with pytest.raises(InputError, match="^output=log_odds needs probabilities, but score=value of vit_tiny"):
        posthoc.build("GAE", target, grid, {"output": "log_odds"})
    with pytest.raises(InputError, match="^expected score softmax, sigmoid or value, got logit$"):
        scored("logit")

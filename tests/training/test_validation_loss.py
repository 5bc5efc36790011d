"""The loss of a validation: that of all images, however they are divided into batches and processes."""

from functools import partial

import pytest
import torch
from lightning import Trainer
from torch.utils.data import DataLoader
from toys import LIGHT, SILENT, VECTORS, training

from explainers.anyhead import AnyHead, CoalitionTeacher, PropagationTeacher
from explainers.metrics.means import Ratios
from explainers.shapley import ShapleyLabels
from explainers.tve import TVE
from explainers.vectors.fixed_head import fix_own_head
from explainers.vectors.self_distillation import EmbeddingError, SelfDistillation, relative_error
from explainers.vectors.self_explaining import HeadBuilder, SelfExplaining, SelfExplainingTraining


def self_explaining(target, grid, training, *given):
    explainer = SelfExplaining(target, grid, reading="difference")
    module = training(explainer, HeadBuilder(), *given)
    explainer.take_head(fix_own_head(target))
    with torch.no_grad():
        for weight in explainer.target.backbone.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    return module


COALITIONS, LABELS = partial(CoalitionTeacher, pairs=2), partial(ShapleyLabels, budget=8)
MODULES = {
    "TVE": lambda target, grid: training(TVE(target, grid, partial(LIGHT, hops=[1]))),
    "AnyHead, coalitions": lambda target, grid: training(AnyHead(target, grid, VECTORS), COALITIONS),
    "AnyHead, propagation": lambda target, grid: training(AnyHead(target, grid, VECTORS), PropagationTeacher),
    "self-distillation": lambda target, grid: self_explaining(target, grid, SelfDistillation, COALITIONS),
    "labels": lambda target, grid: self_explaining(target, grid, SelfExplainingTraining, LABELS, "base"),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_loss_does_not_depend_on_the_size_of_the_batches(name, target, grid, images):
    module = MODULES[name](target, grid)
    samples = [{"image": image, "label": 0, "index": index} for index, image in enumerate(images)]
    trainer = Trainer(accelerator="cpu", **SILENT)
    losses = []
    for size in (5, 4, 2):  # the last batch of 4 and of 2 has one image
        trainer.validate(module, DataLoader(samples, batch_size=size), verbose=False)
        losses.append(trainer.callback_metrics["val/loss"].item())
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4) and losses[0] > 0


def test_sums_of_two_processes_are_added():
    embeddings, wanted = torch.randn(2, 5, 3)
    whole, *parts = (EmbeddingError(width=3) for _ in range(3))
    whole.update(embeddings, wanted)
    for part, chosen in zip(parts, (slice(0, 1), slice(1, 5)), strict=True):
        part.update(embeddings[chosen], wanted[chosen])
    parts[0].merge_state(parts[1])
    assert parts[0].compute().item() == pytest.approx(whole.compute().item())
    assert whole.compute().item() == pytest.approx(relative_error(embeddings, wanted).item())
    ratios = Ratios(2), Ratios(2)
    ratios[0].update(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 2.0]))
    ratios[1].update(torch.tensor([5.0, 0.0]), torch.tensor([2.0, 2.0]))
    ratios[0].merge_state(ratios[1])
    assert ratios[0].compute().item() == 1.5

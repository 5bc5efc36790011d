"""Dropout and stochastic depth: drawn by step, so that a resumed run draws what an uninterrupted one does."""

from functools import partial

import pytest
import torch
from lightning import Trainer
from torch.utils.data import DataLoader
from toys import SILENT, equal, state

from explainers.anyhead import CoalitionTeacher, PropagationTeacher
from explainers.shapley import KernelSHAP
from explainers.shapley.coalition_values import CoalitionValues
from explainers.training import TrainingModule
from explainers.training.classifier import Classifier
from explainers.tve.tve import TVELoss

SGD = partial(torch.optim.SGD, lr=0.05)
trainer_of = partial(Trainer, accelerator="cpu", log_every_n_steps=1, **SILENT)


def fit(module, images, epochs, resume=None):
    samples = [{"image": image, "label": i % 2, "index": i} for i, image in enumerate(images)]
    trainer = trainer_of(max_epochs=epochs)
    trainer.fit(module, DataLoader(samples, batch_size=2), ckpt_path=resume)
    return trainer


@pytest.fixture
def classifier(make_target):
    def build(**rates):
        target = make_target(**rates)
        torch.manual_seed(3)
        return Classifier(target, 2, SGD, tune="all")

    return build


def test_a_resumed_run_draws_what_an_uninterrupted_one_does(classifier, images, tmp_path):
    rates = {"drop_path_rate": 0.5, "proj_drop_rate": 0.3, "pos_drop_rate": 0.2}
    straight, halfway, resumed, without = (classifier(**given) for given in (rates, rates, rates, {}))
    fit(straight, images, 4)
    fit(halfway, images, 2).save_checkpoint(tmp_path / "half.ckpt")
    torch.manual_seed(11)  # another process
    fit(resumed, images, 4, resume=tmp_path / "half.ckpt")
    assert equal(state(resumed), state(straight))
    fit(without, images, 4)
    assert not equal(state(without), state(straight))


class Masks(TrainingModule):
    """Notes what dropout would draw in every step."""

    def __init__(self, seed=0):
        super().__init__(SGD, None, seed=seed)
        self.weight, self.drawn = torch.nn.Parameter(torch.zeros(())), []

    def training_step(self, batch, batch_idx):
        self.drawn.append(torch.rand(8))
        return self.weight * 1


def drawn(images, epochs=2, rank=0, **settings):
    module, trainer = Masks(**settings), trainer_of(max_epochs=epochs)
    trainer.strategy.global_rank = rank
    trainer.fit(module, DataLoader(images, batch_size=2))
    return torch.stack(module.drawn)


def test_every_step_epoch_process_and_seed_has_draws_of_its_own(images):
    runs = [drawn(images), drawn(images, rank=1), drawn(images, seed=1)]
    assert len(torch.cat(runs).unique(dim=0)) == 3 * 2 * 3  # runs, epochs, and batches of 5 images
    assert torch.equal(drawn(images), runs[0])


@pytest.mark.parametrize("build", [CoalitionTeacher, CoalitionValues, KernelSHAP, TVELoss, PropagationTeacher])
def test_what_measures_a_model_in_training_mode_measures_it_without_dropout(build, target, grid):
    settings = {"count": 2} if build is CoalitionValues else {}
    assert not any(module.training for module in build(target.train(), grid, **settings).target.modules())

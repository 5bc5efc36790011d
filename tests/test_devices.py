"""Nothing mixes tensors of the CPU with those of a GPU; found on any machine, by a device that refuses to mix."""

from functools import partial
from typing import get_args

import pytest
import torch
from devices import DEVICE, Mixed, on_device, refusing_to_mix
from lightning import Trainer
from test_contract import self_explaining
from toys import ADAM, LIGHT, SILENT, VECTORS, marked_splits, training

from callbacks.heatmaps import Heatmaps
from datamodules.cached import Cached
from datamodules.digits import Digits
from datamodules.images import Images
from explainers import posthoc
from explainers.anyhead import AnyHead, PropagationTeacher
from explainers.anyhead.functionals import Functional
from explainers.evaluation import Evaluation, EvaluationModule
from explainers.evaluation.probes import ProbeName
from explainers.metrics.agreement import Agreement
from explainers.metrics.curves import CURVES
from explainers.metrics.localization import Localized
from explainers.report.pictures import Pictures
from explainers.shapley import LightShapleyNetwork, Shapley, ShapleyLoss
from explainers.training import Classifier
from explainers.tve import TVE
from explainers.vectors.projections import prototypes_of
from explainers.vectors.self_explaining import HeadBuilder, SelfExplaining, SelfExplainingTraining

SHAPLEY = partial(LightShapleyNetwork, blocks=[0, 1], width=12, depth=1)


def test_the_device_refuses_to_mix_and_computes():
    with refusing_to_mix():
        there, here = torch.arange(3.0, device=DEVICE), torch.arange(3.0)
        for mix in (lambda: there + here, lambda: here[there.long()], lambda: torch.where(there > 0, here, there)):
            with pytest.raises(Mixed):
                mix()
        assert (there + here[1]).device == DEVICE and (there + here[1]).tolist() == [1, 2, 3]


@pytest.mark.slow
def test_every_measurement_is_made_on_the_device(make_target, grid, tmp_path):
    target = make_target(num_classes=10)
    data = Images(test=lambda: Digits("test", size=2, image_size=32), batch_size=2, num_workers=0)
    explainers = {"chance": posthoc.Chance(None, grid), "self": self_explaining(target, grid, 10)}
    every = {"probes": get_args(ProbeName), "localization": get_args(Localized), "agreement": get_args(Agreement)}

    def measure(callbacks, device):
        settings = {"removals": ["black"], "levels": 3, "reference": "self"} | every
        evaluation = EvaluationModule(target, explainers, Evaluation(grid, curves=list(CURVES), **settings))
        trainer = Trainer(inference_mode=False, callbacks=callbacks, **SILENT, **device)
        trainer.test(evaluation, data, verbose=False)
        return evaluation.results

    expected = measure([], {"accelerator": "cpu"})
    with refusing_to_mix():
        found = measure([Pictures(str(tmp_path), "digit", images=2)], on_device())
    for name, row in expected.items():
        for number in row.keys() - {"images_per_second"}:
            assert found[name][number] == pytest.approx(row[number], rel=1e-4, abs=1e-6), number


def learned(kind, network, loss=None, min_crop=None, **settings):
    return lambda target, grid, optimizer: training(
        kind(target, grid, network, **settings), loss, optimizer, min_crop=min_crop
    )


TRAINED = {
    "TVE": learned(TVE, LIGHT, hops=(1, 2), min_crop=0.5),
    "TVE, cached": learned(TVE, LIGHT),
    "coalitions": learned(AnyHead, VECTORS),
    "propagation": learned(AnyHead, VECTORS, partial(PropagationTeacher, functionals=get_args(Functional))),
    "Shapley": learned(Shapley, SHAPLEY, partial(ShapleyLoss, coalitions=4)),
    "classifier": partial(Classifier, num_classes=3, tune="all"),
    "self-explaining": lambda target, grid, optimizer: SelfExplainingTraining(
        SelfExplaining(target, grid), HeadBuilder(prototypes_of), alpha=1, optimizer=optimizer
    ),
}
DRAWN = ("TVE", "coalitions", "Shapley", "self-explaining")
"""One of each explainer."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINED)
def test_a_training_computes_on_the_device_what_it_does_on_the_cpu(make_target, grid, tmp_path, kind):
    def train(device):
        target, data = make_target(num_classes=3), Images(**marked_splits()[1])
        torch.manual_seed(0)
        trained = {"target": target, "optimizer": ADAM} | ({} if kind == "classifier" else {"grid": grid})
        callbacks = [Heatmaps(tmp_path, images=1)] if "strategy" in device and kind in DRAWN else []
        settings = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 1, "log_every_n_steps": 1}
        trainer = Trainer(callbacks=callbacks, **settings, **SILENT, **device)
        module = TRAINED[kind](**trained)
        trainer.fit(module, Cached(data, str(tmp_path / str(len(device)))) if "cached" in kind else data)
        return {name: value.item() for name, value in trainer.callback_metrics.items()}

    expected = train({"accelerator": "cpu"})
    with refusing_to_mix():
        assert train(on_device()) == pytest.approx(expected, rel=1e-3)

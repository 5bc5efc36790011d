"""A training whose loss, gradients or weights are no longer finite ends in one line, and leaves finite files."""

import json
import os
from functools import partial

import pytest
import torch
from commands import DIGITS, TVE_RUN, train
from forks import Forks
from lightning import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader
from toys import SILENT, fit

from callbacks.last_checkpoint import LastCheckpoint
from explainers.errors import InputError
from explainers.metrics.means import Mean, Ratios
from explainers.running.record import write_metrics
from explainers.training import TrainingModule

NAN, INF = torch.nan, torch.inf


class Poisoned(TrainingModule):
    """A weight that learns to be 0; in a step (from 1), its loss or gradient is poisoned."""

    def __init__(self, step=0, loss=0.0, gradient=1.0, val=0.0, rank=None, lr=0.1):
        super().__init__(partial(torch.optim.SGD, lr=lr), None)
        self.weight = nn.Parameter(torch.ones(2))
        self.weight.register_hook(lambda each: each * gradient if self.poisons() else each)
        self.step, self.loss, self.val, self.rank = step, loss, val, rank
        self.val_loss = Ratios()

    def poisons(self):
        return self.global_step + 1 == self.step and self.rank in (None, self.global_rank)

    def training_step(self, batch, batch_idx):
        return self.weight.square().sum() + (self.loss if self.poisons() else 0.0)

    def validation_step(self, batch, batch_idx):
        self.val_loss.update(torch.tensor(self.val if batch_idx == 1 else 1.0), 1)
        self.log("val/loss", self.val_loss)


IMAGES = torch.zeros(12, 3, 4, 4, dtype=torch.uint8)  # 3 steps an epoch


@pytest.mark.parametrize("poison", [{"loss": NAN}, {"loss": INF}, {"gradient": NAN}, {"gradient": INF}], ids=str)
def test_a_training_stops_before_the_step_whose_loss_or_gradients_are_not_finite(poison):
    module = Poisoned(step=2, **poison)
    with pytest.raises(InputError) as raised:
        fit(module, IMAGES, epochs=1)
    line = str(raised.value)
    assert line.startswith("expected a finite loss and finite gradients, got a loss of ") and "in step 2 (" in line
    lower = "(learning rate 0.1): lower lr=, or set gradient_clip_val=1"
    assert line.endswith(f"{lower}; no checkpoint is written yet")
    assert torch.allclose(module.weight, torch.tensor(0.8))  # of the first step


def test_a_loss_that_is_not_finite_in_the_first_of_several_batches_of_a_step_stops_the_training():
    module = Poisoned(step=1, loss=NAN)
    module.poisons = lambda: module.trainer.fit_loop.epoch_loop.batch_idx == 0
    with pytest.raises(InputError, match="in step 1 "):
        fit(module, IMAGES, epochs=1, accumulate_grad_batches=2)


@pytest.mark.parametrize(("poison", "stops"), [({"gradient": INF}, False), ({"loss": NAN}, True)])
def test_a_scaler_of_16_bits_skips_a_step_of_infinite_gradients_and_no_loss_that_is_not_finite(poison, stops):
    module = Poisoned(step=2, **poison)
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    if stops:
        with pytest.raises(InputError, match="or set precision=32-true"):
            fit(module, IMAGES, epochs=1, plugins=[precision])
    else:
        fit(module, IMAGES, epochs=1, plugins=[precision])
        assert module.weight.isfinite().all() and precision.scaler.get_scale() < 4


def test_one_batch_that_is_not_finite_stops_a_training_after_its_validation():
    with pytest.raises(InputError, match=r"expected a finite val/loss, got nan after step 3 \(learning rate 0.1\)"):
        fit(Poisoned(val=NAN), IMAGES, epochs=2, validate=True, num_sanity_val_steps=0)
    for metric in (Mean(), Ratios()):
        for number in (1.0, NAN, 3.0):
            metric.update(torch.tensor(number), *([1] if type(metric) is Ratios else []))
        assert metric.compute().isnan()


def test_the_last_checkpoint_is_finite_and_named(tmp_path):
    path = tmp_path / "last.ckpt"

    def fit_and_save(module, **options):
        settings = SILENT | {"enable_checkpointing": True, "callbacks": [LastCheckpoint(str(tmp_path))]}
        samples = [{"image": image} for image in IMAGES]
        Trainer(accelerator="cpu", **settings, **options).fit(module, DataLoader(samples, batch_size=4))

    with pytest.raises(InputError, match=r"^expected finite weights, got NaN or infinity in weight after step 1 \("):
        fit_and_save(Poisoned(lr=INF), max_epochs=1, limit_train_batches=1)
    assert not path.exists()
    with pytest.raises(InputError, match=f"in step 4 .*; ckpt_path={path} is the last finite checkpoint$"):
        fit_and_save(Poisoned(step=4, loss=NAN), max_epochs=2)
    saved = torch.load(path, weights_only=True)
    assert saved["global_step"] == 3
    saved["state_dict"]["weight"][0] = NAN
    torch.save(saved, path)
    with pytest.raises(InputError, match="^the checkpoint: expected finite weights, got NaN or infinity in weight, "):
        fit(Poisoned(), IMAGES, epochs=3, resume=path)


def fail_as_one_of_two(folder):
    try:
        fit(Poisoned(step=2, loss=NAN, rank=1), IMAGES, epochs=1, strategy="ddp", devices=2)
    except InputError as error:
        (folder / os.environ["RANK"]).write_text(str(error))


def test_all_processes_stop_when_the_loss_of_one_is_not_finite(tmp_path):
    assert Forks(partial(fail_as_one_of_two, tmp_path), ["--nproc_per_node=2"]).wait() == 0
    lines = {path.read_text() for path in tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) == 2 and len(lines) == 1 and "in step 2 " in lines.pop()


def test_a_command_that_diverges_ends_in_one_line_and_exports_nothing(tmp_path):
    with pytest.raises(SystemExit, match="^error: expected a finite .* lower module.optimizer.lr") as ending:
        train(*TVE_RUN, *DIGITS, "module.optimizer.lr=1e30", folder=tmp_path)
    assert "\n" not in ending.value.code
    assert not list(tmp_path.rglob("*.safetensors")) and not list(tmp_path.rglob("*.ckpt"))
    assert not (tmp_path / "metrics.json").exists()


def test_metrics_are_json_and_an_objective_that_is_no_number_is_an_error(tmp_path):
    path, metrics = tmp_path / "metrics.json", {"val/loss": 0.5, "val/rank_correlation": NAN}
    write_metrics(path, metrics, "val/loss")
    assert json.loads(path.read_text()) == {"val/loss": 0.5}
    with pytest.raises(InputError, match="^objective=val/rank_correlation: expected a finite number, got nan: choose "):
        write_metrics(path, metrics, "val/rank_correlation")

"""What every trained module shares, on a small one of them: frozen parts, checkpoints, crops and resuming."""

import copy

import pytest
import torch
from refusals import check_refused
from torch import nn
from toys import ADAM, batch_of, equal, fit, state

from explainers.saved.identity import weights_hash
from explainers.training import TrainingModule


class Student(TrainingModule):
    """Learns what a frozen teacher with dropout says of images."""

    def __init__(self, teacher, width=5, **settings):
        super().__init__(settings.pop("optimizer", ADAM), None, **settings, frozen=("teacher",))
        self.teacher = teacher.requires_grad_(False).eval()
        self.student = nn.Linear(3 * 32 * 32, width)
        self.seen = []

    def training_step(self, batch, batch_idx):
        images = self.augment_images(batch)["image"]
        self.seen.append(images)
        taught = self.teacher(images)
        return (self.student(images.flatten(1) / 255)[:, : taught.shape[1]] - taught).square().mean()


@pytest.fixture
def build(make_target):
    def build(seed=0, **settings):
        torch.manual_seed(3)
        return Student(make_target(seed=seed, drop_path_rate=0.5), **settings)

    return build


def test_a_frozen_part_stays_in_eval_mode_whatever_mode_the_module_is_in(build):
    student = build()
    for mode in (True, False, True):
        assert student.train(mode) is student
        assert student.student.training == mode
        assert not any(module.training for module in student.teacher.modules())


def test_only_what_requires_gradients_is_trained(build, images):
    student = build()
    before = copy.deepcopy(state(student.teacher)), copy.deepcopy(state(student.student))
    trainer = fit(student, images, epochs=1)
    (group,) = trainer.optimizers[0].param_groups
    assert {id(weight) for weight in group["params"]} == {id(weight) for weight in student.student.parameters()}
    assert equal(state(student.teacher), before[0]) and not equal(state(student.student), before[1])


@pytest.mark.parametrize("min_crop", [None, 0.3])
def test_crops_are_drawn_anew_every_epoch_and_only_where_they_are_wanted(build, images, min_crop):
    student = build(min_crop=min_crop)
    fit(student, images[:4], epochs=2)
    first, second = (seen.sort(0).values for seen in student.seen)
    assert torch.equal(first, second) == torch.equal(first, images[:4].sort(0).values) == (min_crop is None)


def cached(images):
    return batch_of(images) | {"label": torch.zeros(5), "meta": torch.zeros(5)}


def test_a_checkpoint_holds_the_identity_of_the_frozen_part_in_its_place(build, images, tmp_path):
    student = build()
    fit(student, images, epochs=1).save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["state_dict"].keys() == {"student.weight", "student.bias"}
    assert saved["identity"] == {"teacher_sha256": weights_hash(student.teacher)}


def resume(build, images, tmp_path, **settings):
    fit(build(), images, epochs=1).save_checkpoint(tmp_path / "last.ckpt")
    fit(build(**settings), images, epochs=2, resume=tmp_path / "last.ckpt")


REFUSED = [
    ("optimizer", lambda build, images: fit(build(optimizer=None), images, epochs=1)),
    ("min_crop", lambda build, images: build(min_crop=0.5).augment_images(cached(images))),
    ("teacher_sha256", lambda build, images, tmp_path: resume(build, images, tmp_path, seed=1)),
    ("[6, 3072]", lambda build, images, tmp_path: resume(build, images, tmp_path, width=6)),
    ("teacher_sha256", lambda build: build().on_load_checkpoint({"state_dict": {}})),
]


@pytest.mark.parametrize(("told", "call"), REFUSED)
def test_what_does_not_fit_is_refused(told, call, request):
    check_refused(request, told, call)

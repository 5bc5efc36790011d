"""Mixtures of random crops, on which a self-explaining model is held to its teacher."""

import copy

import pytest
import torch
from toys import Marked

from explainers.errors import InputError
from explainers.sampling import stream, uniform
from explainers.vectors import SelfExplaining
from explainers.vectors.function_matching import SMALLEST, error_on_mixtures, mixed_crops
from explainers.vectors.prediction_losses import prediction_loss, relative_error

INDEX = torch.tensor([7, 3, 11, 20])


def test_a_crop_of_a_ramp_is_the_ramp_between_its_ends():
    size = 32
    ramp = (torch.arange(size) * 6 + 30).to(torch.uint8)  # one image, mixed with itself
    for index in range(20):
        for across in (True, False):
            image = (ramp if across else ramp[:, None]).expand(1, 1, size, size)
            side, *centre, flip, _ = uniform(torch.tensor([index]) * 5 + torch.arange(5), seed=9).tolist()
            side = SMALLEST + (1 - SMALLEST) * side
            at = (2 * centre[0 if across else 1] - 1) * (1 - side)  # from −1 to 1
            steps = (2 * torch.arange(size) + 1) / size - 1
            if across and flip < 0.5:
                steps = -steps
            pixels = ((at + side * steps + 1) * size / 2 - 0.5).clamp(0, size - 1)
            crop = mixed_crops(image, torch.tensor([index]), seed=9)[0, 0].float()
            crop = crop if across else crop.mT
            assert (crop - (30 + 6 * pixels)).abs().max() <= 0.51  # rounded to integers


def test_two_crops_are_mixed_with_every_share():
    white_and_black = torch.tensor([255, 0], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 8, 8)
    shares = []
    for index in range(100):
        mixed = mixed_crops(white_and_black, torch.tensor([index, 1000]), seed=1)
        assert (mixed == mixed[:, :1, :1, :1]).all()
        shares.append(mixed[0, 0, 0, 0].item() / 255)
    assert min(shares) < 0.1 and max(shares) > 0.9 and 0.4 < sum(shares) / 100 < 0.6
    assert mixed_crops(white_and_black, INDEX[:2], seed=1).dtype == torch.uint8


def test_draws_depend_on_image_and_epoch_alone():
    images = Marked(4, seed=1)[torch.arange(4)]["image"]
    one, again, other = (mixed_crops(images, INDEX, stream("mixtures", 0, epoch)) for epoch in (0, 0, 1))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert torch.equal(one[1:3], mixed_crops(images[:3], INDEX[:3], stream("mixtures", 0, 0))[1:])


def test_the_teacher_has_no_error_and_another_model_learns_from_its_own(target, make_target):
    rows = {"image": Marked(4, seed=1)[torch.arange(4)]["image"], "index": INDEX}
    assert error_on_mixtures(copy.deepcopy(target), target, rows, epoch=0).item() == pytest.approx(0, abs=1e-6)
    model = make_target(seed=1)
    error = error_on_mixtures(model, target.requires_grad_(False), rows, epoch=2)
    mixtures = target.normalise(mixed_crops(rows["image"], INDEX, stream("mixtures", 0, 2)))
    torch.testing.assert_close(error, relative_error(model.embed(mixtures), target.embed(mixtures)))
    error.backward()
    assert all(parameter.grad is not None for parameter in model.backbone.blocks.parameters())


def test_the_error_of_mixtures_counts_as_much_as_that_of_images():
    embeddings, wanted = torch.randn(4, 6), torch.randn(4, 6)
    given = ("embedding", torch.zeros(4, 2), torch.zeros(4, 2), embeddings, {"embedding": wanted})
    alone = prediction_loss(*given)
    torch.testing.assert_close(prediction_loss(*given, torch.tensor(0.25)), (alone + 0.25) / 2)


def test_mixtures_need_embeddings_to_hold(target, grid):
    line = "^expected explainer.predictions=embedding with explainer.mixtures, got teacher$"
    with pytest.raises(InputError, match=line):
        SelfExplaining(target, grid, predictions="teacher", teacher="base", mixtures=True)

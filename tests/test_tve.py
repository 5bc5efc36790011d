import copy
import logging
import re
from functools import partial

import pytest
import references
import torch
from lightning import Trainer
from torch import nn
from torch.utils.data import DataLoader

from explainers.masking import PatchGrid, neighbourhoods
from explainers.networks import LightNetwork
from explainers.oracle import Oracle
from explainers.tve import TVE, meta_attribution, transfer

pytestmark = pytest.mark.filterwarnings("ignore:You are trying to `self.log")  # steps are taken without a trainer, too

ADAM = partial(torch.optim.Adam, lr=3e-3)


class Perfect(nn.Module):
    """Knows every meta-attribution, because it computes them, the slow way."""

    blocks = ()

    def __init__(self, target, grid, hops=1):
        super().__init__()
        self.known = target, grid.side, hops  # in a tuple, so that the target is not a part of this module

    def forward(self, images, embeddings, maps):
        target, side, hops = self.known
        normalised = target.normalise(images)
        return torch.stack([references.meta_attribution(target.embed, image, side, hops) for image in normalised])


class Small(nn.Module):
    """A linear map of the pixels."""

    blocks = ()

    def __init__(self, target, grid):
        super().__init__()
        self.linear = nn.Linear(3 * grid.image_size**2, grid.num_patches * 2 * target.embed_dim)
        self.shape = grid.num_patches, 2, target.embed_dim

    def forward(self, images, embeddings, maps):
        return self.linear(images.flatten(1) / 255 - 0.5).unflatten(1, self.shape)


class Given(nn.Module):
    """Says what it was told."""

    blocks = ()

    def __init__(self, target, grid, meta):
        super().__init__()
        self.meta = meta

    def forward(self, images, embeddings, maps):
        return self.meta


LIGHT = partial(LightNetwork, blocks=[0, 1], width=12, depth=1)


def batch_of(images, first=0):
    return {"image": images, "index": first + torch.arange(len(images))}


def fit(tve, images, epochs, resume=None, **settings):
    samples = [{"image": image, "index": torch.tensor(i)} for i, image in enumerate(images)]
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", max_epochs=epochs, log_every_n_steps=1, **quiet, **settings)
    trainer.fit(tve, DataLoader(samples, batch_size=4), ckpt_path=resume)
    return trainer


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def equal(state, other):
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


@torch.no_grad()
@pytest.mark.parametrize("hops", [0, 1, 2])
def test_the_attribution_of_a_patch_is_the_papers(target, grid, images, hops):
    """Equation 4: log f(N(z); x, y) − log f(Z \\ N(z); x, y), for N(z) cut out with slices."""
    labels = torch.tensor([3, 0, 4, 1, 1])
    heatmaps = Oracle(target, grid, hops, chunk_size=7)(images, labels)
    assert heatmaps.shape == (5, 4, 4)
    for i in range(5):
        expected = references.attribution(target.probabilities, target.normalise(images)[i], labels[i], 4, hops)
        assert expected.std() > 0.1
        torch.testing.assert_close(heatmaps[i], expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_meta_attributions_are_what_the_backbone_sees_of_a_neighbourhood_and_of_the_rest(target, grid, images):
    normalised, drawn = target.normalise(images), torch.tensor([[6, 1], [0, 15], [3, 3], [9, 12], [8, 2]])
    got = meta_attribution(target.embed, normalised, neighbourhoods(grid, 1)[drawn], grid, chunk_size=3)
    assert got.shape == (5, 2, 2, 24)
    for i in range(5):
        expected = references.meta_attribution(target.embed, normalised[i], side=4, hops=1)[drawn[i]]
        torch.testing.assert_close(got[i], expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_perfect_network_has_no_loss(target, grid, images):
    tve = TVE(target, grid, Perfect, hops=(1,), patches_per_image=3)
    assert tve.training_step(batch_of(images), 0) < 1e-8
    worse = TVE(target, grid, partial(Perfect, hops=0), hops=(1,), patches_per_image=3)
    assert worse.training_step(batch_of(images), 0) > 0.1


@torch.no_grad()
def test_a_perfect_network_gives_the_heatmaps_of_the_oracle(target, grid, images):
    tve, oracle = TVE(target, grid, Perfect).eval(), Oracle(target, grid, hops=1)
    classes = torch.tensor([4, 2, 0, 1, 3])
    torch.testing.assert_close(tve(images, classes), oracle(images, classes), rtol=1e-4, atol=1e-4)
    predicted = target(images).argmax(1)
    assert not torch.equal(predicted, classes)
    torch.testing.assert_close(tve(images), oracle(images, predicted), rtol=1e-4, atol=1e-4)
    every = tve.all_classes(images)
    assert every.shape == (5, 5, 4, 4)
    for label in range(5):
        expected = oracle(images, torch.full((5,), label))
        torch.testing.assert_close(every[:, label], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_loss_is_the_papers(target, grid, images, reduction):
    """Equation 7; the released code takes the mean over the width of the embedding instead of the sum."""
    tve = TVE(target, grid, LIGHT, patches_per_image=3, hops=(1,), reduction=reduction)
    seen = tve.attributions(batch_of(images))
    maps = [seen["map_0"], seen["map_1"]]
    expected = references.tve_loss(tve.network(images, seen["embedding"], maps), seen["meta"], seen["patch"])
    if reduction == "mean":
        expected = expected / 24
    tve.fresh = False  # or the first step would calibrate the network
    torch.testing.assert_close(tve.training_step(batch_of(images), 0), expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(tve.training_step(batch_of(images) | seen, 0), expected, rtol=1e-4, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("h_weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("score", ["log_probability", "logit"])
@pytest.mark.parametrize("pooling", [1, 3, 5])
def test_the_released_options_are_what_they_say(target, grid, images, h_weight, score, pooling):
    meta = torch.randn(5, 16, 2, 24)
    tve = TVE(target, grid, partial(Given, meta=meta), score=score, h_weight=h_weight, pooling=pooling).eval()
    heatmaps = tve.all_classes(images)
    for i, label in ((0, 1), (4, 3)):
        expected = torch.zeros(4, 4)
        for patch in range(16):
            g, h = target.head(meta[i, patch, 0]), target.head(meta[i, patch, 1])
            if score == "log_probability":
                g, h = g - g.exp().sum().log(), h - h.exp().sum().log()
            expected[patch // 4, patch % 4] = g[label] - h_weight * h[label]
        torch.testing.assert_close(heatmaps[i, label], references.pooled(expected, pooling), rtol=1e-4, atol=1e-4)


def test_transfer_takes_any_head():
    head, meta = nn.Linear(6, 3), torch.randn(2, 9, 2, 6)
    assert transfer(head, meta).shape == (2, 3, 9)
    expected = head(meta[1, 4, 0]).softmax(0)[2].log() - head(meta[1, 4, 1]).softmax(0)[2].log()
    torch.testing.assert_close(transfer(head, meta)[1, 2, 4], expected)


@torch.no_grad()
def test_of_several_neighbourhood_sizes_each_serves_its_share_of_the_patches(target, grid, images):
    tve = TVE(target, grid, Small, hops=(0, 1, 2), patches_per_image=16)
    normalised = target.normalise(images)
    wanted = torch.stack(
        [
            torch.stack([references.meta_attribution(target.embed, image, 4, hops) for image in normalised])
            for hops in (0, 1, 2)
        ]
    )  # (3, B, N, 2, D)
    counts = torch.zeros(3)
    for epoch in range(10):
        seen = tve.attributions(batch_of(images), epoch)
        assert torch.equal(seen["patch"].sort(1).values, torch.arange(16).expand(5, 16))
        of_patch = wanted[:, torch.arange(5)[:, None], seen["patch"]]  # (3, B, Z, 2, D)
        error, hop = (of_patch - seen["meta"]).abs().amax((-1, -2)).min(0)
        assert error.max() < 1e-4
        counts += hop.flatten().bincount(minlength=3)
    assert counts.sum() == 800
    assert (counts - 800 / 3).abs().max() < 70


@torch.no_grad()
@pytest.mark.parametrize("network", [Small, LIGHT])
def test_attributions_of_an_image_do_not_depend_on_its_batch(target, grid, images, network):
    tve = TVE(target, grid, network, hops=(0, 1), patches_per_image=4)
    together = tve.attributions(batch_of(images, first=70), epoch=2)
    assert together["patch"].shape == (5, 4)
    assert together["meta"].shape == (5, 4, 2, 24)
    for i in range(5):
        alone = tve.attributions(batch_of(images[i : i + 1], first=70 + i), epoch=2)
        assert alone.keys() == together.keys()
        for name, value in alone.items():
            torch.testing.assert_close(value[0], together[name][i], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_attributions_are_drawn_anew_in_every_epoch_and_for_every_seed(target, grid, images):
    tve = TVE(target, grid, Small, patches_per_image=4)
    first, again, later = (tve.attributions(batch_of(images), epoch)["patch"] for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    other = TVE(target, grid, Small, patches_per_image=4, seed=1).attributions(batch_of(images))["patch"]
    assert not torch.equal(first, other)


@pytest.mark.parametrize("network", [Small, LIGHT])
def test_training_lowers_the_loss_and_leaves_the_target_as_it_was(make_target, grid, images, network):
    target = make_target(drop_path_rate=0.5, proj_drop_rate=0.2)
    before = state(target)
    torch.manual_seed(0)  # of the network's weights
    tve = TVE(target, grid, network, ADAM, hops=(1,), patches_per_image=4)
    start = tve.eval()._loss(batch_of(images), tve.attributions(batch_of(images))).item()
    fit(tve, images, epochs=100)
    assert tve._loss(batch_of(images), tve.attributions(batch_of(images))) < start / 3
    assert equal(state(target), before)
    assert all(weight.grad is None for weight in target.parameters())


@torch.no_grad()
def test_a_target_sees_without_dropout_while_the_explainer_trains(make_target, grid, images):
    target = make_target(drop_path_rate=0.5, proj_drop_rate=0.2)
    noisy = copy.deepcopy(target).train()
    assert not torch.allclose(
        noisy.embed(noisy.normalise(images)), noisy.embed(noisy.normalise(images))
    )  # it would matter
    calm = target.embed(target.normalise(images))
    tve = TVE(target, grid, LIGHT, ADAM).train()
    assert tve.network.training
    assert not any(module.training for module in target.modules())
    torch.testing.assert_close(tve.attributions(batch_of(images))["embedding"], calm)
    tve.eval().train()
    torch.testing.assert_close(tve.attributions(batch_of(images))["embedding"], calm)


def test_the_first_step_calibrates_a_fresh_light_network_and_no_later_one_does(target, grid, images):
    tve = TVE(target, grid, LIGHT, ADAM, patches_per_image=4)
    first = tve.attributions(batch_of(images[:4]))  # the first batch of the first epoch
    fit(tve, images, epochs=2)
    torch.testing.assert_close(tve.network.mean_g, first["meta"][:, :, 0].mean((0, 1)))
    assert not torch.allclose(tve.network.scale, torch.ones(()))


def test_weights_to_start_from_are_not_calibrated_away(target, grid, images, tmp_path):
    path = TVE(target, grid, LIGHT).export(tmp_path)
    tve = TVE(target, grid, LIGHT, ADAM, weights=str(path))
    fit(tve, images, epochs=1)
    assert torch.equal(tve.network.mean_g, torch.zeros(24))


def test_training_images_are_cropped_and_validation_images_are_not(target, grid, images):
    plain, cropping = (
        TVE(target, grid, partial(Given, meta=torch.zeros(5, 16, 2, 24)), min_crop=c) for c in (None, 0.3)
    )
    torch.testing.assert_close(cropping.training_step(batch_of(images), 0), cropping.training_step(batch_of(images), 0))
    assert not torch.allclose(cropping.training_step(batch_of(images), 0), plain.training_step(batch_of(images), 0))
    logged = []
    for tve in (plain, cropping):
        tve.log = lambda name, value, **_: logged.append((name, value))
        tve.validation_step(batch_of(images), 0)
    assert logged[0] == logged[1]


def test_training_needs_an_optimizer(target, grid, images):
    with pytest.raises(ValueError, match="training needs an optimizer"):
        fit(TVE(target, grid, Small), images, epochs=1)


def test_only_the_network_is_trained(target, grid, images):
    tve = TVE(target, grid, Small, ADAM)
    trainer = fit(tve, images, epochs=1)
    trained = {id(weight) for group in trainer.optimizers[0].param_groups for weight in group["params"]}
    assert trained == {id(weight) for weight in tve.network.parameters()}


@pytest.mark.parametrize("network", [Small, LIGHT])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(make_target, grid, images, network, tmp_path):
    def build():
        torch.manual_seed(3)
        return TVE(make_target(), grid, network, ADAM, hops=(0, 1), min_crop=0.5)

    straight, halfway, resumed = build(), build(), build()
    fit(straight, images, epochs=4)
    fit(halfway, images, epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    assert not equal(state(straight), state(halfway))
    nn.init.zeros_(next(resumed.network.parameters()))
    fit(resumed, images, epochs=4, resume=tmp_path / "half.ckpt")
    assert equal(state(resumed), state(straight))


def test_a_checkpoint_holds_no_weights_of_the_target_but_its_name(target, grid, images, tmp_path):
    fit(TVE(target, grid, LIGHT, ADAM), images, epochs=1).save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["state_dict"]
    assert all(name.startswith("network.") for name in checkpoint["state_dict"])
    assert checkpoint["identity"]["backbone_sha256"] == target.weights_hash()


def test_a_checkpoint_of_another_width_is_refused(target, make_target, grid, images, tmp_path):
    fit(TVE(target, grid, Small, ADAM), images, epochs=1).save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match="width 24; this target, vit_tiny_patch16_224, has 48"):
        fit(TVE(make_target(embed_dim=48), grid, Small, ADAM), images, 2, resume=tmp_path / "last.ckpt")


def test_exported_weights_explain_as_before(target, grid, images, tmp_path, caplog):
    tve = TVE(target, grid, LIGHT, ADAM, hops=(1,))
    fit(tve, images, epochs=2)
    path = tve.export(tmp_path)
    assert path == tmp_path / "explainer.safetensors"
    again = TVE(target, grid, LIGHT, weights=str(path)).eval()
    classes = torch.arange(5)
    assert torch.equal(again(images, classes), tve.eval()(images, classes))
    assert "other weights" not in caplog.text


def test_an_explainer_serves_another_head_on_the_same_backbone(target, make_target, grid, images, tmp_path, caplog):
    path = TVE(target, grid, LIGHT).export(tmp_path)
    other = make_target()
    other.head = nn.Linear(24, 2)
    tve = TVE(other, grid, LIGHT, weights=str(path)).eval()
    assert tve.all_classes(images).shape == (5, 2, 4, 4)
    assert "other weights" not in caplog.text


def test_weights_of_another_width_or_grid_are_refused_with_both_numbers(target, make_target, grid, tmp_path):
    path = str(TVE(target, grid, Small).export(tmp_path))
    with pytest.raises(
        ValueError, match=re.escape("embeddings of width 24; this target, vit_tiny_patch16_224, has 48")
    ):
        TVE(make_target(embed_dim=48), grid, Small, weights=path)
    with pytest.raises(ValueError, match=re.escape("patches a side: 4; this target, vit_tiny_patch16_224, has 2")):
        TVE(target, PatchGrid(32, 16), Small, weights=path)


def test_other_weights_of_the_backbone_are_said(target, make_target, grid, tmp_path, caplog):
    path = str(TVE(target, grid, Small).export(tmp_path))
    with caplog.at_level(logging.WARNING):
        TVE(make_target(seed=1), grid, Small, weights=path)
    assert f"{path} was trained on other weights of this backbone" in caplog.text


def test_weights_that_are_not_there_are_asked_for(target, grid):
    with pytest.raises(FileNotFoundError, match=re.escape("no trained explainer at nowhere.safetensors")):
        TVE(target, grid, Small, weights="nowhere.safetensors")


@pytest.mark.parametrize("change", [{"hops": (0, 1)}, {"patches_per_image": 2}, {"seed": 1}, {"network": LIGHT}, {}])
def test_what_is_stored_is_keyed_by_all_that_it_depends_on(target, grid, change):
    settings = {"network": Small}
    same = TVE(target, grid, **settings).attribution_key() == TVE(target, grid, **settings | change).attribution_key()
    assert same == (not change)


def test_what_is_stored_of_another_backbone_has_another_key(target, make_target, grid):
    assert TVE(target, grid, Small).attribution_key() != TVE(make_target(seed=1), grid, Small).attribution_key()

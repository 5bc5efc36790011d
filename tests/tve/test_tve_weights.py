"""What TVE writes and reads: checkpoints, trained networks, and the backbone that they belong to."""

import re
from functools import partial

import pytest
import torch
from toys import LIGHT, Small, equal, fit, state, training

from explainers.errors import InputError
from explainers.saved.identity import weights_hash
from explainers.tve.tve import TVE


def test_a_checkpoint_holds_no_weights_of_the_target_but_its_name(target, grid, images, tmp_path):
    fit(training(TVE(target, grid, LIGHT)), images, epochs=1).save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["state_dict"]
    assert all(name.startswith("network.") for name in checkpoint["state_dict"])
    assert checkpoint["identity"]["target"]["backbone_sha256"] == weights_hash(target.backbone)


def test_weights_to_start_from_are_not_calibrated_away(target, grid, images, tmp_path):
    path = TVE(target, grid, LIGHT).export(tmp_path)
    tve = TVE(target, grid, LIGHT, weights=str(path))
    fit(training(tve), images, epochs=1)
    assert torch.equal(tve.network.mean_g, torch.zeros(24))


def refused(source, own):
    """What names both weights: of `source`, in the hands of another backbone."""
    hashes = [re.escape(weights_hash(target.backbone)[:12]) for target in (source, own)]
    return pytest.raises(InputError, match=".*".join([*hashes, "allow_finetuned_backbone"]))


def test_an_explainer_of_other_weights_of_the_backbone_needs_to_be_allowed(target, make_target, grid, images, tmp_path):
    trained, finetuned = TVE(target, grid, LIGHT), make_target(seed=1)
    path = str(trained.export(tmp_path))
    with refused(target, finetuned):
        TVE(finetuned, grid, LIGHT, weights=path)
    tve = TVE(finetuned, grid, LIGHT, weights=path, allow_finetuned_backbone=True)
    assert equal(state(tve.network), state(trained.network))
    explained = tve.identity()["target"]["backbone_sha256"]  # from now on
    assert explained == weights_hash(finetuned.backbone)


def test_a_checkpoint_of_other_weights_of_the_backbone_needs_to_be_allowed(target, make_target, grid, images, tmp_path):
    fit(training(TVE(target, grid, Small)), images, epochs=1).save_checkpoint(tmp_path / "last.ckpt")
    finetuned = make_target(seed=1)
    before, resume = state(finetuned), partial(fit, images=images, epochs=2, resume=tmp_path / "last.ckpt")
    with refused(target, finetuned):
        resume(training(TVE(finetuned, grid, Small)))
    assert resume(training(TVE(finetuned, grid, Small, allow_finetuned_backbone=True))).current_epoch == 2
    assert equal(state(finetuned), before)


def test_finetuning_goes_on_from_its_own_checkpoint(target, make_target, grid, images, tmp_path):
    """Which belongs to the fine-tuned backbone, though its first weights did not."""
    path, finetuned = str(TVE(target, grid, Small).export(tmp_path)), make_target(seed=1)
    tve = TVE(finetuned, grid, Small, weights=path, allow_finetuned_backbone=True)
    fit(training(tve), images, epochs=1).save_checkpoint(tmp_path / "last.ckpt")
    again = TVE(finetuned, grid, Small)
    assert fit(training(again), images, epochs=2, resume=tmp_path / "last.ckpt").current_epoch == 2

"""CAAP, against passes in which every block is called by hand, for one patch of one image at a time."""

from functools import partial

import pytest
import torch

from explainers.errors import InputError
from explainers.posthoc import CAAP

CLASSES = torch.tensor([3, 0, 4, 1, 1])
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


@pytest.fixture
def target(make_target):
    return make_target(depth=4, init_values=0.5)


def run(target, tokens, first=0, paste=lambda number, tokens: tokens):
    """The tokens that enter each block from `first` on, (T, D) each, and the logits."""
    entered = []
    for number, block in enumerate(target.backbone.blocks[first:], first):
        tokens = paste(number, tokens)
        entered.append(tokens)
        tokens = block(tokens[None])[0]
    return entered, target.classify(target.pool(target.backbone.norm(tokens[None])))[0]


def enter(target, normalised):
    """The tokens that enter block 0."""
    backbone, tokens = target.backbone, []
    hook = backbone.blocks[0].register_forward_pre_hook(lambda _, args: tokens.append(args[0][0]))
    backbone.forward_features(normalised[None])
    hook.remove()
    return tokens[0]


def slow(target, image, label, first, last, near):
    """s(z) − s(∅) of every patch z."""
    source, _ = run(target, enter(target, target.normalise(image[None])[0]))
    blank = enter(target, torch.zeros(image.shape))
    prefix, empty = target.backbone.num_prefix_tokens, run(target, blank)[1][label]
    scores = []
    for patch in range(16):

        def paste(number, tokens, patch=patch):
            tokens = tokens.clone()
            if first <= number <= last:
                for other in near(patch):
                    tokens[prefix + other] = source[number][prefix + other]
            return tokens

        scores.append(run(target, blank, paste=paste)[1][label] - empty)
    return torch.stack(scores).view(4, 4)


def beside(patch):
    """A patch and its neighbours in a grid of 4 × 4."""
    row, column = divmod(patch, 4)
    return [4 * i + j for i in range(4) for j in range(4) if abs(i - row) <= 1 and abs(j - column) <= 1]


@torch.no_grad()
@pytest.mark.parametrize("model", ["vit_tiny_patch16_224", "vit_small_patch16_dinov3", "vit_base_patch16_siglip_224"])
@pytest.mark.parametrize(("first", "last"), [(1, 2), (0, 0), (2, 3)])
def test_the_token_of_one_patch_is_pasted_into_a_blank_pass(make_target, grid, images, model, first, last):
    if "dinov3" in model:  # a rotation by positions, which only the model itself gives its blocks
        target = make_target(model, depth=4)
        blocks = list(target.backbone.blocks)
        changed = CAAP(target, grid, first=first, last=last)(images, CLASSES)
        assert changed.flatten(1).std(1).min() > 1e-3 and list(target.backbone.blocks) == blocks
        return
    target = make_target(model, depth=4)
    found = CAAP(target, grid, first=first, last=last)(images[:2], CLASSES[:2])
    for heatmap, image, label in zip(found, images, CLASSES, strict=False):
        close(heatmap, slow(target, image, label, first, last, lambda patch: [patch]))


@torch.no_grad()
def test_neighbours_may_be_pasted_too(target, grid, images):
    found = CAAP(target, grid, first=1, last=2, hops=1)(images[:1], CLASSES[:1])[0]
    close(found, slow(target, images[0], 3, 1, 2, beside))


def test_the_middle_blocks_are_patched_unless_others_are_named(make_target, grid):
    method = CAAP(make_target(depth=12), grid)
    assert (method.first, method.last, method.forward_passes) == (3, 8, 17)
    assert CAAP(make_target(depth=12), grid, first=-4, last=-2).first == 8
    with pytest.raises(InputError, match="^last=1 is before the first patched block, 3: take first <= last"):
        CAAP(make_target(depth=12), grid, last=1)


def test_blocks_before_the_first_patched_one_run_once(target, grid, images):
    calls = [[] for _ in range(4)]
    hooks = [
        block.attn.register_forward_hook(lambda *call, own=own: own.append(len(call[2])))
        for own, block in zip(calls, target.backbone.blocks, strict=True)
    ]
    CAAP(target, grid, first=2, last=2, chunk_size=50)(images, CLASSES)
    assert [sum(own) for own in calls] == [6, 6, 6 + 5 * 16, 6 + 5 * 16]
    assert all(hook.remove() is None for hook in hooks)


def test_a_patch_of_the_neutral_image_has_no_influence(target, grid, images, monkeypatch):
    monkeypatch.setattr(target, "normalise", lambda given: torch.zeros(given.shape))
    assert CAAP(target, grid)(images, CLASSES).abs().max() < 1e-5

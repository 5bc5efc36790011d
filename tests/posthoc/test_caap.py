"""CAAP, against whole passes of the model, for one patch of one image at a time."""

from functools import partial

import pytest
import torch

from explainers.errors import InputError
from explainers.posthoc import CAAP

CLASSES = torch.tensor([3, 0, 4, 1, 1])
MODELS = (
    *("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "vit_small_patch16_dinov3"),
    *("vit_base_patch16_siglip_224", "beit_base_patch16_224"),
)


def run(target, normalised, change=lambda number, tokens: tokens):
    """The tokens that enter each block, (T, D) each, and the logits, if `change` changes these tokens."""
    entered, hooks = [], []

    def enter(number, block, args):
        entered.append(change(number, args[0][0]))
        return entered[-1][None], *args[1:]

    for number, block in enumerate(target.backbone.blocks):
        hooks.append(block.register_forward_pre_hook(partial(enter, number)))
    logits = target.classify(target.embed(normalised[None]))[0]
    for hook in hooks:
        hook.remove()
    return entered, logits


def slow(target, image, label, first, last):
    """s(z) − s(∅) of every patch z."""
    source, _ = run(target, target.normalise(image[None])[0])
    blank, prefix, scores = torch.zeros(image.shape), target.backbone.num_prefix_tokens, torch.zeros(4, 4)
    for row in range(4):
        for column in range(4):
            token = prefix + 4 * row + column

            def change(number, tokens, token=token):
                if first <= number <= last:
                    tokens = torch.cat([tokens[:token], source[number][token : token + 1], tokens[token + 1 :]])
                return tokens

            scores[row, column] = run(target, blank, change)[1][label] - run(target, blank)[1][label]
    return scores


@torch.no_grad()
@pytest.mark.parametrize(
    ("model", "first", "last"), [*((model, 1, 2) for model in MODELS), (MODELS[0], 0, 0), (MODELS[0], 2, 3)]
)
def test_the_token_of_one_patch_is_pasted_into_the_pass_of_a_blank_image(make_target, grid, images, model, first, last):
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 3}
    target = make_target(model, depth=4, **small)
    found = CAAP(target, grid, first=first, last=last, chunk_size=7)(images[:2], CLASSES[:2])
    for heatmap, image, label in zip(found, images, CLASSES, strict=False):
        expected = slow(target, image, label, first, last)
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(heatmap, expected, rtol=1e-4, atol=1e-5)


def test_the_middle_blocks_are_patched_unless_others_are_named(make_target, grid):
    method = CAAP(make_target(depth=12), grid)
    assert (method.first, method.last, method.forward_passes) == (3, 8, 17)
    assert CAAP(make_target(depth=12), grid, first=-4, last=-2).first == 8
    with pytest.raises(InputError, match="^last=1 is before the first patched block, 3: take first <= last"):
        CAAP(make_target(depth=12), grid, last=1)


def test_blocks_before_the_first_patched_one_run_once(make_target, grid, images):
    target, calls = make_target(depth=4), [[] for _ in range(4)]
    for own, block in zip(calls, target.backbone.blocks, strict=True):
        block.attn.register_forward_hook(lambda *call, own=own: own.append(len(call[2])))
    CAAP(target, grid, first=2, last=2, chunk_size=50)(images, CLASSES)
    assert [sum(own) for own in calls] == [6, 6, 6 + 5 * 16, 6 + 5 * 16]

"""The flow of paths, against autograd through the class token and loops over patches."""

import pytest
import references_attention as slow
import references_paths
import torch
from references_attention import agree

from explainers.transformer.direct_paths import direct_paths, record_direct
from explainers.transformer.path_flow import has_mlp_paths, mlp_paths, path_flow, record_flow, sum_paths

CLASS_TOKEN = {name: slow.MODELS[name] for name in ("vit", "layer_scale", "registers")}
CLASS_TOKEN["tanh"] = ("vit_tiny_patch16_224", {"act_layer": "gelu_tanh", "qkv_bias": True, "fc_norm": True})
POOLED = {name: slow.MODELS[name] for name in ("average", "eva")}
MODELS = CLASS_TOKEN | POOLED


def record_paths(target, images, blocks):
    with record_flow(target, blocks) as record:
        target.embed(target.normalise(images))
    return record


def build(make_target, name, count):
    """A model in double precision, the indices of its last blocks, and a functional."""
    architecture, arguments = MODELS[name]
    target = make_target(architecture, **arguments).double()
    functional = torch.randn(24, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    return target, range(len(target.backbone.blocks))[-count:], functional


@pytest.mark.parametrize("name", CLASS_TOKEN)
def test_mlp_paths_are_gradient_times_value_through_the_class_token(make_target, images, name):
    target, blocks, functional = build(make_target, name, 3)
    with slow.in_double():
        assert has_mlp_paths(target, blocks)
        found = torch.stack(mlp_paths(target, record_paths(target, images, blocks)), 1)[1] @ functional
        seen = slow.walk(target, target.normalise(images)[1])
        agree(found, references_paths.gradient_times_value(seen, functional, blocks[0]), 1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_paths_flow_to_the_patches_from_which_attention_moved_the_tokens(make_target, images, name):
    target, blocks, functional = build(make_target, name, 2)
    with slow.in_double():
        record = record_paths(target, images, blocks)
        found = path_flow(target, record)[1] @ functional
        agree(path_flow(target, record, functional.expand(len(images), 1, -1))[1, ..., 0], found, 1e-10)
        seen = slow.walk(target, target.normalise(images)[1])
        if name in POOLED:
            with record_direct(target, blocks) as record:
                target.embed(target.normalise(images))
            paths = direct_paths(target, record)[1] @ functional
        else:
            paths = references_paths.gradient_times_value(seen, functional, blocks[0])
        agree(found, references_paths.flow(seen, paths, blocks[0]), 1e-10)


@pytest.mark.parametrize("name", CLASS_TOKEN)
def test_sums_of_all_patches_weigh_the_flow_of_each_block(make_target, images, name):
    target, blocks, _ = build(make_target, name, 2)
    with slow.in_double():
        record = record_paths(target, images, blocks)
        weights = torch.randn(len(images), 16, 2)
        found = sum_paths(target, record, None, weights)
        some = torch.tensor([[3, 0, 7]] * len(images))
        agree(sum_paths(target, record, some, weights[:, some[0]]), found[:, some[0]], 1e-10)
        seen = slow.walk(target, target.normalise(images)[1])
        for functional in torch.randn(3, 24):
            paths = references_paths.gradient_times_value(seen, functional, blocks[0])
            flow = references_paths.flow(seen, paths, blocks[0])
            expected = [sum(weights[1, z, i] * flow[i, z] for i in range(2)) for z in range(16)]
            agree(found[1] @ functional, torch.stack(expected), 1e-10)


def test_a_planted_patch_gets_what_another_patch_took_from_it(target, images):
    record = record_paths(target, images, [0, 1])
    first, second = mlp_paths(target, record)
    record.transitions[0].copy_(torch.eye(16))
    record.transitions[0][:, 9] = torch.eye(16)[4]  # block 0 replaced the token of patch 9 by that of patch 4
    found = path_flow(target, record)[:, 0] - first
    torch.testing.assert_close(found[:, 4], second[:, 4] + second[:, 9], rtol=1e-4, atol=1e-5)
    assert found[:, 9].abs().max() < 1e-5 < second[:, 9].abs().max()

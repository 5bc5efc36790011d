"""The network that predicts vectors c_z."""

import math

import pytest
import torch

from explainers.anyhead.network import AnyHeadNetwork
from explainers.learned.sources import Features

SWIN = {"img_size": 32, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4}
TARGETS = {
    "vit": ("vit_tiny_patch16_224", {}, [0, 1]),
    "flow": ("vit_tiny_patch16_224", {}, [0, 1]),
    "swin": ("swin_tiny_patch4_window7_224", SWIN, [0, 1]),
    "resnet": ("test_resnet", {}, [1, 2, 4]),
}
SMALL = {"width": 12, "heads": 2, "head_width": 4}


def inputs(network, target, images):
    rows = Features(target, network.blocks, network.direct, network.paths)({"image": images})
    return rows["embedding"], [rows[f"map_{i}"] for i in range(len(network.blocks))], rows.get("direct")


def look(network, target, images, blend=0.0):
    return network(*inputs(network, target, images), blend=blend)


@pytest.fixture(params=TARGETS)
def pair(request, make_target, grid):
    name, arguments, blocks = TARGETS[request.param]
    target = make_target(name, **arguments)
    added = {"direct": [0, 1], "paths": request.param} if request.param == "flow" else {}
    return AnyHeadNetwork(target, grid, blocks, **SMALL, **added), target


@pytest.fixture
def network(target, grid):
    """Of one feature map, and with a gate that is not closed."""
    network = AnyHeadNetwork(target, grid, [0], **SMALL)
    torch.nn.init.normal_(network.gate.weight)
    return network


@torch.no_grad()
@pytest.mark.parametrize("paths", ["direct", "flow"])
def test_a_trained_network_is_blended_with_the_untrained_one_that_adds_all_paths(target, grid, images, paths):
    network = AnyHeadNetwork(target, grid, [0, 1], **SMALL, direct=[0, 1], paths=paths)
    network.scale.fill_(3.0)
    network.spread.fill_(2.0)
    for parameter in network.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    trained = look(network, target, images)
    untrained = inputs(network, target, images)[2].sum(1) * 3 / 2
    torch.testing.assert_close(look(network, target, images, blend=0.25), 0.75 * trained + 0.25 * untrained)


@torch.no_grad()
def test_every_patch_has_a_vector_that_does_not_depend_on_other_images(pair, images):
    network, target = pair
    vectors = look(network, target, images)
    assert vectors.shape == (5, 16, target.embed_dim)
    assert (vectors.std(1) > 0).all()
    alone = torch.cat([look(network, target, images[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(alone, vectors, rtol=1e-4, atol=1e-5)
    embeddings, maps, direct = inputs(network, target, images)
    for each in (embeddings, *maps, *(() if direct is None else (direct,))):
        each[1:] += torch.randn_like(each[1:])
    torch.testing.assert_close(network(embeddings, maps, direct)[0], vectors[0])


@torch.no_grad()
def test_scores_are_attention_of_the_mean_relative_to_uniform_attention(network):
    tokens = torch.randn(3, 16, 24)
    found = network._scores(0, tokens)
    for i in range(3):
        query, key = network.queries[0](sum(tokens[i]) / 16), network.keys[0](tokens[i])
        for head in range(2):
            own = slice(4 * head, 4 * head + 4)
            odds = [math.exp(torch.dot(query[own], key[patch, own]).item() / 4**0.5) for patch in range(16)]
            for patch in range(16):
                expected = math.log(16 * odds[patch] / sum(odds))
                assert found[i, patch, head].item() == pytest.approx(expected, rel=1e-3, abs=1e-5)


@torch.no_grad()
def test_maps_of_another_resolution_are_resampled_where_they_are(network):
    embeddings, plain = torch.randn(1, 24), torch.randn(1, 1, 24).expand(1, 64, 24)
    marked = plain.clone()
    marked.unflatten(1, (8, 8))[0, 2:4, 6:8] = torch.randn(24)
    network.position.zero_()
    vectors = network(embeddings, [marked])[0]
    assert (vectors - vectors.median(0).values).norm(dim=-1).argmax() == 1 * 4 + 3


@torch.no_grad()
def test_direct_paths_are_added_with_a_weight_for_every_patch_and_block(target, grid):
    network = AnyHeadNetwork(target, grid, [0], **SMALL, direct=[0, 1])
    embeddings, maps, paths = torch.randn(3, 24), [torch.randn(3, 16, 24)], torch.randn(3, 2, 16, 24)
    network.scale.fill_(3.0)
    network.spread.fill_(2.0)

    def added(direct):
        return network(embeddings, maps, direct) - network(embeddings, maps)

    torch.testing.assert_close(added(paths), 1.5 * (paths[:, 0] + paths[:, 1]))  # all weights are 1 at the start
    network.path_weight.bias.copy_(torch.tensor([0.0, -2.0]))
    torch.testing.assert_close(added(paths), -3 * paths[:, 1])
    torch.nn.init.normal_(network.path_weight.weight)
    weights = added(torch.eye(24).expand(3, 2, 24, 24)[:, :, :16]) / 1.5
    tokens = weights.diagonal(dim1=1, dim2=2)[:, :16]  # both blocks together, of every patch
    assert tokens.std(1).min() > 0.1
    torch.testing.assert_close(added(4 * paths), 4 * added(paths), rtol=1e-4, atol=1e-4)
    fine = paths.unflatten(2, (4, 4)).repeat_interleave(2, 2).repeat_interleave(2, 3).flatten(2, 3)
    assert added(fine).shape == (3, 16, 24)  # of patches of half the size

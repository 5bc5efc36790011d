import pytest
import torch
from references import neighbourhood, pooled

from explainers.learned.trunk import on_grid
from explainers.tve.tve import LightNetwork

SWIN = {"img_size": 32, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4}
TARGETS = {
    "vit": ("vit_tiny_patch16_224", {}, [0, 1]),
    "swin": ("swin_tiny_patch4_window7_224", SWIN, [0, 1]),
    "resnet": ("test_resnet", {}, [1, 2, 4]),
}


def look(network, target, images):
    embeddings, maps = target.embed_with_maps(target.normalise(images), network.blocks)
    return network(images, embeddings, maps), embeddings


@pytest.fixture(params=TARGETS)
def light(request, make_target, grid):
    name, arguments, blocks = TARGETS[request.param]
    target = make_target(name, **arguments)
    return LightNetwork(target, grid, blocks, width=12), target


def test_a_light_network_starts_near_its_trivial_guesses(light, images):
    network, target = light
    network.initialise(2 + torch.randn(5, 3, 2, target.embed_dim), torch.zeros(5, target.embed_dim))
    predicted, embeddings = look(network, target, images)
    correction = predicted - torch.stack([network.mean_g.expand_as(embeddings), embeddings], 1)[:, None]
    assert 0 < (correction / network.scale).abs().max() < 0.5
    assert (network.mean_g - 2).abs().max() < 1.5


def test_calibration_sets_the_mean_and_the_deviations_that_loops_find(target, grid):
    network = LightNetwork(target, grid, [0])
    wanted, embeddings = torch.randn(4, 3, 2, 24) * 3 + 1, torch.randn(4, 24)
    network.initialise(wanted, embeddings)
    for d in range(24):
        g = [wanted[b, z, 0, d].item() for b in range(4) for z in range(3)]
        h = [wanted[b, z, 1, d].item() - embeddings[b, d].item() for b in range(4) for z in range(3)]
        mean = sum(g) / 12
        torch.testing.assert_close(network.mean_g[d].item(), mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            network.scale[0, d].item(), (sum((v - mean) ** 2 for v in g) / 12) ** 0.5, rtol=1e-4, atol=0
        )
        torch.testing.assert_close(network.scale[1, d].item(), (sum(v**2 for v in h) / 12) ** 0.5, rtol=1e-4, atol=0)


def test_a_light_network_corrects_its_guesses_in_units_of_their_deviations(light, images):
    network, target = light
    before, embeddings = look(network, target, images)
    network.mean_g.fill_(3.0)
    network.scale.copy_(torch.tensor([[10.0], [0.1]]).expand_as(network.scale))
    after, _ = look(network, target, images)
    torch.testing.assert_close(after[:, :, 0], 3 + 10 * before[:, :, 0])
    torch.testing.assert_close(after[:, :, 1], embeddings[:, None] + 0.1 * (before[:, :, 1] - embeddings[:, None]))


def test_a_light_network_sees_of_the_maps_what_is_near_a_patch(target, grid):
    """A change at one place changes what is said of the patches whose neighbourhood it is in, and of no other."""
    embeddings, before = torch.randn(1, 24), torch.zeros(1, 16, 24)
    after = before.clone()
    after[0, 1 * 4 + 3] = torch.randn(24)
    for hops in ([0], [1], [1, 0]):
        network = LightNetwork(target, grid, [0], hops)
        difference = (network(None, embeddings, [after]) - network(None, embeddings, [before])).abs()
        changed = difference.flatten(2).amax(-1) > 1e-6
        assert set(changed[0].nonzero().flatten().tolist()) == neighbourhood(1 * 4 + 3, 4, max(hops))


def test_a_map_of_a_rectangle_keeps_its_places_on_a_coarser_grid():
    feature_map = torch.zeros(1, 60, 1)
    feature_map[0, 9] = 1  # the upper right of 6 × 10 positions
    coarse = on_grid(feature_map, (3, 5))[0, :, 0]
    assert coarse.shape == (15,) and coarse.argmax() == 4


@pytest.mark.parametrize("hops", [1, 2])
def test_what_is_near_a_patch_is_averaged(target, grid, hops):
    """Equal means around a patch are equal for it."""
    network, (features,) = LightNetwork(target, grid, [0], [hops]), torch.randn(1, 1, 16, 24)
    squares = features[0].mT.unflatten(-1, (4, 4))
    mean = torch.stack([pooled(channel, 2 * hops + 1).flatten() for channel in squares], -1)[None]
    averaged = LightNetwork(target, grid, [0], [0])
    averaged.load_state_dict(network.state_dict())
    embeddings = torch.randn(1, 24)
    torch.testing.assert_close(network(None, embeddings, [features]), averaged(None, embeddings, [mean]))


def test_what_is_said_of_some_patches_is_what_is_said_of_them_among_all(light, images):
    network, target = light
    predicted, embeddings = look(network, target, images)
    _, maps = target.embed_with_maps(target.normalise(images), network.blocks)
    patches = torch.tensor([[3, 1], [0, 15], [7, 7], [8, 2], [5, 4]])
    of_some = network(images, embeddings, maps, patches)
    assert of_some.shape == (5, 2, 2, target.embed_dim)
    for i, drawn in enumerate(patches.tolist()):
        for z, patch in enumerate(drawn):
            torch.testing.assert_close(of_some[i, z], predicted[i, patch])

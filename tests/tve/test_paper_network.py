import pytest
import torch
from references import sincos
from torch import nn

from explainers.masking import PatchGrid
from explainers.tve.masked_autoencoder import MaskedAutoencoder, sincos_positions
from explainers.tve.paper_network import PaperNetwork, ffn_layers

TINY = {"encoder": {"width": 16, "depth": 2, "heads": 2}, "decoder": {"width": 8, "depth": 1, "heads": 2}}


@pytest.fixture
def paper(target, grid):
    return PaperNetwork(target, grid, **TINY, head_layers=3)


def test_the_papers_network_gives_two_embeddings_for_every_patch(paper, target, images):
    predicted = paper(images)
    assert predicted.shape == (5, 16, 2, target.embed_dim)
    assert not torch.allclose(predicted[:, :, 0], predicted[:, :, 1])
    drawn = torch.tensor([[3, 1], [0, 15], [7, 7], [8, 2], [5, 4]])
    for i, of_image in enumerate(paper(images, patches=drawn)):
        torch.testing.assert_close(of_image, predicted[i, drawn[i]])


def test_without_a_shared_trunk_g_and_h_share_nothing(paper, images):
    paper(images)[:, :, 0].square().sum().backward()
    got = {name for name, weight in paper.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert {".".join(name.split(".")[:2]) for name in got} == {"autoencoders.0", "ffns.0"}


def test_position_embeddings_are_the_sines_and_cosines_of_columns_and_rows():
    grid = PatchGrid(image_size=12, patch_size=4)
    torch.testing.assert_close(sincos_positions(grid, 24)[0], sincos(3, 24), rtol=1e-5, atol=1e-5)
    autoencoder = MaskedAutoencoder(grid, **TINY)
    torch.testing.assert_close(autoencoder.decoder_pos_embed[0], sincos(3, 8), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(autoencoder.encoder.pos_embed[0], sincos(3, 16), rtol=1e-5, atol=1e-5)
    assert not autoencoder.decoder_pos_embed.requires_grad


def ffn_by_hand(layer, features, gelu, skip):
    """Figure 10 (b): LayerNorm, linear, GELU, linear, GELU, skip."""
    mean, variance = features.mean(-1, keepdim=True), features.var(-1, unbiased=False, keepdim=True)
    hidden = (features - mean) / (variance + 1e-5).sqrt() * layer.norm.weight + layer.norm.bias
    hidden = hidden @ layer.first.weight.T + layer.first.bias
    hidden = nn.functional.gelu(hidden) if gelu else hidden
    hidden = hidden @ layer.second.weight.T + layer.second.bias
    hidden = nn.functional.gelu(hidden) if gelu else hidden
    return hidden + features if skip else hidden


@pytest.mark.parametrize(("reconstruct", "width"), [(True, 3 * 8 * 8), (False, 8)])
def test_the_heads_read_reconstructed_pixels_or_the_tokens_of_the_decoder(target, grid, images, reconstruct, width):
    network = PaperNetwork(target, grid, **TINY, head_layers=2, reconstruct=reconstruct)
    assert [ffn[0].first.in_features for ffn in network.ffns] == [width] * 2
    assert network(images).shape == (5, 16, 2, target.embed_dim)


@pytest.mark.parametrize("released", [False, True])
def test_the_head_has_no_skip_on_its_first_layer_and_no_gelu_on_its_last(released):
    """The released head has neither on both."""
    layers, features = ffn_layers(8, 6, 4, tokens=5 * released), torch.randn(2, 5, 8)
    assert [isinstance(layer.activation, nn.GELU) for layer in layers] == [not released, True, True, False]
    assert [layer.skip for layer in layers] == [False, True, True, not released]
    for i, layer in enumerate(() if released else layers):
        expected = ffn_by_hand(layer, features, gelu=i < 3, skip=i > 0)
        features = layer(features)
        torch.testing.assert_close(features, expected)
    assert features.shape == (2, 5, 8 if released else 6)

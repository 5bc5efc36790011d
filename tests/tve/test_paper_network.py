import logging

import pytest
import timm
import torch
from references import sincos
from torch import nn

from explainers.masking import PatchGrid
from explainers.tve.masked_autoencoder import MaskedAutoencoder, sincos_positions
from explainers.tve.paper_network import FFN, PaperNetwork, ffn_layers

TINY = {"width": 16, "depth": 2, "heads": 2, "decoder_width": 8, "decoder_depth": 1, "decoder_heads": 2}


@pytest.fixture
def paper(target, grid):
    return PaperNetwork(target, grid, **TINY, head_layers=3)


def mae_checkpoint(grid, width=16, depth=2, decoder_width=8, decoder_depth=1, decoder=True):
    """Random weights under the names of the official masked autoencoder."""

    def block(prefix, size):
        shapes = {"norm1": (size,), "attn.qkv": (3 * size, size), "attn.proj": (size, size), "norm2": (size,)}
        shapes |= {"mlp.fc1": (4 * size, size), "mlp.fc2": (size, 4 * size)}
        weights = {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}
        return weights | {f"{prefix}.{name}.bias": shape[:1] for name, shape in shapes.items()}

    tokens, pixels = grid.num_patches + 1, 3 * grid.patch_size**2
    shapes = {"cls_token": (1, 1, width), "pos_embed": (1, tokens, width)}
    shapes |= {
        "patch_embed.proj.weight": (width, 3, grid.patch_size, grid.patch_size),
        "patch_embed.proj.bias": (width,),
    }
    for i in range(depth):
        shapes |= block(f"blocks.{i}", width)
    shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
    if decoder:
        shapes |= {"mask_token": (1, 1, decoder_width), "decoder_pos_embed": (1, tokens, decoder_width)}
        shapes |= {"decoder_embed.weight": (decoder_width, width), "decoder_embed.bias": (decoder_width,)}
        for i in range(decoder_depth):
            shapes |= block(f"decoder_blocks.{i}", decoder_width)
        shapes |= {"decoder_norm.weight": (decoder_width,), "decoder_norm.bias": (decoder_width,)}
        shapes |= {"decoder_pred.weight": (pixels, decoder_width), "decoder_pred.bias": (pixels,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def test_the_papers_network_gives_two_embeddings_for_every_patch(paper, target, images):
    predicted = paper(images)
    assert predicted.shape == (5, 16, 2, target.embed_dim)
    assert not torch.allclose(predicted[:, :, 0], predicted[:, :, 1])
    drawn = torch.tensor([[3, 1], [0, 15], [7, 7], [8, 2], [5, 4]])
    for i, of_image in enumerate(paper(images, patches=drawn)):
        torch.testing.assert_close(of_image, predicted[i, drawn[i]])


def test_a_shared_trunk_is_half_the_autoencoders_and_g_and_h_still_differ(paper, target, grid, images):
    shared = PaperNetwork(target, grid, **TINY, head_layers=3, shared_trunk=True)
    sizes = [[sum(w.numel() for w in part.parameters()) for part in (n.autoencoders, n.ffns)] for n in (paper, shared)]
    assert sizes[1] == [sizes[0][0] // 2, sizes[0][1]]
    passes = []
    shared.autoencoders[0].register_forward_hook(lambda *_: passes.append(1))
    predicted = shared(images)
    assert predicted.shape == (5, 16, 2, target.embed_dim) and len(passes) == 1
    assert not torch.allclose(predicted[:, :, 0], predicted[:, :, 1])


def test_without_a_shared_trunk_g_and_h_share_nothing(paper, images):
    paper(images)[:, :, 0].square().sum().backward()
    got = {name for name, weight in paper.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert {".".join(name.split(".")[:2]) for name in got} == {"autoencoders.0", "ffns.0"}


@pytest.mark.parametrize("shared_trunk", [False, True])
@pytest.mark.parametrize("token_mixing", [False, True])
def test_every_parameter_of_the_papers_network_gets_a_gradient(token_mixing, shared_trunk, target, grid, images):
    """Distributed training would wait for the others for ever."""
    network = PaperNetwork(target, grid, **TINY, head_layers=3, token_mixing=token_mixing, shared_trunk=shared_trunk)
    (network(images) - 1).square().sum().backward()
    got = {name for name, weight in network.named_parameters() if weight.grad is not None}
    frozen = {f"autoencoders.{i}.decoder_pos_embed" for i in range(1 if shared_trunk else 2)}
    assert got == {name for name, _ in network.named_parameters()} - frozen


def test_position_embeddings_are_the_sines_and_cosines_of_columns_and_rows():
    grid = PatchGrid(image_size=12, patch_size=4)
    torch.testing.assert_close(sincos_positions(grid, 24)[0], sincos(3, 24), rtol=1e-5, atol=1e-5)
    autoencoder = MaskedAutoencoder(grid, **TINY)
    torch.testing.assert_close(autoencoder.decoder_pos_embed[0], sincos(3, 8), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(autoencoder.encoder.pos_embed[0], sincos(3, 16), rtol=1e-5, atol=1e-5)
    assert not autoencoder.decoder_pos_embed.requires_grad


@pytest.mark.parametrize("wrapped", [True, False])
def test_an_official_checkpoint_loads_by_name_into_every_autoencoder(target, grid, images, tmp_path, caplog, wrapped):
    saved = mae_checkpoint(grid)
    torch.save({"model": saved} if wrapped else saved, tmp_path / "mae.pth")
    network = PaperNetwork(target, grid, str(tmp_path / "mae.pth"), **TINY, head_layers=2)
    for autoencoder in network.autoencoders:
        own = autoencoder.state_dict()
        for name, value in saved.items():
            if name not in ("mask_token", "decoder_pred.weight", "decoder_pred.bias"):
                assert torch.equal(own[name if name.startswith("decoder_") else f"encoder.{name}"], value), name
        assert len(own) == len(saved) - 3
    assert not caplog.records


def test_what_an_encoder_alone_does_not_initialise_is_said(target, grid, tmp_path, caplog):
    saved = mae_checkpoint(grid, decoder=False)
    torch.save(saved, tmp_path / "encoder.pth")
    with caplog.at_level(logging.WARNING):
        network = PaperNetwork(target, grid, str(tmp_path / "encoder.pth"), **TINY, head_layers=2)
    missing = len(network.autoencoders[0].state_dict()) - len(saved)
    assert f"does not initialise {missing} tensors, decoder_pos_embed to decoder_norm.bias" in caplog.text
    assert torch.equal(network.autoencoders[1].encoder.pos_embed, saved["pos_embed"])


def test_an_encoder_of_timm_is_taken_by_its_name(target, grid, monkeypatch, caplog):
    encoder = timm.create_model(
        "vit_base_patch16_224.mae", num_classes=0, img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2
    )
    monkeypatch.setattr(timm, "create_model", lambda *args, **kwargs: encoder)
    network = PaperNetwork(target, grid, "vit_base_patch16_224.mae", **TINY, head_layers=2)
    for autoencoder in network.autoencoders:
        own = autoencoder.encoder.state_dict()
        assert all(torch.equal(own[name], value) for name, value in encoder.state_dict().items())
    assert "decoder" in caplog.text


@pytest.mark.parametrize("size", [{"depth": 3}, {"width": 20}, {"decoder_depth": 2}, {"decoder_width": 12}])
def test_a_checkpoint_of_another_size_is_refused(target, grid, tmp_path, size):
    torch.save(mae_checkpoint(grid, **size), tmp_path / "mae.pth")
    with pytest.raises((ValueError, RuntimeError), match=r"not a masked autoencoder of this size|size mismatch"):
        PaperNetwork(target, grid, str(tmp_path / "mae.pth"), **TINY, head_layers=2)


def test_a_checkpoint_of_another_grid_is_refused(target, grid, tmp_path):
    torch.save(mae_checkpoint(PatchGrid(image_size=64, patch_size=8)), tmp_path / "mae.pth")
    with pytest.raises((ValueError, RuntimeError), match=r"not a masked autoencoder of this size|size mismatch"):
        PaperNetwork(target, grid, str(tmp_path / "mae.pth"), **TINY, head_layers=2)


def ffn_by_hand(layer, features, gelu, skip):
    """Figure 10 (b): LayerNorm, linear, GELU, linear, GELU, skip."""
    mean, variance = features.mean(-1, keepdim=True), features.var(-1, unbiased=False, keepdim=True)
    hidden = (features - mean) / (variance + 1e-5).sqrt() * layer.norm.weight + layer.norm.bias
    hidden = hidden @ layer.first.weight.T + layer.first.bias
    hidden = nn.functional.gelu(hidden) if gelu else hidden
    hidden = hidden @ layer.second.weight.T + layer.second.bias
    hidden = nn.functional.gelu(hidden) if gelu else hidden
    return hidden + features if skip else hidden


def test_the_head_has_no_skip_on_its_first_layer_and_no_gelu_on_its_last():
    layers, features = ffn_layers(8, 6, 4), torch.randn(2, 5, 8)
    assert len(layers) == 4
    for i, layer in enumerate(layers):
        expected = ffn_by_hand(layer, features, gelu=i < 3, skip=i > 0)
        features = layer(features)
        torch.testing.assert_close(features, expected)
    assert features.shape == (2, 5, 6)


def test_the_released_head_has_neither_on_both():
    layers = ffn_layers(8, 6, 4, tokens=5)
    assert [isinstance(layer.activation, nn.GELU) for layer in layers] == [False, True, True, False]
    assert [layer.skip for layer in layers] == [False, True, True, False]


@pytest.mark.parametrize("tokens", [0, 5])
def test_only_the_released_head_mixes_tokens(tokens):
    layer, before = FFN(6, 6, tokens), torch.randn(1, 5, 6)
    after = before.clone()
    after[0, 2] = torch.randn(6)
    changed = (layer(before) - layer(after)).abs().amax(-1)[0] > 1e-6
    assert changed.tolist() == ([True] * 5 if tokens else [False, False, True, False, False])

"""Weights of masked autoencoders in the official format and in Hugging Face's, against a slow forward pass."""

import pickle

import pytest
import torch
from huggingface_hub import errors as hub
from references_mae import reconstruction
from safetensors.torch import save_file

from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.tve import masked_autoencoder
from explainers.tve.masked_autoencoder import MaskedAutoencoder, read_mae
from explainers.tve.paper_network import PaperNetwork

TINY = {"encoder": {"width": 16, "depth": 2, "heads": 2}, "decoder": {"width": 8, "depth": 1, "heads": 2}}


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
    return {name: 0.5 * torch.randn(shape) for name, shape in shapes.items()}


def as_hugging_face(official):
    """The same weights under the names of ViTMAEForPreTraining."""
    saved = {}
    outside = {
        "cls_token": "vit.embeddings.cls_token",
        "pos_embed": "vit.embeddings.position_embeddings",
        "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
        "norm": "vit.layernorm",
    }
    inside = {
        "attn.proj": "attention.output.dense",
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }
    stacks = {"blocks": "vit.encoder.layer", "decoder_blocks": "decoder.decoder_layers"}
    for name, value in official.items():
        layer, _, kind = name.rpartition(".")
        if layer.split(".")[0] in stacks:
            stack, number, part = layer.split(".", 2)
            prefix = f"{stacks[stack]}.{number}"
            if part == "attn.qkv":
                for third, of_third in zip(("query", "key", "value"), value.chunk(3), strict=True):
                    saved[f"{prefix}.attention.attention.{third}.{kind}"] = of_third.clone()
            else:
                saved[f"{prefix}.{inside[part]}.{kind}"] = value
        elif name in outside:
            saved[outside[name]] = value
        else:
            saved[f"{outside[layer]}.{kind}" if layer in outside else f"decoder.{name}"] = value
    return saved


def written(weights, path):
    (save_file if path.suffix == ".safetensors" else torch.save)(weights, path)
    return str(path)


@pytest.fixture(scope="module")
def small():
    """Official weights for 2 × 2 patches, an image, and what they make of it, slowly."""
    torch.manual_seed(0)
    grid = PatchGrid(image_size=16, patch_size=8)
    weights, image = mae_checkpoint(grid), torch.randn(3, 16, 16)
    return grid, weights, image, reconstruction(weights, image, 8, 2, 2)


@torch.no_grad()
@pytest.mark.parametrize(
    ("file", "reconstruct"), [("mae.pth", True), ("pytorch_model.bin", False), ("model.safetensors", True)]
)
def test_weights_of_both_formats_compute_what_the_masked_autoencoder_is_defined_as(small, tmp_path, file, reconstruct):
    grid, weights, image, (tokens, pixels) = small
    source = written({"model": weights} if file == "mae.pth" else as_hugging_face(weights), tmp_path / file)
    autoencoder = MaskedAutoencoder(grid, **TINY, reconstruct=reconstruct)
    assert autoencoder.load(read_mae(source), source) == []
    expected = pixels if reconstruct else tokens
    torch.testing.assert_close(autoencoder(image[None])[0], expected, rtol=1e-4, atol=1e-4)


def test_what_an_encoder_alone_does_not_initialise_is_said_once(target, grid, tmp_path):
    weights = mae_checkpoint(grid, decoder=False)
    source = written(weights, tmp_path / "encoder.pth")
    with pytest.warns(UserWarning) as said:
        network = PaperNetwork(target, grid, source, **TINY, head_layers=2)
    missing = len(network.autoencoders[0].state_dict()) - len(weights)
    assert [str(warning.message) for warning in said] == [
        f"{source} lacks {missing} tensors, decoder_pos_embed to decoder_pred.bias: they start random"
    ]
    assert torch.equal(network.autoencoders[1].encoder.pos_embed, weights["pos_embed"])


class Program:
    def __reduce__(self):
        return print, ("a program ran",)


@pytest.mark.parametrize("content", ["pickle", "torch", b"", b"no weights"])
@pytest.mark.parametrize("file", ["mae.pth", "model.safetensors"])
def test_a_damaged_file_or_a_program_is_refused_and_not_run(tmp_path, capsys, content, file):
    if content == "torch":
        torch.save({"model": Program()}, tmp_path / file)
    else:
        (tmp_path / file).write_bytes(pickle.dumps({"model": Program()}) if content == "pickle" else content)
    with pytest.raises(InputError, match=f"in .*{file}, got a file that cannot be read as tensors"):
        read_mae(str(tmp_path / file))
    assert "a program ran" not in capsys.readouterr().out


@pytest.mark.parametrize("there", ["model.safetensors", "pytorch_model.bin"])
def test_a_repository_of_the_hub_is_downloaded_by_its_name(tmp_path, monkeypatch, there):
    written({"norm.bias": torch.ones(2)}, tmp_path / there)

    def download(repository, name):
        assert repository == "facebook/vit-mae-base"
        if name != there:
            raise hub.EntryNotFoundError(name)
        return str(tmp_path / name)

    monkeypatch.setattr(masked_autoencoder, "hf_hub_download", download)
    assert read_mae("hf://facebook/vit-mae-base")["norm.bias"].tolist() == [1, 1]


@pytest.mark.parametrize("size", [{"depth": 3}, {"decoder_width": 12}, {"grid": PatchGrid(64, 8)}])
def test_weights_of_another_size_are_refused(grid, tmp_path, size):
    weights = mae_checkpoint(**{"grid": grid, **size})
    with pytest.raises(InputError, match="mae.pth"):
        MaskedAutoencoder(grid, **TINY).load(weights, "mae.pth")

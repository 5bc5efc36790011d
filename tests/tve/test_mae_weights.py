"""Weights of masked autoencoders in the official format and in Hugging Face's, against transformers."""

import pickle

import pytest
import torch
from conftest import wake
from huggingface_hub import errors as hub
from safetensors.torch import load_file, save_file
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.tve import masked_autoencoder
from explainers.tve.masked_autoencoder import MaskedAutoencoder, read_mae
from explainers.tve.paper_network import PaperNetwork

TINY = {"encoder": {"width": 16, "depth": 2, "heads": 2}, "decoder": {"width": 8, "depth": 1, "heads": 2}}


def hugging_face(width=16, depth=2, decoder_width=8, image_size=16):
    """A small ViTMAEForPreTraining with lively random weights, which hides nothing."""
    encoder = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": 2, "intermediate_size": 64}
    decoder = {"hidden_size": decoder_width, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    settings = encoder | {f"decoder_{name}": value for name, value in decoder.items()}
    settings |= {"image_size": image_size, "patch_size": 8, "mask_ratio": 0.0, "layer_norm_eps": 1e-6}
    return wake(ViTMAEForPreTraining(ViTMAEConfig(**settings))).eval()


def written(weights, path):
    (save_file if path.suffix == ".safetensors" else torch.save)(weights, path)
    return str(path)


def saved(model, folder, before_5=False):
    """Its weights as transformers saves them, or as it did before its version 5, as on the Hub."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    return {name.replace("_encoder.layer", "_layers") if before_5 else name: w for name, w in weights.items()}


def official(model, folder):
    """Its weights under the names of the official masked autoencoder."""
    weights = read_mae(written(saved(model, folder), folder / "model.bin"))
    names = {"cls_token", "patch_embed.proj.weight", "blocks.1.attn.qkv.weight", "mask_token", "decoder_pred.bias"}
    assert names < weights.keys()
    return weights


@torch.no_grad()
@pytest.mark.parametrize(
    ("file", "reconstruct"), [("mae.pth", True), ("pytorch_model.bin", False), ("model.safetensors", True)]
)
def test_weights_of_both_formats_compute_what_transformers_computes(tmp_path, file, reconstruct):
    model, image, seen = hugging_face(), torch.randn(1, 3, 16, 16), []
    model.decoder.decoder_norm.register_forward_hook(lambda *call: seen.append(call[-1][:, 1:]))
    pixels = model(image, noise=torch.arange(4)[None]).logits
    before_5 = file == "pytorch_model.bin"
    weights = {"model": official(model, tmp_path)} if file == "mae.pth" else saved(model, tmp_path, before_5)
    source = written(weights, tmp_path / file)
    autoencoder = MaskedAutoencoder(PatchGrid(16, 8), **TINY, reconstruct=reconstruct)
    assert autoencoder.load(read_mae(source), source) == []
    torch.testing.assert_close(autoencoder(image), pixels if reconstruct else seen[0], rtol=1e-4, atol=1e-4)


def test_what_an_encoder_alone_does_not_initialise_is_said_once(target, grid, tmp_path):
    weights = official(hugging_face(image_size=32), tmp_path)
    encoder = {name: value for name, value in weights.items() if "decoder" not in name and name != "mask_token"}
    source = written(encoder, tmp_path / "encoder.pth")
    with pytest.warns(UserWarning, match="lacks .* tensors, decoder_pos_embed to decoder_pred.bias") as said:
        network = PaperNetwork(target, grid, source, **TINY, head_layers=2)
    assert len(said) == 1 and torch.equal(network.autoencoders[1].encoder.pos_embed, weights["pos_embed"])


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


@pytest.mark.parametrize("size", [{"depth": 3}, {"decoder_width": 12}, {"image_size": 64}])
def test_weights_of_another_size_are_refused(grid, tmp_path, size):
    with pytest.raises(InputError, match="mae.pth"):
        MaskedAutoencoder(grid, **TINY).load(official(hugging_face(**{"image_size": 32, **size}), tmp_path), "mae.pth")

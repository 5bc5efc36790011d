"""Weights as the cache of the Hugging Face Hub keeps them."""

import timm
import torch
from safetensors.torch import save_file

COMMIT = "0123456789012345678901234567890123456789"


def cache_place(folder, repository):
    """Make the folder of the files of a repository in the cache in a folder."""
    place = folder / f"models--{repository.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text(COMMIT)
    (place / "snapshots" / COMMIT).mkdir(parents=True)
    return place / "snapshots" / COMMIT


def cache_weights(weights, folder, name, file="model.safetensors"):
    """Write the weights of a model of timm to the cache in a folder, as if they had been downloaded."""
    path = cache_place(folder, timm.models.get_pretrained_cfg(name).hf_hub_id) / file
    save_file(weights, path) if file.endswith(".safetensors") else torch.save(weights, path)

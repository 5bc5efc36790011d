"""Networks of which everything is known, and short, silent training."""

from functools import partial

import references
import torch
from lightning import Trainer
from torch import nn
from torch.utils.data import DataLoader

from explainers.networks import LightNetwork, at_patches

ADAM = partial(torch.optim.Adam, lr=3e-3)
LIGHT = partial(LightNetwork, blocks=[0, 1], width=12, depth=1)
SILENT = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Perfect(nn.Module):
    """Knows every meta-attribution, because it computes them, the slow way."""

    blocks = ()

    def __init__(self, target, grid, hops=1):
        super().__init__()
        self.known = target, grid.side, hops  # in a tuple, so that the target is not a part of this module

    def forward(self, images, embeddings, maps, patches=None):
        target, side, hops = self.known
        normalised = target.normalise(images)
        meta = [references.meta_attribution(target.embed, image, side, hops) for image in normalised]
        return at_patches(torch.stack(meta), patches)


class Small(nn.Module):
    """A linear map of the pixels."""

    blocks = ()

    def __init__(self, target, grid):
        super().__init__()
        self.linear = nn.Linear(3 * grid.image_size**2, grid.num_patches * 2 * target.embed_dim)
        self.shape = grid.num_patches, 2, target.embed_dim

    def forward(self, images, embeddings, maps, patches=None):
        return at_patches(self.linear(images.flatten(1) / 255 - 0.5).unflatten(1, self.shape), patches)


class Given(nn.Module):
    """Says what it was told."""

    blocks = ()

    def __init__(self, target, grid, meta):
        super().__init__()
        self.meta = meta

    def forward(self, images, embeddings, maps, patches=None):
        return at_patches(self.meta, patches)


def batch_of(images, first=0):
    return {"image": images, "index": first + torch.arange(len(images))}


def fit(module, images, epochs, resume=None, validate=False, **settings):
    samples = [{"image": image, "index": torch.tensor(i)} for i, image in enumerate(images)]
    trainer = Trainer(accelerator="cpu", max_epochs=epochs, log_every_n_steps=1, **SILENT, **settings)
    val = DataLoader(samples, batch_size=4) if validate else None
    trainer.fit(module, DataLoader(samples, batch_size=4), val, ckpt_path=resume)
    return trainer


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def equal(state, other):
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)

"""Networks of which everything is known, and short, silent training."""

import copy
import math
from functools import partial
from types import SimpleNamespace

import references
import torch
from lightning import Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

from datamodules.images import Images
from explainers.anyhead import AnyHead, CoalitionTeacher
from explainers.anyhead.network import AnyHeadNetwork
from explainers.learned.trunk import at_patches
from explainers.shapley import Shapley, ShapleyLabels, ShapleyLoss
from explainers.training import ExplainerTraining
from explainers.tve import TVE, TVELoss
from explainers.tve.tve import LightNetwork
from explainers.vectors import ExplainabilityVector, Selection, VectorSources
from explainers.vectors.fixed_head import FixedHead
from explainers.vectors.projections import simplex
from explainers.vectors.self_explaining import SelfExplaining

ADAM = partial(torch.optim.Adam, lr=3e-3)
LIGHT = partial(LightNetwork, blocks=[0, 1], width=12, depth=1)
VECTORS = partial(AnyHeadNetwork, blocks=[0, 1], width=32, depth=1, heads=2, head_width=4)
PAPER = {
    "encoder": {"width": 16, "depth": 1, "heads": 2},
    "decoder": {"width": 8, "depth": 1, "heads": 2},
    "head_layers": 3,
}
"""A small size of the paper's network."""

SILENT = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Perfect(nn.Module):
    """Knows every meta-attribution, because it computes them, the slow way."""

    blocks = ()

    def __init__(self, target, grid, hops=1):
        super().__init__()
        self.known = target, grid.shape, hops  # in a tuple, so that the target is not a part of this module

    def forward(self, images, embeddings, maps, patches=None):
        target, side, hops = self.known
        normalised = target.normalise(images)
        meta = [references.meta_attribution(target.embed, image, side, hops) for image in normalised]
        return at_patches(torch.stack(meta), patches)

    def initialise(self, meta):
        """Nothing to initialise."""


class Small(nn.Module):
    """A linear map of the pixels."""

    blocks = ()

    def __init__(self, target, grid):
        super().__init__()
        self.linear = nn.Linear(3 * math.prod(grid.size), grid.num_patches * 2 * target.embed_dim)
        self.shape = grid.num_patches, 2, target.embed_dim

    def forward(self, images, embeddings, maps, patches=None):
        return at_patches(self.linear(images.flatten(1) / 255 - 0.5).unflatten(1, self.shape), patches)

    def initialise(self, meta):
        """Nothing to initialise."""


class Given(nn.Module):
    """Says what it was told."""

    blocks = ()

    def __init__(self, target, grid, meta):
        super().__init__()
        self.meta = meta

    def forward(self, images, embeddings, maps, patches=None):
        return at_patches(self.meta, patches)

    def initialise(self, meta):
        """Nothing to initialise."""


def batch_of(images, first=0):
    return {"image": images, "index": first + torch.arange(len(images))}


def fit(module, images, epochs, resume=None, validate=False, **settings):
    samples = [{"image": image, "index": torch.tensor(i)} for i, image in enumerate(images)]
    trainer = Trainer(accelerator="cpu", max_epochs=epochs, log_every_n_steps=1, **SILENT, **settings)
    val = DataLoader(samples, batch_size=4) if validate else None
    trainer.fit(module, DataLoader(samples, batch_size=4), val, ckpt_path=resume)
    return trainer


def training(explainer, loss=None, optimizer=ADAM, **settings):
    """What trains a learned explainer; with the loss that it has by default."""
    usual = {TVE: TVELoss, AnyHead: CoalitionTeacher, Shapley: ShapleyLoss}
    return ExplainerTraining(explainer, loss or usual[type(explainer)], optimizer, **settings)


def step(module, batch):
    """The loss of a training step, without a trainer."""
    return module.training_step(batch, 0)


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def equal(state, other):
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


class Marked(Dataset):
    """Noise with one bright patch, whose colour is the class and whose place is anywhere; it counts what is read."""

    classes = ("red", "green", "blue")

    def __init__(self, count=7, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randint(0, 120, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
        self.labels, self.seed, self.read = torch.arange(count) % 3, seed, []
        for i, patch in enumerate(torch.randint(16, (count,), generator=generator).tolist()):
            self.images[i, self.labels[i]][references.window(patch, 4, 8)] = 255

    def fingerprint(self):
        return {"image": f"marked {self.seed}", "label": f"marked {self.seed}"}

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        self.read.append(index)
        return {"image": self.images[index], "label": self.labels[index], "index": torch.as_tensor(index)}


class Unlabelled(Marked):
    """Without classes, as `unlabelled_images`."""

    classes = ()

    def __getitem__(self, index):
        return super().__getitem__(index) | {"label": torch.full_like(torch.as_tensor(index), -1)}


def exported(base, grid, folder, alpha=1, seed=None, start=None, noise=0.02, classes=3, turn=0):
    """The file of a self-explaining model: a copy of `base`, or of the file `start`, with noise on the weights."""
    module = SelfExplaining(base, grid, start)
    if start is None:
        module.target.head = FixedHead(simplex(classes, base.embed_dim, seed=turn), scale=10.0)
    generator = torch.Generator().manual_seed(seed or 0)
    with torch.no_grad():
        for weight in module.target.backbone.parameters() if seed is not None else ():
            weight.add_(noise * torch.randn(weight.shape, generator=generator))
    folder.mkdir(parents=True, exist_ok=True)
    return str(module.export(folder, alpha))


def three_models(base, grid, folder, **settings):
    """Files of a source task's models without and with attributions, and of a target task's without."""
    predicting = exported(base, grid, folder / "predicting", seed=1, **settings)
    explaining = exported(base, grid, folder / "explaining", alpha=0.8, seed=2, start=predicting, noise=0.05)
    return {
        "predicting": predicting,
        "explaining": explaining,
        "onto": exported(base, grid, folder / "onto", seed=3, **settings),
    }


def vector_module(target, grid, files, **settings):
    """A transfer between three models; `settings` may replace them."""
    usual = {"lambda_2": [0.0, 0.5, 1.0], "labels": partial(ShapleyLabels, budget=20), "selection": Selection(k=3)}
    sources = {name: [files[name]] for name in ("predicting", "explaining")}
    given = {"onto": files["onto"], "vector": VectorSources(**sources)}
    return ExplainabilityVector(copy.deepcopy(target), grid, **(usual | given | settings))


def validate(module, data=None, **settings):
    """Sweep, over images of `marked_splits` by default; return the trainer."""
    trainer = Trainer(**({"accelerator": "cpu"} | SILENT | settings))
    trainer.validate(module, Images(**marked_splits()[1]) if data is None else data, verbose=False)
    return trainer


def marked_splits():
    """7 and 5 images in batches of 3: the data sets by name, and the arguments of a datamodule of them."""
    sets = {"train": Marked(4, seed=8), "val": Marked(7, seed=1), "test": Marked(5, seed=2)}
    builders = {name: (lambda each=each: each) for name, each in sets.items()}
    return sets, builders | {"batch_size": 3, "num_workers": 0}


def in_memory(evidence):
    """The evidence of an audit as a store of one shard."""
    return SimpleNamespace(evidence=evidence, shards=lambda: iter([evidence]))


@torch.no_grad()
def game(target, image, predict=None):
    """v of all coalitions of 3 × 3 patches of an image, and its exact Shapley values (N, K)."""
    values = references.coalition_values(predict or target.score_images, target.normalise(image[None])[0], side=3)
    return values, references.exact_shapley(values, 9)


def members(keep):
    """Coalitions (M, N) as sets."""
    return [frozenset(row.nonzero()[:, 0].tolist()) for row in keep]


def look_up(values, coalitions):
    """What fits take, of one image: coalitions (1, M, 9), v of them (1, M, K), of nothing and of all patches (1, K)."""
    keep = torch.tensor([[patch in coalition for patch in range(9)] for coalition in coalitions])
    found = torch.stack([values[coalition] for coalition in coalitions])
    return keep[None], found[None], values[frozenset()][None], values[frozenset(range(9))][None]


def assert_same(heatmaps, expected):
    """Equal up to the rounding of float32, in which heatmaps are returned: computed in double precision."""
    for heatmap, wanted in zip(heatmaps.double(), expected, strict=True):
        torch.testing.assert_close(heatmap, wanted.double(), rtol=1e-6, atol=1e-6 * wanted.abs().max().item())


def distance(counts, probabilities):
    """χ² of counts against probabilities, in standard deviations from its mean."""
    expected = torch.tensor(probabilities) * counts.sum()
    assert (counts[expected == 0] == 0).all()
    inside = expected > 0
    chi_square = ((counts - expected)[inside].square() / expected[inside]).sum()
    freedom = int(inside.sum()) - 1
    return (chi_square - freedom) / (2 * freedom) ** 0.5

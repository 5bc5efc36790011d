"""A target looks at one patch only, away from the diagonal: explanations must peak there, not at the mirror image."""

from functools import partial

import pytest
import references
import torch
from lightning import Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from toys import SILENT

from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.training import ExplainerTraining
from explainers.tve import TVE, LightNetwork, Oracle, TVELoss

GRID = PatchGrid(image_size=(24, 36), patch_size=4)
ROW, COLUMN = 1, 4
PLANTED = ROW * GRID.shape[1] + COLUMN


class OnePatch(nn.Module):
    """What `TargetModel` asks of a timm model. It embeds the pixels of one patch; hidden, no class has an advantage."""

    def __init__(self):
        super().__init__()
        self.see, self.fc = nn.Linear(3 * GRID.patch_size**2, 8, bias=False), nn.Linear(8, 4, bias=False)
        nn.init.normal_(self.see.weight, std=0.3)
        nn.init.normal_(self.fc.weight)
        self.head_hidden_size = 8
        self.feature_info = [{"num_chs": 3 * GRID.patch_size**2}]
        self.pretrained_cfg = {"architecture": "one_patch", "mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}

    def get_classifier(self):
        return self.fc

    def reset_classifier(self, num_classes):
        self.fc = nn.Identity()

    def forward_features(self, images):
        return self.see(images[references.window(PLANTED, GRID.shape, GRID.patch_size)].flatten(1)).tanh()

    def forward_head(self, features, pre_logits):
        return features

    def forward(self, images):
        return self.fc(self.forward_features(images))

    def forward_intermediates(self, images, indices, output_fmt):
        return self.forward_features(images), [F.pixel_unshuffle(images, GRID.patch_size)]


@pytest.fixture
def target():
    return TargetModel(OnePatch()).eval()


def random_images(count, seed):
    """Every patch has one colour of its own."""
    colours = torch.randint(
        0, 256, (count, 3, *GRID.shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return colours.repeat_interleave(GRID.patch_size, -1).repeat_interleave(GRID.patch_size, -2)


def around(hops):
    near = torch.zeros(GRID.shape, dtype=torch.bool)
    for patch in references.neighbourhood(PLANTED, GRID.shape, hops):
        near[divmod(patch, GRID.shape[1])] = True
    return near


@pytest.mark.parametrize("hops", [0, 1])
def test_the_oracle_peaks_where_the_target_looks(target, hops):
    images = random_images(20, seed=1)
    heatmaps = Oracle(target, GRID, hops)(images, target(images).argmax(1))
    assert torch.equal(heatmaps > 1e-5 * heatmaps.max(), around(hops).expand(20, -1, -1))


@pytest.mark.slow
def test_a_trained_explainer_peaks_where_the_target_looks(target, hops=1):
    samples = [{"image": image, "index": torch.tensor(i)} for i, image in enumerate(random_images(32, seed=2))]
    network, optimizer = partial(LightNetwork, blocks=[0], width=24, depth=1), partial(torch.optim.Adam, lr=1e-2)
    tve, every = TVE(target, GRID, network, hops=(hops,)), partial(TVELoss, patches_per_image=18)
    trained = ExplainerTraining(tve, every, optimizer)
    Trainer(accelerator="cpu", max_epochs=40, **SILENT).fit(trained, DataLoader(samples, batch_size=16))
    with torch.no_grad():
        heatmaps = tve.eval()(random_images(32, seed=3))  # of other images
    mean = heatmaps.mean(0)
    assert torch.equal(mean > (mean.min() + mean.max()) / 2, around(hops))
    peaks = heatmaps.flatten(1).argmax(1)
    assert around(hops).flatten()[peaks].float().mean() > 0.5  # in some images the patch says nothing

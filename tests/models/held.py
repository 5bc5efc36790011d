"""Models as people hold them, small and with random weights, and the table of what `as_target` makes of them.

PYTHONPATH=tests:. python tests/models/held.py      # prints the table of docs/how_to/any_model.md
"""

import contextlib
import io
import math
import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import lightning
import timm
import torch
from conftest import timm_model, wake
from library_models import KINDS, TORCHVISION, hugging_face
from timm.utils import ModelEmaV3
from torch import nn

from explainers import posthoc
from explainers.app.choosing import choose, print_once
from explainers.models import as_target
from explainers.models.heads import NoHead, TextProjection


def vit(**settings):
    return timm_model("vit_tiny_patch16_224", **settings)


def encoder():
    return deepcopy(vit(num_classes=0))


def mlp(width, classes=5):
    return nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, classes))


def call(encoder, images):
    return encoder(images)


class Net(nn.Module):
    """A backbone, what is read of it, and a head, as people write it."""

    def __init__(self, encoder, read, head):
        super().__init__()
        self.encoder, self.read, self.head = encoder, read, head

    def forward(self, images):
        return self.head(self.read(self.encoder, images))


class Normalise(nn.Module):
    """The normalisation of images as a layer."""

    def __init__(self, mean, std):
        super().__init__()
        self.mean, self.std = (nn.Parameter(torch.tensor(each)[:, None, None]) for each in (mean, std))

    def forward(self, images):
        return (images - self.mean) / self.std


class Trained(lightning.LightningModule):
    """A model in training."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images)


def ema():
    return ModelEmaV3(vit())


def compiled_blocks():
    model = deepcopy(vit())
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="eager")
    return model


def quantised():
    return torch.ao.quantization.quantize_dynamic(deepcopy(vit()), {nn.Linear})


def convnet(channels=3, classes=5):
    layers = [nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()]
    return wake(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes))).eval()


def small(name, **settings):
    return lambda: wake(timm.create_model(name, num_classes=5, **settings)).eval()


def of_transformers(name):
    return hugging_face(name)[0]


CAIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
TIMM = {
    "timm ViT": vit,
    "timm ViT of 16 × 32 pixels": partial(vit, img_size=(16, 32)),
    "timm ViT of 6 channels": partial(vit, in_chans=6),
    "timm EVA": small("eva02_tiny_patch14_224", img_size=28, depth=2, embed_dim=32, num_heads=2),
    "timm BEiT": small("beit_base_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=2),
    "timm DeiT, distilled": small(
        "deit_tiny_distilled_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=2
    ),
    "timm NaFlexVit": small("vit_tiny_patch16_224", use_naflex=True, depth=2, embed_dim=32, num_heads=2),
    "timm CaiT": small("cait_xxs24_224", **CAIT),
    "timm XCiT": small("xcit_nano_12_p16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2),
    "timm Swin": small(
        "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=24, depths=(1, 1), num_heads=(2, 2)
    ),
    "timm DaViT": small("davit_tiny", depths=(1, 1), embed_dims=(24, 32), num_heads=(2, 2)),
    "timm Hiera": small("hiera_tiny_224", embed_dim=24, num_heads=1, stages=(1, 1, 1, 1)),
    "timm ResNet": small("test_resnet"),
    "timm ConvNeXt": small("test_convnext"),
    "timm EfficientNet": small("test_efficientnet"),
}
WRAPPED = {
    "nn.DataParallel": lambda: nn.DataParallel(vit()),
    "ModelEmaV3 of timm": ema,
    "AveragedModel of torch": lambda: torch.optim.swa_utils.AveragedModel(vit()),
    "torch.compile": lambda: torch.compile(vit(), backend="eager"),
    "torch.compile of every block": compiled_blocks,
    "LightningModule": lambda: Trained(vit()),
    "LightningModule of a DataParallel": lambda: Trained(nn.DataParallel(vit())),
    "nn.Sequential(normalisation, ViT)": lambda: nn.Sequential(Normalise([0.5] * 3, [0.25] * 3), vit()),
    "nn.Sequential(ViT, linear layer)": lambda: nn.Sequential(encoder(), nn.Linear(24, 5)),
    "nn.Sequential(ViT, MLP)": lambda: nn.Sequential(encoder(), mlp(24)),
    "own module, ViT and MLP": lambda: Net(encoder(), call, mlp(24)),
    "own module, class token of a ViT": lambda: Net(
        encoder(), lambda vit, images: vit.forward_features(images)[:, 0], mlp(24)
    ),
    "own module, ViT of transformers": lambda: Net(
        of_transformers("ViT without a head"), lambda vit, images: vit(images).last_hidden_state[:, 0], mlp(32)
    ),
    "own module, DINOv2 of transformers": lambda: Net(
        of_transformers("DINOv2"), lambda dino, images: dino(images).pooler_output, mlp(32)
    ),
    "own module, ResNet of timm": lambda: Net(small("test_resnet")().eval(), call, mlp(5)),
    "ViT, quantised (dynamic int8)": quantised,
}
PLAIN = {
    "own CNN": convnet,
    "own CNN of 1 channel": partial(convnet, 1),
    "own CNN of 6 channels": partial(convnet, 6),
    "TorchScript": lambda: torch.jit.trace(convnet(), torch.zeros(1, 3, 32, 32)),
}
UNKNOWN = {*PLAIN, "ViT, quantised (dynamic int8)"}
"""Models that state neither mean nor standard deviation nor size."""

HELD: dict[str, Callable[[], nn.Module]] = {
    **TIMM,
    **{f"torchvision {name}": build for name, build in TORCHVISION.items()},
    **{f"transformers {name}": partial(of_transformers, name) for name in KINDS},
    **WRAPPED,
    **PLAIN,
}


class Row(NamedTuple):
    """A row of the table."""

    found: str
    difference: float
    methods: int
    auto: str


def describe(name):
    """What `as_target` makes of a model: what it says, the difference of outputs, the number of methods, and `auto`."""
    model, said = HELD[name](), io.StringIO()
    print_once.cache_clear()
    channels = int(found[1]) if (found := re.search(r"(\d) channels?", name)) else 3
    settings = {"mean": [0.5] * channels, "std": [0.5] * channels, "image_size": 32} if name in UNKNOWN else {}
    with contextlib.redirect_stderr(said):
        target = as_target(model, **settings)
        _, auto = choose(target, purpose="likeness" if isinstance(target.head, NoHead | TextProjection) else "classes")
    text = said.getvalue()
    differences = [float(found) for found in re.findall(r"differ by at most ([\d.e-]+)", text)]
    return Row(shorten(text), max(differences, default=0.0), len(posthoc.methods_for(target)), auto)


def shorten(said):
    """What the lines say about a model, in a few words."""
    words = {"inside (": "the backbone inside", "computed in timm's": "timm's", ": taken off": "unwrapped"}
    return next((found for word, found in words.items() if word in said), "as it is")


def family(name):
    """The library of a model, with the space behind it; nothing for a model of no library."""
    return next((library for library in ("timm ", "torchvision ", "transformers ") if name.startswith(library)), "")


def print_table():
    """Print one row for all models of a library that are found and explained alike."""
    alike = {}
    for name in HELD:
        row = describe(name)
        alike.setdefault((family(name), row.found, row.methods, row.auto), {})[name] = row.difference
    print("| Models as held | Computed | Outputs differ by at most | Methods | `auto` |\n|---|---|---:|---:|---|")
    for (library, found, methods, auto), differences in alike.items():
        most = max(differences.values())
        names = library + "; ".join(name.removeprefix(library) for name in differences)
        print(f"| {names} | {found} | {f'1e{math.ceil(math.log10(most))}' if most else '0'} | {methods} | {auto} |")


if __name__ == "__main__":
    print_table()

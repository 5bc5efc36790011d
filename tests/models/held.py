"""Models as people hold them, small and with random weights, and the table of what `as_target` makes of them.

PYTHONPATH=tests:. python tests/models/held.py      # prints the table of docs/how_to/any_model.md
"""

import contextlib
import io
import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import lightning
import timm
import torch
from conftest import timm_model, wake
from library_models import HUGGING_FACE, TORCHVISION
from timm.utils import ModelEmaV3
from torch import nn

from explainers import posthoc
from explainers.app.choosing import choose, print_once
from explainers.models import as_target

SIZE = {"mean": 0.5, "std": 0.5, "image_size": 32}


def vit(**settings):
    return timm_model("vit_tiny_patch16_224", **settings)


def encoder():
    return deepcopy(vit(num_classes=0))


def mlp(width, classes=5):
    return nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, classes))


class Own(nn.Module):
    """A backbone and a head of several layers, as people write it."""

    def __init__(self, backbone, head, read=lambda output: output):
        super().__init__()
        self.encoder, self.head, self.read = backbone, head, read

    def forward(self, images):
        return self.head(self.read(self.encoder(images)))


class OwnTokens(Own):
    """The class token of a backbone, and a head."""

    def forward(self, images):
        return self.head(self.encoder.forward_features(images)[:, 0])


class Normalise(nn.Module):
    """The normalisation of images as a layer."""

    def forward(self, images):
        return (images - 0.5) / 0.25


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


def hugging_face(name):
    return HUGGING_FACE[name][0]()


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
    "timm DaViT": small("davit_tiny", depths=(1, 1), embed_dims=(24, 32), num_heads=(2, 2), num_groups=None),
    "timm Hiera": small("hiera_tiny_224", embed_dim=24, num_heads=1, stages=(1, 1, 1, 1)),
    "timm ResNet": small("test_resnet"),
    "timm ConvNeXt": small("test_convnext"),
    "timm EfficientNet": small("test_efficientnet"),
    "timm MLP-Mixer": small("mixer_s16_224", img_size=32, num_blocks=2, embed_dim=32),
}
WRAPPED = {
    "nn.DataParallel": lambda: nn.DataParallel(vit()),
    "ModelEmaV3 of timm": ema,
    "AveragedModel of torch": lambda: torch.optim.swa_utils.AveragedModel(vit()),
    "torch.compile": lambda: torch.compile(vit(), backend="eager"),
    "torch.compile of every block": compiled_blocks,
    "LightningModule": lambda: Trained(vit()),
    "LightningModule of a DataParallel": lambda: Trained(nn.DataParallel(vit())),
    "nn.Sequential(normalisation, ViT)": lambda: nn.Sequential(Normalise(), vit()),
    "nn.Sequential(ViT, linear layer)": lambda: nn.Sequential(encoder(), nn.Linear(24, 5)),
    "nn.Sequential(ViT, MLP)": lambda: nn.Sequential(encoder(), mlp(24)),
    "own module, ViT and MLP": lambda: Own(encoder(), mlp(24)),
    "own module, class token of a ViT": lambda: OwnTokens(encoder(), mlp(24)),
    "own module, ViT of transformers": lambda: Own(
        hugging_face("ViT without a head"), mlp(32), lambda output: output.last_hidden_state[:, 0]
    ),
    "own module, DINOv2 of transformers": lambda: Own(
        hugging_face("DINOv2"), mlp(32), lambda output: output.pooler_output
    ),
    "own module, ResNet of timm": lambda: Own(small("test_resnet")().eval(), mlp(5)),
    "ViT, quantised (dynamic int8)": quantised,
}
PLAIN = {
    "own CNN": convnet,
    "own CNN of 1 channel": partial(convnet, 1),
    "own CNN of 6 channels": partial(convnet, 6),
    "TorchScript": lambda: torch.jit.trace(convnet(), torch.zeros(1, 3, 32, 32)),
}
HELD: dict[str, Callable[[], nn.Module]] = {
    **TIMM,
    **{f"torchvision {name}": build for name, build in TORCHVISION.items()},
    **{f"transformers {name}": partial(hugging_face, name) for name in HUGGING_FACE},
    **WRAPPED,
    **PLAIN,
}


class Row(NamedTuple):
    """A row of the table."""

    found: str
    difference: str
    methods: int
    auto: str


def describe(name):
    """What `as_target` makes of a model: what it says, the difference of outputs, the number of methods, and `auto`."""
    model, said = HELD[name](), io.StringIO()
    print_once.cache_clear()
    settings = SIZE if name in PLAIN or "quantised" in name else {}
    channels = re.search(r"(\d) channels?", name)
    if channels and name in PLAIN:
        settings = settings | {"mean": [0.5] * int(channels[1]), "std": [0.5] * int(channels[1])}
    with contextlib.redirect_stderr(said):
        target = as_target(model, **settings)
        embeds = not target.num_classes if hasattr(target.head, "num_classes") else False
        _, auto = choose(target, purpose="likeness" if embeds else "classes")
    lines = said.getvalue().splitlines()
    first = "; ".join(
        re.sub(r"; mean .*|, with outputs that differ.*|; outputs differ.*", "", line) for line in lines[:-1]
    )
    difference = re.search(r"differ by at most (\S+?)[;,]", said.getvalue())
    return Row(first or "as it is", difference[1] if difference else "0", len(posthoc.methods_for(target)), auto)


if __name__ == "__main__":
    for held in HELD:
        try:
            print("|", held, "|", " | ".join(map(str, describe(held))), "|", flush=True)
        except Exception as error:
            print("|", held, "| FAILED", type(error).__name__, str(error)[:300], flush=True)

"""Small CLIPs with random weights, by names that open_clip knows."""

import json
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import timm
import torch
from conftest import wake
from torch.nn import functional

from explainers.models import TargetModel
from explainers.text import TextHead, clip_text_head

OPENAI = "vit_base_patch32_clip_quickgelu_224.openai"
GELU = "vit_base_patch32_clip_224.laion2b"
IMAGE = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 16}
VISION = {"image_size": 32, "layers": 2, "width": 24, "head_width": 8, "patch_size": 8}
TEXT = {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
TINY = {"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT}
CONFIGS = {
    "tiny": TINY,
    "tiny-quickgelu": TINY | {"quick_gelu": True},
    "tiny-wide": TINY | {"embed_dim": 20},
    "tiny-map": TINY | {"vision_cfg": {"image_size": 32, "timm_model_name": "vit_base_patch16_siglip_224"}},
    "tiny-deep": TINY | {"vision_cfg": VISION | {"layers": 3}},
}


@cache
def open_clip():
    """open_clip, which knows the small models."""
    library = pytest.importorskip("open_clip")
    with TemporaryDirectory() as folder:
        for name, config in CONFIGS.items():
            (Path(folder) / f"{name}.json").write_text(json.dumps(config))
        library.add_model_config(folder)
    return library


@cache
def clip(name="tiny-quickgelu"):
    """A small CLIP of open_clip."""
    return wake(open_clip().create_model(name, pretrained=None)).eval()


def image_tower(name=OPENAI, **settings):
    """A small image tower of timm."""
    arguments = {key: value for key, value in (IMAGE | settings).items() if value is not None}
    return TargetModel(wake(timm.create_model(name, **arguments))).eval()


def random_directions(texts, width=24):
    """A text tower without a model: random directions that depend on the text alone."""
    seeds = [int(sha256(text.encode()).hexdigest()[:8], 16) for text in texts]
    rows = [torch.randn(width, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return functional.normalize(torch.stack(rows), dim=-1)


def random_text_head(target):
    """A text head of texts with random embeddings, for towers without a projection."""
    return TextHead(lambda texts: random_directions(texts, target.embed_dim), scale=100.0)


def small_text_head(target):
    """The text head of a small CLIP of open_clip."""
    open_clip()
    return clip_text_head(target, "tiny-quickgelu", "")

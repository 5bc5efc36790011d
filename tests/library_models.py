"""Small models of torchvision and of Hugging Face transformers, with weights of the size that training gives."""

from functools import cache, partial

import torch
import transformers  # which imports a model's module when the model is first asked for
from conftest import wake
from timm.data import IMAGENET_DEFAULT_MEAN as MEAN
from timm.data import IMAGENET_DEFAULT_STD as STD
from timm.data import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from timm.layers import PatchEmbed, SwiGLUPacked
from timm.models.vision_transformer import Block
from torch import nn
from torchvision.models import VisionTransformer
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

from explainers.models import as_target

BLOCKS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
SIZE = BLOCKS | {"intermediate_size": 64}
LABELS = {"num_labels": 5}
WINDOWS = {"image_size": 32, "patch_size": 2, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
SWIN = partial(SwinTransformer, [2, 2], 24, [2, 2], [2, 4], [4, 4], num_classes=5)
SWIN_V2 = partial(SWIN, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2)
HALF = (0.5,) * 3
RELATIVE = {"use_relative_position_bias": True}
ABSOLUTE = {
    "use_shared_relative_position_bias": True,
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": False,
}
STAGES = [CNBlockConfig(16, 24, 2), CNBlockConfig(24, 32, 1), CNBlockConfig(32, 40, 1), CNBlockConfig(40, None, 1)]
CLIP = {"vision_config": SIZE, "text_config": {"bos_token_id": 0, "eos_token_id": 1}}

PATCHES = {key: value for key, value in SIZE.items() if key != "image_size"} | {"num_patches": 16}
WIDTHS = {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 2, 1, 1], "image_size": 32}
UNITS = {
    "image_size": [32, 32],
    "embed_dim": 16,
    "depths": [1, 2],
    "num_heads": [1, 2],
    "num_query_pool": 1,
    "masked_unit_size": [4, 4],
    "masked_unit_attention": [True, False],
}

TORCHVISION = {
    "ViT": lambda: VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=5),
    "ViT with two layers in its head": lambda: VisionTransformer(32, 8, 2, 4, 32, 64, 0.1, 0.1, 5, 12),
    "Swin": SWIN,
    "Swin v2": SWIN_V2,
    "ResNet": lambda: ResNet(BasicBlock, [1, 1, 1, 1], 5),
    "ResNeXt": lambda: ResNet(Bottleneck, [1, 1, 1, 1], 5, groups=4, width_per_group=8),
    "ConvNeXt": lambda: ConvNeXt(STAGES, num_classes=5),
}
"""Name → function that builds a model that returns logits, of images normalised by ImageNet's mean and deviation."""

HALVES, IMAGENET, OPENAI = (HALF, HALF), (MEAN, STD), (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)
BASIC = {"hidden_sizes": [64, 128, 256, 512], "depths": [1] * 4, "layer_type": "basic"}
GATED = {"use_gated_mlp": True, "hidden_act": "silu", "query_bias": False, "value_bias": False}
KINDS = {
    "ViT": ("ViTForImageClassification", SIZE, HALVES),
    "ViT without a head": ("ViTModel", SIZE | {"qkv_bias": False}, HALVES),
    "DeiT": ("DeiTForImageClassification", SIZE, IMAGENET),
    "DeiT distilled": ("DeiTForImageClassificationWithTeacher", SIZE, IMAGENET),
    "DINOv2": ("Dinov2Model", BLOCKS, IMAGENET),
    "DINOv2 that classifies": ("Dinov2ForImageClassification", BLOCKS, IMAGENET),
    "DINOv2 with SwiGLU": ("Dinov2Model", BLOCKS | {"use_swiglu_ffn": True}, IMAGENET),
    "DINOv2 with registers": ("Dinov2WithRegistersModel", BLOCKS, IMAGENET),
    "BEiT": ("BeitForImageClassification", SIZE | RELATIVE, HALVES),
    "BEiT by its class token": ("BeitForImageClassification", SIZE | ABSOLUTE, HALVES),
    "BEiT without a head": ("BeitModel", SIZE, HALVES),
    "Swin": ("SwinForImageClassification", WINDOWS, IMAGENET),
    "Swin without a head": ("SwinModel", WINDOWS, IMAGENET),
    "CLIP": ("CLIPVisionModel", SIZE, OPENAI),
    "CLIP with its projection": ("CLIPVisionModelWithProjection", SIZE | {"projection_dim": 16}, OPENAI),
    "CLIP that classifies": ("CLIPForImageClassification", CLIP, OPENAI),
    "SigLIP": ("SiglipVisionModel", SIZE, HALVES),
    "SigLIP that classifies": ("SiglipForImageClassification", {"vision_config": SIZE}, HALVES),
    "SigLIP 2": ("Siglip2VisionModel", PATCHES, HALVES),
    "SigLIP 2 that classifies": ("Siglip2ForImageClassification", {"vision_config": PATCHES}, HALVES),
    "DINOv3": ("DINOv3ViTModel", SIZE | {"num_register_tokens": 4}, IMAGENET),
    "DINOv3 with SwiGLU": ("DINOv3ViTModel", SIZE | GATED, IMAGENET),
    "ConvNeXt": ("ConvNextForImageClassification", WIDTHS, IMAGENET),
    "ConvNeXt V2": ("ConvNextV2Model", WIDTHS, IMAGENET),
    "ResNet": ("ResNetForImageClassification", BASIC, IMAGENET),
    "Hiera": ("HieraForImageClassification", UNITS, IMAGENET),
    "Hiera without a head": ("HieraModel", UNITS, IMAGENET),
}
"""Name → class of transformers, settings of its config, and the mean and standard deviation of its images."""


def hugging_face(name):
    """A model, and the output that its target gives."""
    kind, settings, _ = KINDS[name]
    model = getattr(transformers, kind)
    if "Classification" in kind:
        return model(model.config_class(**settings, **LABELS)), "logits"
    outputs = {"ViTModel": "token", "CLIPVisionModelWithProjection": "image_embeds"}
    return model(model.config_class(**settings)), outputs.get(kind, "pooler_output")


TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 60}
ENDS = {"bos_token_id": 1, "eos_token_id": 59, "pad_token_id": 0, "max_position_embeddings": 9}
TWO_TOWERS = {
    "CLIP": lambda: two_towers("CLIP", SIZE, {}, projection_dim=12),
    "TinyCLIP": lambda: two_towers("CLIP", SIZE | {"hidden_act": "gelu"}, {}, projection_dim=20),
    "SigLIP": lambda: two_towers("Siglip", SIZE, {"projection_size": 32}),
}
"""Name → function that builds a model with two towers."""


def two_towers(kind, images, texts, **settings):
    config = getattr(transformers, f"{kind}Config")(vision_config=images, text_config=TEXT | ENDS | texts, **settings)
    return getattr(transformers, f"{kind}Model")(config)


def tokenise(texts, max_length=9, **_):
    """A tokeniser of letters: the first one of each word, an end, and zeros for the rest."""
    rows = [[1, *(2 + ord(word[0]) % 50 for word in text.split())][: max_length - 1] + [59] for text in texts]
    ids = torch.tensor([row + [0] * (max_length - len(row)) for row in rows])
    lengths = torch.tensor([[len(row)] for row in rows])
    return {"input_ids": ids, "attention_mask": (torch.arange(max_length) < lengths).long()}


NAMES = [f"torchvision {name}" for name in TORCHVISION] + [f"transformers {name}" for name in KINDS]


def patches_of(images):
    """Patches (B, 16, 8 · 8 · 3) of images of 32 × 32 pixels, cut one by one."""
    cut = [images[:, :, top : top + 8, left : left + 8] for top in range(0, 32, 8) for left in range(0, 32, 8)]
    return torch.stack([patch.permute(0, 2, 3, 1).flatten(1) for patch in cut], 1)


class Original:
    """A model of another library, whose inputs are normalised here, step by step."""

    def __init__(self, name):
        library, _, kind = name.partition(" ")
        if library == "torchvision":
            self.model, self.output, mean, std = TORCHVISION[kind](), None, MEAN, STD
        else:
            (self.model, self.output), (mean, std) = hugging_face(kind), KINDS[kind][2]
        wake(self.model)
        for buffer, values in self.model.named_buffers():
            if buffer.endswith("running_var"):
                values.mul_(0.5 + torch.rand(values.shape))
        self.mean, self.std = (torch.tensor(values)[:, None, None] for values in (mean, std))

    def normalise(self, images):
        return (images.float() / 255 - self.mean) / self.std

    def outputs(self, normalised):
        if self.output is None:
            return self.model(normalised)
        if "Siglip2" in type(self.model).__name__:  # whose image processor cuts patches
            shape = torch.tensor([[4, 4]] * len(normalised))
            outputs = self.model(patches_of(normalised), torch.ones(len(normalised), 16), shape)
        else:
            outputs = self.model(pixel_values=normalised)
        return outputs.last_hidden_state[:, 0] if self.output == "token" else outputs[self.output]


@cache
def converted(name):
    """An original in eval mode, and its target."""
    original = Original(name)
    original.model.eval()
    return original, as_target(original.model, image_size=None if "transformers" in name else 32)


class DinoVisionTransformer(nn.Module):
    """DINOv2 as torch.hub has it, by its names; its blocks are timm's, which have the same names."""

    def __init__(self, registers=0, chunks=1, swiglu=False):
        super().__init__()
        self.embed_dim, self.n_blocks, self.num_heads, self.patch_size = 32, 2, 4, 8
        self.patch_embed = PatchEmbed(32, 8, 3, 32, strict_img_size=False)
        self.cls_token, self.pos_embed = nn.Parameter(torch.randn(1, 1, 32)), nn.Parameter(torch.randn(1, 17, 32))
        self.register_tokens = nn.Parameter(torch.randn(1, registers, 32)) if registers else None
        self.mask_token = nn.Parameter(torch.zeros(1, 32))
        norm = partial(nn.LayerNorm, eps=1e-6)
        layers = {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU} if swiglu else {}
        blocks = [Block(32, 4, qkv_bias=True, init_values=0.5, norm_layer=norm, **layers) for _ in range(2)]
        for block in blocks if swiglu else ():
            block.mlp = Swiglu(block.mlp)
        wanted = [nn.ModuleList(blocks[:1]), nn.ModuleList([nn.Identity(), blocks[1]])] if chunks else blocks
        self.blocks, self.norm, self.head = nn.ModuleList(wanted), norm(32), nn.Identity()

    def interpolate_pos_encoding(self, tokens, width, height):
        if (width, height) == (32, 32):
            return self.pos_embed
        grid = self.pos_embed[:, 1:].mT.unflatten(-1, (4, 4))
        resized = nn.functional.interpolate(grid, (width // 8, height // 8), mode="bicubic").flatten(2).mT
        return torch.cat([self.pos_embed[:, :1], resized], 1)

    def forward_features(self, images):
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), self.patch_embed(images)], 1)
        tokens = tokens + self.interpolate_pos_encoding(tokens, *images.shape[2:])
        count = 0 if self.register_tokens is None else self.register_tokens.shape[1]
        if count:
            registers = self.register_tokens.expand(len(images), -1, -1)
            tokens = torch.cat([tokens[:, :1], registers, tokens[:, 1:]], 1)
        for block in self.blocks:
            for layer in block if isinstance(block, nn.ModuleList) else [block]:
                tokens = layer(tokens)
        tokens = self.norm(tokens)
        return {"x_norm_clstoken": tokens[:, 0], "x_norm_patchtokens": tokens[:, 1 + count :], "masks": None}

    def forward(self, images):
        return self.head(self.forward_features(images)["x_norm_clstoken"])


DinoVisionTransformer.__module__ = "dinov2.models.vision_transformer"


class Swiglu(nn.Module):
    """The gated layer of DINOv2 by its names."""

    def __init__(self, mlp):
        super().__init__()
        self.w12, self.w3 = mlp.fc1, mlp.fc2

    def forward(self, tokens):
        gate, values = self.w12(tokens).chunk(2, -1)
        return self.w3(nn.functional.silu(gate) * values)

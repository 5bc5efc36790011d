"""What self-explaining models read of patches: their embeddings, beside those of the images."""

import pytest
import torch

from explainers.vectors.fixed_head import patch_means

SWIN = {"img_size": 32, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4}
SIGLIP = "vit_base_patch16_siglip_224"


def last_tokens(prefix):
    return lambda model, seen: (seen[:, 0], seen[:, prefix:])


def averaged(model, seen):
    """Patches are normalised as their average is."""
    return model.fc_norm(seen[:, 1:].mean(1)), model.fc_norm(seen[:, 1:])


def pooled(model, seen):
    """Patches are pooled like an image of one patch."""
    return model.attn_pool(seen), torch.stack([model.attn_pool(seen[:, z : z + 1]) for z in range(16)], 1)


def row_by_row(model, seen):
    side = seen.shape[1]
    return seen.mean((1, 2)), torch.stack([seen[:, z // side, z % side] for z in range(side**2)], 1)


PATCHES = {
    "ViT": ("vit_tiny_patch16_224", {}, "norm", last_tokens(1)),
    "DeiT": ("deit_tiny_patch16_224", {}, "norm", last_tokens(1)),
    "registers": ("vit_small_patch14_reg4_dinov2", {}, "norm", last_tokens(5)),
    "average": ("vit_tiny_patch16_224", {"global_pool": "avg"}, "blocks.1", averaged),
    "SigLIP": (SIGLIP, {"num_classes": 3}, "norm", pooled),
    "Swin": ("swin_tiny_patch4_window7_224", SWIN, "norm", row_by_row),
    "ResNet": ("test_resnet", {}, "layer4", lambda model, seen: row_by_row(model, seen.permute(0, 2, 3, 1))),
}


@torch.no_grad()
@pytest.mark.parametrize(("name", "arguments", "layer", "expected"), PATCHES.values(), ids=PATCHES)
def test_embeddings_of_image_and_patches_follow_from_the_last_layer_in_one_pass(
    make_target, name, arguments, layer, expected
):
    target, answers, side = make_target(name, **arguments), [], 96 if name == "test_resnet" else 32
    normalised = target.normalise(torch.randint(0, 256, (2, 3, side, side), dtype=torch.uint8))
    target.backbone.get_submodule(layer).register_forward_hook(lambda *call: answers.append(call[-1]))
    embeddings, patches = target.embed_with_patches(normalised)
    (seen,) = answers
    assert patches.shape[1] == (9 if side == 96 else 16)
    for found, wanted in zip((embeddings, patches), expected(target.backbone, seen), strict=True):
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(embeddings, target.embed(normalised))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("deit_tiny_distilled_patch16_224", {}), ("test_convnext", {}), ("test_efficientnet", {"num_classes": 3})],
)
def test_models_whose_patches_go_another_way_than_their_images_are_refused(make_target, images, name, arguments):
    target = make_target(name, **arguments)
    if name == "test_efficientnet":  # as MobileNetV3, with layers between the pooling and the classifier
        target.embed_dim += 1
    with pytest.raises(ValueError, match=f"expected a model that can embed single patches like images, got {name}"):
        target.embed_with_patches(target.normalise(images))


@pytest.mark.parametrize(("shape", "size"), [((2, 2), 2), ((2, 3), 2), ((3, 2), 3), ((4, 4), 1), ((1, 1), 3)])
def test_a_coarser_patch_is_the_mean_of_its_parts(shape, size):
    rows, columns = shape
    patches = torch.randn(2, rows * columns * size**2, 3)
    means = patch_means(patches, shape)
    assert means.shape == (2, rows * columns, 3)
    for patch in range(rows * columns):
        row, column = divmod(patch, columns)
        parts = [(row * size + r) * columns * size + column * size + c for r in range(size) for c in range(size)]
        torch.testing.assert_close(means[:, patch], sum(patches[:, part] for part in parts) / len(parts))

"""What self-explaining models read of patches: their embeddings, beside those of the images."""

import pytest
import torch
from torch import nn

from explainers.vectors.fixed_head import patch_means

SWIN = {"img_size": 32, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4}


def listen(module):
    """What a module answers from now on."""
    answers = []
    module.register_forward_hook(lambda *call: answers.append(call[-1]))
    return answers


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "tokens"),
    [("vit_tiny_patch16_224", 1), ("deit_tiny_patch16_224", 1), ("vit_small_patch14_reg4_dinov2", 5)],
)
def test_patches_of_a_vit_are_its_last_tokens_in_one_pass(make_target, images, name, tokens):
    target = make_target(name)
    normalised = target.normalise(images)
    answers = listen(target.backbone.norm)
    embeddings, patches = target.embed_with_patches(normalised)
    (seen,) = answers
    torch.testing.assert_close(embeddings, target.embed(normalised))
    torch.testing.assert_close(embeddings, seen[:, 0])
    assert patches.shape == (5, 16, 24)
    for patch in range(16):
        torch.testing.assert_close(patches[:, patch], seen[:, tokens + patch])


@torch.no_grad()
def test_patches_of_an_averaging_vit_are_normalised_as_their_average_is(make_target, images):
    target = make_target(global_pool="avg")
    norm = target.backbone.fc_norm
    assert isinstance(norm, nn.LayerNorm)
    answers = listen(target.backbone.blocks[-1])
    embeddings, patches = target.embed_with_patches(target.normalise(images))
    (seen,) = answers
    torch.testing.assert_close(embeddings, norm(seen[:, 1:].mean(1)))
    for patch in range(16):
        torch.testing.assert_close(patches[:, patch], norm(seen[:, 1 + patch]))


@torch.no_grad()
def test_patches_of_siglip_are_pooled_like_an_image_of_one_patch(make_target, images):
    target = make_target("vit_base_patch16_siglip_224", num_classes=3)
    answers = listen(target.backbone.norm)
    embeddings, patches = target.embed_with_patches(target.normalise(images))
    (seen,) = answers
    torch.testing.assert_close(embeddings, target.backbone.attn_pool(seen))
    for patch in range(16):
        torch.testing.assert_close(patches[:, patch], target.backbone.attn_pool(seen[:, patch : patch + 1]))
    single = make_target("vit_base_patch16_siglip_224", num_classes=3, img_size=8)
    embeddings, patches = single.embed_with_patches(single.normalise(images[..., :8, :8]))
    torch.testing.assert_close(patches[:, 0], embeddings)


@torch.no_grad()
def test_patches_of_a_swin_are_read_row_by_row(make_target, images):
    target = make_target("swin_tiny_patch4_window7_224", **SWIN)
    answers = listen(target.backbone.norm)
    embeddings, patches = target.embed_with_patches(target.normalise(images))
    (seen,) = answers
    assert patches.shape == (5, 16, 24)
    for patch in range(16):
        torch.testing.assert_close(patches[:, patch], seen[:, patch // 4, patch % 4])
    torch.testing.assert_close(embeddings, patches.mean(1))


@torch.no_grad()
def test_the_mean_of_a_resnets_patches_is_the_embedding(make_target):
    target = make_target("test_resnet")
    images = torch.randint(0, 256, (2, 3, 96, 96), dtype=torch.uint8)
    answers = listen(target.backbone.layer4)
    embeddings, patches = target.embed_with_patches(target.normalise(images))
    (seen,) = answers
    assert patches.shape == (2, 9, 96)
    for patch in range(9):
        torch.testing.assert_close(patches[:, patch], seen[:, :, patch // 3, patch % 3])
    torch.testing.assert_close(patches.mean(1), embeddings)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("deit_tiny_distilled_patch16_224", {}),
        ("test_convnext", {}),
        ("test_efficientnet", {"num_classes": 3}),
    ],
)
def test_models_whose_patches_go_another_way_than_their_images_are_refused(make_target, images, name, arguments):
    target = make_target(name, **arguments)
    if name == "test_efficientnet":  # as MobileNetV3, with layers between the pooling and the classifier
        target.embed_dim += 1
    with pytest.raises(ValueError, match=f"expected a model that can embed single patches like images, got {name}"):
        target.embed_with_patches(target.normalise(images))


@pytest.mark.parametrize(("own", "side"), [(4, 2), (6, 3), (6, 2), (4, 4), (3, 1)])
def test_a_coarser_patch_is_the_mean_of_its_parts(own, side):
    patches = torch.randn(2, own**2, 3)
    means = patch_means(patches, side)
    assert means.shape == (2, side**2, 3)
    for patch in range(side**2):
        row, column, size = patch // side, patch % side, own // side
        parts = [(row * size + r) * own + column * size + c for r in range(size) for c in range(size)]
        torch.testing.assert_close(means[:, patch], sum(patches[:, part] for part in parts) / len(parts))

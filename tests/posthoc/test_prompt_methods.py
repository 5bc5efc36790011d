"""Grad-ECLIP, MaskCLIP and NACLIP: methods from papers on CLIP, which explain prompts and any other functional."""

import pytest
import references_attention as slow
import references_dense as references
import torch
from references_attention import agree

from explainers import VectorExplainer, posthoc
from explainers.masking import PatchGrid

CLASSES = torch.tensor([3, 0, 4, 1, 1])
CLIP = "vit_base_patch32_clip_quickgelu_224", {"num_classes": 16}
MODELS = {"clip": CLIP, **{name: model for name, model in slow.MODELS.items() if name != "vit"}}
DENSE = {name: model for name, model in MODELS.items() if name != "distilled"}
WITHOUT_A_WALK = {
    "beit": "beit_base_patch16_224",
    "dinov2 with registers": "vit_small_patch14_reg4_dinov2",
    "dinov3": "vit_small_patch16_dinov3",
    "separate values": "eva02_base_patch14_224",
}
METHODS = ["GradECLIP", "MaskCLIP", "NACLIP"]


def small(make_target, name, **arguments):
    size = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    return make_target(name, **(size | arguments))


def check_reference(make_target, images, grid, model, method, reference, **options):
    """Heatmaps of two functionals, and the slow version for one image."""
    name, arguments = model
    target = small(make_target, name, **arguments).double()
    with slow.in_double():
        functionals = torch.randn(len(images), 2, target.embed_dim)
        found = method(target, grid, **options).explain(images, functionals)
        seen = slow.walk(target, target.normalise(images)[1])
        for i in range(2):
            agree(found[1, i].flatten(), reference(seen, functionals[1, i], **options), 1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_grad_eclip_weighs_channels_by_gradients_and_patches_by_cosines(make_target, grid, images, name):
    check_reference(make_target, images, grid, MODELS[name], posthoc.GradECLIP, references.grad_eclip)


@pytest.mark.parametrize("options", [{"layers": 2}, {"similarity": "projected"}], ids=str)
def test_options_of_grad_eclip(make_target, grid, images, options):
    check_reference(make_target, images, grid, CLIP, posthoc.GradECLIP, references.grad_eclip, **options)


@pytest.mark.parametrize("block", ["values", "whole"])
@pytest.mark.parametrize("name", DENSE)
def test_mask_clip_projects_the_values_of_each_patch(make_target, grid, images, name, block):
    check_reference(make_target, images, grid, DENSE[name], posthoc.MaskCLIP, references.mask_clip, block=block)


@pytest.mark.parametrize("name", DENSE)
def test_naclip_attends_to_similar_keys_and_to_neighbours(make_target, grid, images, name):
    check_reference(make_target, images, grid, DENSE[name], posthoc.NACLIP, references.naclip)


def test_a_narrow_kernel(make_target, grid, images):
    check_reference(make_target, images, grid, CLIP, posthoc.NACLIP, references.naclip, std=0.7)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", WITHOUT_A_WALK)
def test_other_transformers_are_explained(make_target, grid, images, name, method):
    target = small(make_target, WITHOUT_A_WALK[name])
    found = posthoc.build(method, target, grid)(images, CLASSES)
    assert found.isfinite().all() and found.std() > 0


@pytest.mark.parametrize("method", [*METHODS, "DirectPaths", "PathFlow"])
def test_constant_images_have_heatmaps_without_nan(target, grid, method):
    images = torch.full((2, 3, 32, 32), 128, dtype=torch.uint8)
    with torch.no_grad():
        target.backbone.pos_embed.zero_()  # all patches are alike
    found = posthoc.build(method, target, grid)(images, CLASSES[:2])
    assert found.isfinite().all() and found.flatten(1).std(1).max() < 1e-4


@pytest.mark.parametrize("method", ["MaskCLIP", "NACLIP", "DirectPaths", "PathFlow"])
def test_heatmaps_are_products_with_the_vectors_of_patches(target, images, method):
    functionals = torch.randn(5, 7, 24)
    for size in (8, 16):
        grid = PatchGrid(32, size, differs=True)
        explainer = posthoc.build(method, target, grid)
        assert isinstance(explainer, VectorExplainer)
        vectors, embeddings = explainer.decompose(images)
        assert vectors.shape == (5, grid.num_patches, 24)
        heatmaps = explainer.explain(images, functionals).flatten(2)
        torch.testing.assert_close(functionals @ vectors.mT, heatmaps, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(embeddings, target.embed(target.normalise(images)))
        assert not (vectors.requires_grad or embeddings.requires_grad)

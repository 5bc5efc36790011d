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
WITHOUT_A_WALK = {
    "beit": "beit_base_patch16_224",
    "dinov2 with registers": "vit_small_patch14_reg4_dinov2",
    "dinov3": "vit_small_patch16_dinov3",
    "separate values": "eva02_base_patch14_224",
}
METHODS = ["GradECLIP", "MaskCLIP", "NACLIP"]
FORMULAS = dict(zip(METHODS, (references.grad_eclip, references.mask_clip, references.naclip), strict=True))
CASES = [(model, method, {}) for model in MODELS for method in METHODS if model != "distilled"]
CASES += [(model, "MaskCLIP", {"block": "whole"}) for model in MODELS if model != "distilled"]
CASES += [("distilled", "GradECLIP", {}), ("clip", "NACLIP", {"std": 0.7})]
CASES += [("clip", "GradECLIP", options) for options in ({"layers": 2}, {"similarity": "projected"})]


def small(make_target, name, **arguments):
    size = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    return make_target(name, **(size | arguments))


@pytest.mark.parametrize(("model", "method", "options"), CASES, ids=str)
def test_heatmaps_of_two_functionals_are_the_formula(make_target, grid, images, model, method, options):
    name, arguments = MODELS[model]
    target = small(make_target, name, **arguments).double()
    with slow.in_double():
        images, functionals = images[:2], torch.randn(2, 2, target.embed_dim)
        found = posthoc.build(method, target, grid, options).explain(images, functionals)
        seen = slow.walk(target, target.normalise(images)[1])
        for i in range(2):
            agree(found[1, i].flatten(), FORMULAS[method](seen, functionals[1, i], **options), 1e-7)


@pytest.mark.parametrize("name", WITHOUT_A_WALK)
def test_other_transformers_are_explained(make_target, grid, images, name):
    target = small(make_target, WITHOUT_A_WALK[name])
    for method in METHODS:
        found = posthoc.build(method, target, grid)(images[:2], CLASSES[:2])
        assert found.isfinite().all() and found.std() > 0


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

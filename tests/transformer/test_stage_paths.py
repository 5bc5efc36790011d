"""Paths of stages against loops over positions and patches, and in an AnyHead."""

from functools import partial

import pytest
import torch
from conftest import timm_model, wake

from explainers import posthoc
from explainers.anyhead import AnyHead, AnyHeadNetwork
from explainers.masking import PatchGrid
from explainers.transformer.direct_paths import default_direct
from explainers.transformer.stage_paths import default_stages, record_stage_paths, stage_paths, sum_stage_paths

MODELS = {
    "test_resnet": {},
    "test_efficientnet": {},
    "swin_tiny_patch4_window7_224": {
        "img_size": 32,
        "window_size": 2,
        "patch_size": 2,
        "embed_dim": 12,
        "depths": (1, 1, 1),
        "num_heads": (1, 2, 2),
    },
}


@pytest.fixture(scope="module", params=MODELS)
def target(request):
    return timm_model(request.param, as_target=True, **MODELS[request.param])


def images(target, count=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, 3, *target.grid.size), dtype=torch.uint8, generator=generator)


def blank(target):
    return torch.zeros(1, 3, *target.grid.size)


@torch.no_grad()
def test_vectors_sum_to_the_embedding_minus_that_of_a_blank_image(target):
    vectors, embeddings = posthoc.build("StagePaths", target, target.grid).decompose(images(target))
    expected = embeddings - target.embed(blank(target))
    assert vectors.shape == (2, target.grid.num_patches, target.embed_dim)
    assert (vectors.sum(1) - expected).abs().max() < 1e-5 * expected.abs().max()


@torch.no_grad()
def test_every_position_is_shared_out_by_the_change_of_the_stage(target):
    """Loops over positions and patches; the interpolation is that of an image with one pixel."""
    normalised, stage = target.normalise(images(target)), default_stages(target)[0]
    embeddings, _, record = record_stage_paths(target, normalised, [stage])
    rows = columns = int(stage_paths(record).shape[2] ** 0.5)
    assert (embeddings - target.embed(normalised)).abs().max() < 1e-4
    for number in range(2):
        (_, last), (_, last0) = (target.embed_with_patches(x) for x in (normalised[[number]], blank(target)))
        (_, (map_,)), (_, (map0,)) = (target.embed_with_maps(x, [stage]) for x in (normalised[[number]], blank(target)))
        side = int(map_.shape[1] ** 0.5)
        resize = partial(torch.nn.functional.interpolate, size=(rows, columns), mode="bilinear", antialias=True)
        activity = resize((map_ - map0)[0].norm(dim=-1).view(1, 1, side, side)).flatten()
        expected = torch.zeros(rows * columns, target.embed_dim)
        for position in range(last.shape[1]):
            pixel = torch.zeros(last.shape[1])
            pixel[position] = 1
            share = resize(pixel.view(1, 1, int(len(pixel) ** 0.5), -1)).flatten() * activity
            for patch in range(rows * columns):
                c = (last[0, position] - last0[0, position]) / last.shape[1]
                expected[patch] += share[patch] / share.sum() * c
        assert (stage_paths(record)[number, 0] - expected).abs().max() < 1e-4 * expected.abs().max()


@torch.no_grad()
def test_products_and_few_patches_are_those_of_all_vectors(target):
    _, _, record = record_stage_paths(target, target.normalise(images(target)), default_stages(target))
    paths, functionals = stage_paths(record), torch.randn(2, 4, target.embed_dim)
    products = stage_paths(record, functionals)
    assert (products - paths @ functionals[:, None].mT).abs().max() < 1e-4 * products.abs().max()
    patches, weights = torch.tensor([[3, 1], [0, 2]]), torch.rand(2, 2, paths.shape[1])
    expected = torch.stack([torch.einsum("pl,lpd->pd", weights[b], paths[b][:, patches[b]]) for b in range(2)])
    assert (sum_stage_paths(record, patches, weights) - expected).abs().max() < 1e-5 * expected.abs().max()


@torch.no_grad()
def test_a_planted_patch_is_found_at_its_row_and_column():
    target = timm_model("test_resnet", as_target=True)
    method, size = posthoc.build("StagePaths", target, target.grid), target.grid.patch_size
    grey = (255 * target.mean).round().to(torch.uint8).expand(1, 3, *target.grid.size).clone()
    grey[..., 7 * size : 8 * size, 2 * size : 3 * size] = torch.randint(0, 256, (size, size), dtype=torch.uint8)
    vectors, _ = method.decompose(grey)
    place = vectors[0].norm(dim=-1).argmax().item()
    assert divmod(place, target.grid.shape[1]) == (7, 2)


@torch.no_grad()
def test_an_untrained_anyhead_is_the_sum_of_the_paths(target):
    """On the grid of the finest stage, to which positions are shared out."""
    stages, given = default_stages(target), images(target)
    _, (finest,) = target.embed_with_maps(target.normalise(given), stages[:1])
    grid = PatchGrid(given.shape[-1], given.shape[-1] // int(finest.shape[1] ** 0.5), differs=True)
    network = partial(AnyHeadNetwork, blocks=stages, width=8, depth=1, direct=stages, paths="stages")
    explainer = AnyHead(target, grid, network, blend=1.0).eval()
    heatmaps = explainer.explain(given, functional := torch.randn(2, target.embed_dim))
    expected = posthoc.build("StagePaths", target, grid).explain(given, functional)
    assert (heatmaps - expected).abs().max() < 1e-4 * expected.abs().max()
    wake(explainer.network)
    explainer.blend = 0.5
    vectors, embeddings = explainer.decompose(given)
    again, products, few = explainer.decompose_lazily(given)
    assert (again - embeddings).abs().max() < 1e-5
    assert (products(functional[:, None])[:, 0] - torch.einsum("bnd,bd->bn", vectors, functional)).abs().max() < 1e-3
    assert (few(torch.tensor([[1], [2]]))[:, 0] - vectors[[0, 1], [1, 2]]).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["test_vit", "mobilenetv3_small_050", "test_convnext"])
def test_models_whose_embedding_is_no_mean_of_a_map_have_none(name):
    assert default_stages(timm_model(name, as_target=True)) == []


def test_stages_are_no_blocks_of_direct_paths(target):
    assert default_direct(target) == []

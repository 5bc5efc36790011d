"""Direct paths as an explainer; `test_direct` has the paths themselves."""

import pytest
import torch

from explainers.errors import InputError
from explainers.masking import PatchGrid
from explainers.posthoc import DirectPaths
from explainers.transformer.direct_paths import direct_paths, head_paths, record_direct

CLASSES = torch.tensor([3, 0, 4, 1, 1])


@pytest.mark.parametrize("start, blocks", [(None, [2]), (0, [0, 1, 2]), (-2, [1, 2])])
def test_a_heatmap_is_the_product_of_the_row_of_the_class_and_the_paths(make_target, grid, images, start, blocks):
    target = make_target(depth=3)
    with torch.no_grad(), record_direct(target, blocks) as record:
        target.embed(target.normalise(images))
    found, paths = DirectPaths(target, grid, start=start)(images, CLASSES), direct_paths(target, record)
    for i, label in enumerate(CLASSES.tolist()):
        for patch in range(16):
            expected = sum(torch.dot(target.head.weight[label], paths[i, layer, patch]) for layer in range(len(blocks)))
            assert found[i, patch // 4, patch % 4].item() == pytest.approx(expected.item(), rel=1e-3, abs=1e-4)


def test_a_coarser_grid_has_the_same_sum(target, grid, images):
    fine, coarse = (DirectPaths(target, each)(images, CLASSES) for each in (grid, PatchGrid(32, 16, differs=True)))
    assert coarse.shape == (5, 2, 2)
    torch.testing.assert_close(coarse, fine.unflatten(1, (2, 2)).unflatten(3, (2, 2)).sum((2, 4)))


@pytest.mark.parametrize("heads", [[(0, 2), (2, 0), (2, 1)], [[-1, 1]]])
def test_paths_of_heads_are_those_of_the_vectors_of_the_heads(make_target, grid, images, heads):
    target = make_target(depth=3)
    functionals = torch.randn(5, 2, 24)
    method = DirectPaths(target, grid, heads=heads)
    with record_direct(target, [0, 1, 2]) as record:
        target.embed(target.normalise(images))
    parts = head_paths(target, record, functionals)  # (B, L, A, N, V)
    expected = sum(parts[:, block, head] for block, head in heads)
    torch.testing.assert_close(method.explain(images, functionals).flatten(2), expected.mT, rtol=1e-4, atol=1e-5)
    every = [(block, head) for block in (1, 2) for head in range(3)]
    of_every, of_blocks = (DirectPaths(target, grid, **of)(images, CLASSES) for of in ({"heads": every}, {"start": 1}))
    torch.testing.assert_close(of_every, of_blocks)


def test_scores_of_heads_sum_their_paths_over_the_patches(make_target, grid, images):
    method, functionals = DirectPaths(make_target(depth=3), grid, start=1), torch.randn(5, 2, 24)
    scores = method.head_scores(images, functionals)
    assert scores.shape == (5, 2, 2, 3)
    for block in (1, 2):
        for head in range(3):
            heatmaps = DirectPaths(method.target, grid, heads=[(block, head)]).explain(images, functionals)
            torch.testing.assert_close(scores[:, :, block - 1, head], heatmaps.sum((2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(method.head_scores(images, functionals[:, 1]), scores[:, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": []}, r"expected heads as pairs of a block and a head, such as \[\[10, 3\], \[11, 0\]\], got \[\]"),
        ({"heads": [1, 0]}, r"expected heads as pairs of a block and a head, .* got \[1, 0\]"),
        ({"heads": [[1, 3]]}, "expected heads from 0 to 2 of block 1 of vit_tiny_patch16_224, got 3"),
        ({"heads": [[1, 0], [-1, 0]]}, r"expected each of heads once, got \(1, 0\), \(1, 0\)"),
        ({"heads": [[1, 0]], "start": 1}, "expected heads or start, got heads and start=1: leave out start"),
    ],
)
def test_heads_that_do_not_exist_are_refused(target, grid, options, message):
    with pytest.raises(InputError, match=f"^{message}"):
        DirectPaths(target, grid, **options)

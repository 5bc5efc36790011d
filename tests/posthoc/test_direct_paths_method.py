"""Direct paths as an explainer; `test_direct` has the paths themselves."""

import pytest
import torch

from explainers.posthoc import DirectPaths
from explainers.transformer.direct_paths import direct_paths, record_direct

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

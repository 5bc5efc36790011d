"""DecompX and relevance, against decompositions and relevance that are propagated as tensors."""

import pytest
import references_propagation as references
import torch

from explainers.posthoc.propagation import (
    LibraGrad,
)

LABELS = torch.tensor([3, 0])


@pytest.fixture
def images(images):
    return images[:2]


def test_libragrad_is_frozen_fullgrad_plus_of_the_probability(double, grid, images):
    with torch.no_grad():
        embeddings = double.embed(double.normalise(images))
        p = double.classify(embeddings).softmax(-1).double()
    rows = torch.stack([references.of_class(double, label).double() for label in range(5)])
    expected = []
    for i, (image, label) in enumerate(zip(images, LABELS.tolist(), strict=True)):
        v = p[i, label] * (rows[label] - p[i] @ rows)
        expected.append(references.full_grad_plus(double, references.entering(double, image), v, frozen=True))
    heatmaps = LibraGrad(double, grid)(images, LABELS).double()
    for heatmap, wanted in zip(heatmaps, expected, strict=True):  # probabilities are single precision
        torch.testing.assert_close(heatmap, wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())


ROW, COLUMN = 1, 3

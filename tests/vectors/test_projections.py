import math
from functools import partial
from types import SimpleNamespace

import pytest
import references
import torch
from torch.utils.data import Dataset
from toys import Marked

from datamodules.images import Images
from explainers.vectors.fixed_head import FixedHead
from explainers.vectors.projections import prototypes, prototypes_of, simplex, simplex_of


class Few(Dataset):
    """Random images of three classes, sorted by class."""

    classes = ["ant", "bee", "cat"]

    def __init__(self, labels=(0, 0, 0, 1, 1, 1, 2, 2, 2)):
        self.labels, self.read = labels, []
        random = torch.Generator().manual_seed(5)
        self.images = torch.randint(0, 256, (len(labels), 3, 32, 32), dtype=torch.uint8, generator=random)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        self.read.append(index)
        return {"image": self.images[index], "label": self.labels[index], "index": index}


def images_of(dataset):
    return Images(train=lambda: dataset, num_workers=0)


def times(matrix, vector):
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def read_by_loop(embedding, weight, projection, normalise, scale):
    """The logits of one embedding (a list)."""
    if projection is not None:
        embedding = times(projection, embedding)
    length = math.sqrt(sum(x * x for x in embedding)) if normalise else 1
    return [scale * logit for logit in times(weight, [x / length for x in embedding])]


@pytest.mark.parametrize(("classes", "width"), [(2, 2), (5, 24)])
def test_every_two_directions_of_a_simplex_are_as_far_apart_as_can_be(classes, width):
    weight = simplex(classes, width)
    assert weight.shape == (classes, width)
    for i in range(classes):
        for j in range(classes):
            expected = 1 if i == j else -1 / (classes - 1)
            assert (weight[i] @ weight[j]).item() == pytest.approx(expected, abs=1e-5)


def test_the_simplex_of_a_model_has_its_width_and_the_data_sets_classes_and_depends_on_its_seed_alone(target):
    assert torch.equal(simplex_of(target, images_of(Few()), seed=2), simplex(3, 24, seed=2))
    assert not torch.allclose(simplex(3, 24, seed=4), simplex(3, 24, seed=2))


def test_prototypes_point_from_the_mean_of_all_classes_to_each():
    embeddings, labels = torch.randn(11, 6), torch.tensor([0, 2, 1, 1, 3, 2, 2, 2, 0, 1, 2])  # uneven classes
    expected = references.prototypes(embeddings.tolist(), labels.tolist(), 4)
    weight = prototypes(embeddings, labels, 4)
    torch.testing.assert_close(weight, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.norm(dim=1), torch.ones(4))


@pytest.mark.parametrize(("projected", "normalise", "patch_scale"), [(False, True, 0.3), (True, False, 1)])
def test_a_head_reads_images_and_patches_as_a_loop_does(projected, normalise, patch_scale):
    weight, projection = torch.randn(3, 4 if projected else 6), torch.randn(4, 6) if projected else None
    head = FixedHead(weight, projection, normalise, scale=2.5, patch_scale=patch_scale)
    embeddings, patches = torch.randn(2, 6), torch.randn(2, 7, 6)
    read = partial(
        read_by_loop, weight=weight.tolist(), projection=projection.tolist() if projected else None, normalise=normalise
    )
    logits = torch.tensor([read(row, scale=2.5) for row in embeddings.tolist()])
    torch.testing.assert_close(head(embeddings), logits, rtol=1e-4, atol=1e-5)
    attributions = torch.tensor([[read(patch, scale=patch_scale) for patch in image] for image in patches.tolist()])
    torch.testing.assert_close(head.attributions(patches, embeddings), attributions, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head(patches), attributions * 2.5 / patch_scale, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("projected", "normalise"), [(False, True), (True, False)])
def test_differences_that_sum_to_the_embedding_have_attributions_that_sum_to_the_logits(projected, normalise):
    weight, projection = torch.randn(3, 4 if projected else 6), torch.randn(4, 6) if projected else None
    head = FixedHead(weight, projection, normalise, scale=2.5, reading="difference", patch_scale=0.5)
    parts = torch.randn(2, 7, 6)
    embeddings = 0.5 * parts.sum(1)
    torch.testing.assert_close(head.attributions(parts, embeddings).sum(1), head(embeddings), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("limit", "batch_size", "read"), [(4, 32, [0, 2, 4, 6]), (100, 2, [*range(9)])])
def test_prototypes_are_of_training_images_that_are_spread_over_the_data_set(target, limit, batch_size, read):
    dataset, numbers = Few(), torch.get_rng_state()
    weight = prototypes_of(target, images_of(dataset), limit=limit, batch_size=batch_size)
    assert dataset.read == read and torch.equal(torch.get_rng_state(), numbers) and not weight.requires_grad
    with torch.no_grad():
        embeddings = target.embed(target.normalise(dataset.images[read]))
    expected = references.prototypes(embeddings.tolist(), [dataset.labels[i] for i in read], 3)
    torch.testing.assert_close(weight, torch.tensor(expected), rtol=1e-3, atol=1e-4)


def test_prototypes_leave_corrupt_images_out_also_where_a_whole_batch_is(target):
    dataset = Marked(9, seed=3)
    readable = [dataset[i] for i in (0, 1, 2, 6, 7, 8)]
    some = [dataset[i] if i not in (3, 4, 5) else None for i in range(9)]
    expected = prototypes_of(target, SimpleNamespace(dataset=lambda _: readable, classes="abc", num_workers=0))
    weight = prototypes_of(target, SimpleNamespace(dataset=lambda _: some, classes="abc", num_workers=0), batch_size=3)
    torch.testing.assert_close(weight, expected, rtol=1e-3, atol=1e-4)

import math
from functools import partial
from types import SimpleNamespace

import pytest
import references
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset
from toys import Marked

from datamodules.images import Images
from explainers.errors import InputError
from explainers.models import TargetModel
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


@pytest.mark.parametrize(("classes", "width"), [(2, 2), (2, 9), (5, 5), (5, 24), (37, 192)])
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
    with pytest.raises(ValueError, match="expected 2 to 4 classes, because embeddings have width 4, got 5"):
        simplex(5, 4)


def test_prototypes_point_from_the_mean_of_all_classes_to_each():
    embeddings, labels = torch.randn(11, 6), torch.tensor([0, 2, 1, 1, 3, 2, 2, 2, 0, 1, 2])  # uneven classes
    expected = references.prototypes(embeddings.tolist(), labels.tolist(), 4)
    weight = prototypes(embeddings, labels, 4)
    torch.testing.assert_close(weight, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.norm(dim=1), torch.ones(4))


@pytest.mark.parametrize(("classes", "counts"), [(4, [2, 0, 1, 1]), (2, [2, 0, 1, 1])])
def test_prototypes_are_refused_where_a_class_has_no_images_or_there_are_other_classes(classes, counts):
    with pytest.raises(ValueError, match=rf"of each of {classes} classes, got \[{str(counts)[1:-1]}\] images of them"):
        prototypes(torch.randn(4, 6), torch.tensor([0, 0, 2, 3]), classes)


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("patch_scale", [1, 0.3])
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


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
def test_differences_that_sum_to_the_embedding_have_attributions_that_sum_to_the_logits(projected, normalise):
    weight, projection = torch.randn(3, 4 if projected else 6), torch.randn(4, 6) if projected else None
    head = FixedHead(weight, projection, normalise, scale=2.5, reading="difference", patch_scale=0.5)
    parts = torch.randn(2, 7, 6)
    embeddings = 0.5 * parts.sum(1)
    torch.testing.assert_close(head.attributions(parts, embeddings).sum(1), head(embeddings), rtol=1e-4, atol=1e-5)


def test_a_target_takes_a_fixed_head_of_its_width_only(make_model, images):
    target = TargetModel(make_model(), head=FixedHead(simplex(3, 24), scale=4.0)).eval()
    expected = 4 * F.normalize(target.embed(target.normalise(images)), dim=-1) @ simplex(3, 24).mT
    torch.testing.assert_close(target(images), expected)
    with pytest.raises(InputError, match="embeddings of width 24, .*, but the head takes width 9"):
        TargetModel(make_model(), head=FixedHead(simplex(3, 9)))


def test_the_prototypes_of_a_model_are_of_what_it_makes_of_the_training_images(target):
    dataset = Few()
    with torch.no_grad():
        embeddings = torch.cat([target.embed(target.normalise(image[None])) for image in dataset.images])
    expected = torch.tensor(references.prototypes(embeddings.tolist(), dataset.labels, 3))
    for batch_size in (2, 32):
        weight = prototypes_of(target, images_of(dataset), batch_size=batch_size)
        assert not weight.requires_grad
        torch.testing.assert_close(weight, expected, rtol=1e-3, atol=1e-4)


def test_a_limit_of_prototypes_is_spread_over_the_data_set(target):
    dataset, numbers = Few(), torch.get_rng_state()
    weight = prototypes_of(target, images_of(dataset), limit=4)
    assert dataset.read == [0, 2, 4, 6] and torch.equal(torch.get_rng_state(), numbers)
    with torch.no_grad():
        embeddings = target.embed(target.normalise(dataset.images[dataset.read]))
    expected = torch.tensor(references.prototypes(embeddings.tolist(), [0, 0, 1, 2], 3))
    torch.testing.assert_close(weight, expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match=r"of each of 3 classes, got \[1, 1, 0\] images of them: take more images"):
        prototypes_of(target, images_of(dataset), limit=2)


def test_prototypes_leave_corrupt_images_out_also_where_a_whole_batch_is(target):
    dataset = Marked(9, seed=3)
    readable = [dataset[i] for i in (0, 1, 2, 6, 7, 8)]
    some = [dataset[i] if i not in (3, 4, 5) else None for i in range(9)]
    expected = prototypes_of(target, SimpleNamespace(dataset=lambda _: readable, classes="abc", num_workers=0))
    weight = prototypes_of(target, SimpleNamespace(dataset=lambda _: some, classes="abc", num_workers=0), batch_size=3)
    torch.testing.assert_close(weight, expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(InputError, match="expected readable train images for the head, got 4 that are all"):
        prototypes_of(target, SimpleNamespace(dataset=lambda _: [None] * 4, classes="abc", num_workers=0))

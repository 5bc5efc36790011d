"""Why two images are alike: pairs of patches, one-sided maps, and the nearest images."""

import pytest
import torch
from conftest import timm_model
from refusals import check_refused

from explainers import posthoc
from explainers.likeness import Likeness, likeness, nearest, similar_to, vectors_of
from explainers.masking import PatchGrid

LINEAR = ["DecompX-PLUS", "InputXGradient", "IntegratedGradients"]


@pytest.fixture
def second(images):
    return images.flip(0)[:2]


@pytest.fixture
def first(images):
    return images[:2]


def method(name, target, grid):
    return posthoc.build(name, target, grid, {"steps": 4} if name == "IntegratedGradients" else None)


@torch.no_grad()
def embedded(target, images):
    return target.embed(target.normalise(images))


def pairs_of(vectors, other_vectors, e, other, centre):
    """All pairs of one pair of images, one product at a time."""
    count = len(vectors)
    rest = e - centre - sum(vectors)
    other_rest = other - centre - sum(other_vectors)
    size = (e - centre).norm() * (other - centre).norm()
    pairs = torch.empty(count, len(other_vectors))
    for z in range(count):
        for w in range(len(other_vectors)):
            pairs[z, w] = (vectors[z] + rest / count) @ (other_vectors[w] + other_rest / len(other_vectors)) / size
    return pairs


@pytest.mark.parametrize("centred", [False, True])
def test_pairs_of_patches_sum_to_the_similarity_and_to_both_maps(target, grid, first, second, centred):
    explainer = method("DecompX-PLUS", target, grid)
    centre = torch.randn(24, generator=torch.Generator().manual_seed(1)) if centred else None
    alike = likeness(explainer, first, second, centre)
    own, others = embedded(target, first), embedded(target, second)
    m = torch.zeros(24) if centre is None else centre
    expected = torch.nn.functional.cosine_similarity(own - m, others - m)
    torch.testing.assert_close(alike.similarity, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(alike.pairs.sum((1, 2)), expected, rtol=1e-5, atol=1e-5)
    for heatmaps, images, other, side in (
        (alike.of_first, first, others, 0),
        (alike.of_second, second, own, 1),
    ):
        one_sided = similar_to(explainer, images, other[:, None], centre)[:, 0]
        torch.testing.assert_close(expected - one_sided.sum((1, 2)), alike.rest[:, side], rtol=1e-4, atol=1e-5)
        shared = alike.rest[:, side, None, None] / 16
        torch.testing.assert_close(heatmaps, one_sided + shared, rtol=1e-4, atol=1e-5)
    vectors, _ = vectors_of(explainer, first)
    other_vectors, _ = vectors_of(explainer, second)
    for image in range(2):
        slowly = pairs_of(vectors[image], other_vectors[image], own[image], others[image], m)
        torch.testing.assert_close(alike.pairs[image], slowly, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LINEAR)
def test_vectors_give_the_heatmap_of_every_functional(target, grid, first, name):
    explainer = method(name, target, grid)
    explainer.linear = True
    vectors, embeddings = vectors_of(explainer, first, chunk_size=10)
    functional = torch.randn(2, 24, generator=torch.Generator().manual_seed(2))
    expected = explainer.explain(first, functional).flatten(1)
    torch.testing.assert_close((vectors @ functional[..., None])[..., 0], expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(embeddings, embedded(target, first), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", ["constant", "variable"])
def test_similarity_to_an_image_is_the_gradient_of_the_cosine(target, grid, first, second, length):
    centre = torch.randn(24, generator=torch.Generator().manual_seed(1))
    own, others = embedded(target, first).requires_grad_(), embedded(target, second)
    size = (own - centre).norm(dim=-1)
    size = size.detach() if length == "constant" else size
    directions = torch.nn.functional.normalize(others - centre, dim=-1)
    cosines = ((own - centre) * directions).sum(-1) / size
    (functional,) = torch.autograd.grad(cosines.sum(), own)
    explainer = posthoc.GAE(target, grid)
    expected = explainer.explain(first, functional)
    found = similar_to(explainer, first, others[:, None], centre, length)
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-4, atol=1e-6)


def test_class_activation_explains_the_whole_similarity():
    target = timm_model("test_resnet", as_target=True)
    grid = PatchGrid(160, 32, differs=True)
    images = torch.randint(0, 256, (4, 3, 160, 160), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    alike = likeness(posthoc.CAM(target, grid), images[:2], images[2:])
    torch.testing.assert_close(alike.rest, torch.zeros(2, 2), rtol=0, atol=1e-5)
    features = target.backbone.forward_features(target.normalise(images)).detach()
    for z in range(25):
        own, other = features[0, :, z // 5, z % 5], features[2].flatten(1)
        cosines = own @ other / 25**2 / (features[0].mean((1, 2)).norm() * features[2].mean((1, 2)).norm())
        torch.testing.assert_close(alike.pairs[0, z], cosines, rtol=1e-3, atol=1e-6)


def test_the_strongest_pairs_are_the_largest_products_of_patches_that_are_not_taken(target, grid, first, second):
    alike = likeness(method("DecompX-PLUS", target, grid), first, second)
    for image, found in enumerate(alike.strongest(5)):
        left = {(z, w): alike.pairs[image, z, w].item() for z in range(16) for w in range(16)}
        for pair in found.tolist():
            assert tuple(pair) == max(left, key=left.get)
            left = {(z, w): value for (z, w), value in left.items() if z != pair[0] and w != pair[1]}
    assert alike.strongest(100).shape == (2, 16, 2)
    assert torch.equal(alike.take_row(1).strongest(5), alike.strongest(5)[1:])
    pairs = torch.zeros(1, 9, 9)  # on 3 × 3 patches, a middle patch is near all others
    pairs[0, 4, 4], pairs[0, 0, 8] = 2, 1
    alike = Likeness(torch.ones(1), pairs, torch.zeros(1, 2), (3, 3))
    assert alike.strongest(3, apart=1).tolist() == [[[4, 4]]] and len(alike.strongest(3)[0]) == 3


def test_the_nearest_images_have_the_highest_cosines():
    generator = torch.Generator().manual_seed(0)
    known, asked, centre = (torch.randn(size, 6, generator=generator) for size in (20, 3, 1))
    similarities, indices = nearest(known, asked, k=4, centre=centre[0])
    for row in range(3):
        cosines = [
            float((one - centre[0]) @ (asked[row] - centre[0]))
            / float((one - centre[0]).norm() * (asked[row] - centre[0]).norm())
            for one in known
        ]
        expected = sorted(range(20), key=lambda i: -cosines[i])[:4]
        assert indices[row].tolist() == expected
        assert similarities[row].tolist() == pytest.approx([cosines[i] for i in expected], abs=1e-5)
    assert nearest(known[:2], asked, k=5)[1].shape == (3, 2)


REFUSED = [
    ("images", lambda target, grid, first: likeness(posthoc.DecompX(target, grid), first, first[:1])),
    ("GAE", lambda target, grid, first: vectors_of(posthoc.GAE(target, grid), first)),
    ("[2, 5]", lambda target, grid, first: similar_to(posthoc.GAE(target, grid), first, torch.ones(2, 5))),
    ("RISE", lambda target, grid, first: similar_to(posthoc.RISE(target, grid, masks=4), first, torch.ones(2, 24))),
]


@pytest.mark.parametrize(("told", "call"), REFUSED)
def test_what_cannot_be_compared_is_refused(told, call, request):
    check_refused(request, told, call)

"""Why two images are alike, and the nearest images of a folder."""

import numpy as np
import pytest
import torch
from clips import random_directions
from conftest import timm_model
from PIL import Image

import explainers
from explainers.errors import InputError
from explainers.likeness import likeness
from explainers.text import TextHead

pytestmark = pytest.mark.usefixtures("nothing_shipped")
PIXELS = np.random.default_rng(1).integers(0, 256, (3, 40, 32, 3), dtype=np.uint8)


@pytest.fixture
def target():
    return timm_model(as_target=True, num_classes=0)


@pytest.fixture
def photos(tmp_path):
    """Five images, one of them in a folder, and a broken file."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    draws = np.random.default_rng(0)
    for name in ("a", "b", "c", "d", "more/e"):
        Image.fromarray(draws.integers(0, 256, (40, 32, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    return folder


@torch.no_grad()
def test_a_comparison_is_the_likeness_of_both_images(target, anyhead):
    first, second = explainers.compare([PIXELS[0], PIXELS[1]], PIXELS[2], target, method=anyhead)
    expected = likeness(anyhead, torch.stack([first.image, second.image]), torch.stack([first.other, second.other]))
    for row, comparison in enumerate((first, second)):
        assert comparison.similarity == pytest.approx(expected.similarity[row].item(), abs=1e-5)
        torch.testing.assert_close(comparison.pairs, expected.pairs[row])
        torch.testing.assert_close(comparison.heatmap, expected.of_first[row])
        torch.testing.assert_close(comparison.other_heatmap, expected.of_second[row])
        assert comparison.pairs.sum().item() == pytest.approx(comparison.similarity, abs=1e-4)


def test_ties_are_the_strongest_pairs_that_do_not_touch_and_are_drawn_between_both_images(target, anyhead, tmp_path):
    photo = tmp_path / "cat.png"
    Image.fromarray(PIXELS[0]).save(photo)
    comparison = explainers.compare(photo, PIXELS[2], target, method=anyhead)
    picture, without = comparison.picture(size=200), comparison.picture(size=200, ties=0)
    assert without.size == picture.size and not np.array_equal(without, picture) and picture.width > 400
    assert np.array_equal(Image.open(comparison.save(tmp_path / "new" / "a.png", size=200)), picture)
    with pytest.raises(InputError, match="expected another file than the image itself"):
        comparison.save(photo)
    ties = comparison.ties(3)
    best = divmod(int(comparison.pairs.argmax()), 16)
    assert (ties[0].patch, ties[0].other) == best and ties[0].value == comparison.pairs.max().item()
    assert [tie.value for tie in ties] == sorted((tie.value for tie in ties), reverse=True)
    for number, tie in enumerate(ties):
        for other in ties[:number]:
            for one, two in ((tie.patch, other.patch), (tie.other, other.other)):
                assert max(abs(one // 4 - two // 4), abs(one % 4 - two % 4)) > 1


@pytest.mark.parametrize(("name", "label"), [("vit_tiny_patch16_224", "DirectPaths"), ("test_resnet", "CAM")])
def test_auto_takes_a_method_with_vectors_for_models_without_a_head(name, label):
    model = timm_model(name, as_target=True, num_classes=0)
    comparison = explainers.compare(PIXELS[0], PIXELS[0], model)
    assert comparison.method == label and comparison.heatmap.shape == comparison.other_heatmap.shape
    assert comparison.similarity == pytest.approx(1, abs=1e-4)
    head = TextHead(random_directions, torch.randn(24, model.embed_dim))
    assert explainers.explain(PIXELS[0], model, text="a cat", text_head=head).method == label


def test_the_nearest_images_of_a_folder_but_not_the_image_itself(target, anyhead, photos):
    (photos / "broken.png").write_bytes(b"no image")
    with pytest.warns(UserWarning, match=r"left out: 1 file \(broken.png\) that cannot be decoded"):
        found = explainers.nearest(photos / "a.png", photos, target, k=3, method=anyhead)
    slow = {
        name: explainers.compare(photos / "a.png", photos / name, target, method=anyhead).similarity
        for name in ("b.png", "c.png", "d.png", "more/e.png")
    }
    expected = sorted(slow, key=lambda name: -slow[name])[:3]
    assert [each.other_name for each in found] == expected and {each.name for each in found} == {"a.png"}
    assert [each.similarity for each in found] == pytest.approx([slow[name] for name in expected], abs=1e-5)
    assert len(explainers.nearest(PIXELS[0], [photos / "b.png"], target, method=anyhead)) == 1


@torch.no_grad()
def test_likeness_is_relative_to_what_other_images_have_in_common(target, anyhead, photos):
    against = photos / "more"
    found = explainers.compare(PIXELS[0], PIXELS[1], target, against=against, method=anyhead)
    (common,) = explainers.compare([photos / "more/e.png"], PIXELS[1], target, method=anyhead)
    centre = target.embed(target.normalise(common.image[None]))[0]
    expected = likeness(anyhead, found.image[None], found.other[None], centre)
    assert found.similarity == pytest.approx(expected.similarity.item(), abs=1e-5)
    torch.testing.assert_close(found.pairs, expected.pairs[0], rtol=1e-4, atol=1e-5)
    plain = explainers.compare(PIXELS[0], PIXELS[1], target, method=anyhead)
    assert abs(plain.similarity - found.similarity) > 0.01


@torch.no_grad()
def test_in_many_images_the_nearest_is_relative_to_their_mean(target, anyhead):
    many = np.random.default_rng(5).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    (found,) = explainers.nearest(PIXELS[0], many, target, k=1, method=anyhead)
    pixels = torch.stack([target.transform(Image.fromarray(each)) for each in many])
    centre = target.embed(target.normalise(pixels)).mean(0)
    expected = likeness(anyhead, found.image[None].expand(20, -1, -1, -1), pixels, centre)
    assert found.similarity == pytest.approx(expected.similarity.max().item(), abs=1e-4)
    assert torch.equal(found.other, pixels[expected.similarity.argmax()])

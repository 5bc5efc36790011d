import json

import pytest
import torch
from references import level_size, neighbourhood, only

from explainers.errors import InputError
from explainers.masking import (
    PatchGrid,
    apply_in_chunks,
    level_sizes,
    map_shape,
    mask_pixels,
    masked_forward,
    neighbourhoods,
    select_most_important,
)
from explainers.saved.identity import recipe

GRID = PatchGrid(image_size=12, patch_size=4)


@pytest.mark.parametrize("hops", [0, 1, 2, 3, 9])
def test_a_neighbourhood_is_what_a_walk_over_the_grid_reaches(hops):
    grid = PatchGrid(image_size=(12, 20), patch_size=4)
    near = neighbourhoods(grid, hops)
    assert near.shape == (15, 15)
    for patch, row in enumerate(near):
        assert set(row.nonzero().flatten().tolist()) == neighbourhood(patch, grid.shape, hops)


def test_a_patch_hides_its_own_rows_and_columns():
    images, keep, grid = torch.randn(6, 3, 8, 12), torch.eye(6, dtype=torch.bool), PatchGrid((8, 12), 4)
    seen = mask_pixels(images, keep, grid)
    for patch in range(6):
        assert torch.equal(seen[patch], only(images[patch], [patch], (2, 3)))


def test_every_channel_has_its_own_fill():
    images, fill = torch.randn(1, 3, 12, 12), torch.tensor([1.0, 2.0, 3.0])[:, None, None]
    hidden = mask_pixels(images, torch.zeros(1, 9, dtype=torch.bool), GRID, fill)
    assert torch.equal(hidden, fill.expand(1, 3, 12, 12))


@pytest.mark.parametrize("shape", [(16, 16), (12, 16), (16, 12)])
def test_an_image_that_the_grid_does_not_cut_is_refused_with_both_sizes(shape):
    keep = torch.ones(1, 9, dtype=torch.bool)
    with pytest.raises(ValueError, match=rf"12 × 12 images; got \({shape[0]}, {shape[1]}\)"):
        mask_pixels(torch.zeros(1, 3, *shape), keep, GRID)


def test_a_square_has_one_identity_however_its_size_is_written():
    assert PatchGrid((32, 32), 8) == PatchGrid(32, 8) == PatchGrid([32, 32], 8)
    assert recipe(PatchGrid((32, 32), 8)) == recipe(PatchGrid(32, 8))
    for grid, image_size in ((PatchGrid([24, 40], 8), [24, 40]), (PatchGrid(32, 8), 32)):
        written = json.loads(json.dumps(recipe(grid)))
        assert written["image_size"] == image_size and PatchGrid(written["image_size"], written["patch_size"]) == grid


@pytest.mark.parametrize("wrong", [0, True, "24", 24.0, (24,), (24, 0), (24, 24, 24), None])
def test_what_is_no_size_of_an_image_is_refused(wrong):
    with pytest.raises(
        InputError, match=r"^expected image_size in pixels, such as 224, or \(224, 448\) for height and"
    ):
        PatchGrid(wrong, 8)


@pytest.mark.parametrize(("shape", "finer"), [((3, 5), 1), ((5, 3), 2), ((6, 10), 3), ((1, 7), 2), ((14, 14), 4)])
def test_the_shape_of_a_map_follows_from_the_image_for_finer_patches_and_rounded_strides(shape, finer):
    rows, columns = shape
    assert map_shape(rows * columns * finer**2, shape) == (rows * finer, columns * finer)
    pixels = rows * 32, columns * 32 - 5  # the last column of a CNN's map covers a part of its stride
    assert map_shape(rows * columns, pixels) == shape


def test_a_grid_that_does_not_divide_the_image_is_refused():
    with pytest.raises(InputError, match=r"\(24, 36\) is not a multiple of patch_size 8"):
        PatchGrid((24, 36), 8)
    with pytest.raises(ValueError, match="225 is not a multiple of patch_size 16"):
        PatchGrid(image_size=225)


@pytest.mark.parametrize(
    ("num_patches", "levels"), [(9, 10), (9, 4), (16, 21), (49, 11), (196, 21), (256, 2), (100, 101)]
)
def test_levels_hold_exactly_their_share_of_the_patches(num_patches, levels):
    sizes = level_sizes(num_patches, levels).tolist()
    assert sizes == [level_size(num_patches, levels, level) for level in range(levels)]
    assert (sizes[0], sizes[-1]) == (0, num_patches)


@pytest.mark.parametrize("num_patches", [16, 1024])
def test_each_level_holds_the_first_patches_of_the_order(num_patches):
    order = torch.stack([torch.randperm(num_patches) for _ in range(4)])
    important = select_most_important(order, levels=8)
    assert important.shape == (4, 8, num_patches)
    for image in range(4):
        for level in range(8):
            expected = set(order[image, : level_size(num_patches, 8, level)].tolist())
            assert set(important[image, level].nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 12, 13, 256])
@pytest.mark.parametrize("fill", [0.0, torch.tensor([0.5, -1.0, 2.0])[:, None, None]])
def test_a_function_sees_every_image_under_each_of_its_own_masks(chunk_size, fill):
    images, keep = torch.randn(3, 3, 12, 12), torch.rand(3, 4, 9) < 0.5
    weight = torch.randn(3 * 12 * 12, 7)
    batches = []

    def function(seen):
        batches.append(len(seen))
        return seen.flatten(1) @ weight

    got = masked_forward(function, images, keep, GRID, fill, chunk_size)
    assert got.shape == (3, 4, 7)
    for image in range(3):
        for mask in range(4):
            visible = keep[image, mask].nonzero().flatten().tolist()
            expected = only(images[image], visible, GRID.shape, fill).flatten() @ weight
            torch.testing.assert_close(got[image, mask], expected, rtol=1e-4, atol=1e-4)
    assert sum(batches) == 12
    assert max(batches) == min(chunk_size, 12)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 256])
def test_by_size_all_masks_of_a_call_have_the_same_number_of_visible_patches(chunk_size):
    images, keep = torch.randn(3, 3, 12, 12), torch.rand(3, 8, 9) < 0.5
    weight, calls = torch.randn(9, 7), []

    def function(seen, masks):
        calls.append(masks.sum(-1).tolist())
        return masks.float() @ weight * seen.mean((1, 2, 3))[:, None]

    found = apply_in_chunks(function, images, keep, chunk_size, by_size=True)
    torch.testing.assert_close(found, keep.float() @ weight * images.mean((1, 2, 3))[:, None, None])
    assert all(len(set(sizes)) == 1 and len(sizes) <= chunk_size for sizes in calls)
    if chunk_size == 256:
        assert [sizes[0] for sizes in calls] == sorted(set(keep.sum(-1).flatten().tolist()))

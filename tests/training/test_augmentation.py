import torch
from references import resized_crop

from explainers.training.training_module import random_resized_crop

COUNT, SIDE = 400, 32
INDEX = torch.arange(COUNT)


def windows(min_scale, seed=0):
    """Of every crop top, left, height, width in pixels, and if mirrored: read off an image of its own coordinates."""
    steps = 8 * torch.arange(SIDE, dtype=torch.uint8)
    rows, columns = steps[:, None].expand(SIDE, SIDE), steps.expand(SIDE, SIDE)
    maps = torch.stack([rows, columns, torch.zeros_like(rows)]).expand(COUNT, 3, SIDE, SIDE)
    cropped = random_resized_crop(maps, INDEX, seed, min_scale).double() / 8
    inner = torch.arange(2, SIDE - 2).double()  # nearer the border, pixels are clamped

    def line(values):
        """Where the window starts and how long it is, negative where it is mirrored: the line of least squares."""
        values, centred = values[:, 2:-2], inner - inner.mean()
        slope = values @ centred / centred.square().sum()
        return values.mean(1) + 0.5 - (inner.mean() + 0.5) * slope, slope * SIDE

    top, height = line(cropped[:, 0, :, SIDE // 2])
    left, width = line(cropped[:, 1, SIDE // 2])
    mirrored = width < 0
    return top, torch.where(mirrored, left + width, left), height, width.abs(), mirrored


def test_crops_stay_inside_the_image():
    top, left, height, width, _ = windows(0.2)
    for start, length in ((top, height), (left, width)):
        assert start.min() > -0.1
        assert (start + length).max() < SIDE + 0.1
        assert start.max() > SIDE / 4  # and they do move


def test_crops_have_the_areas_and_shapes_of_random_resized_crops():
    min_scale = 0.2
    _, _, height, width, mirrored = windows(min_scale)
    share = height * width / SIDE**2
    assert min_scale - 0.01 < share.min() < min_scale + 0.05
    assert 0.9 < share.max() < 1.01
    aspect = width / height
    assert 3 / 4 - 0.02 < aspect.min() < 0.8
    assert 1.25 < aspect.max() < 4 / 3 + 0.02
    uniform = (0.7 - min_scale) / (1 - min_scale)
    assert abs((share < 0.7).double().mean() - uniform) < 0.08  # above 3/4 some are cut
    assert 0.4 < (aspect > 1).double().mean() < 0.6
    assert 0.4 < mirrored.double().mean() < 0.6


def test_a_crop_is_its_window_stretched_to_the_whole_image():
    images = torch.randint(0, 256, (6, 3, SIDE, SIDE), dtype=torch.uint8)
    cropped = random_resized_crop(images, INDEX[:6], 0, 0.2)
    assert cropped.shape == images.shape
    assert cropped.dtype == torch.uint8
    found = torch.stack([values[:6].double() for values in windows(0.2)], 1).tolist()
    assert len({mirrored for *_, mirrored in found}) == 2
    for image, got, (top, left, height, width, mirrored) in zip(images, cropped, found, strict=True):
        difference = (resized_crop(image.float(), top, left, height, width, mirrored) - got).abs()
        assert difference.mean() < 2.5  # grey levels; a window half a pixel off would give 20


def test_an_image_is_cropped_the_same_alone_as_in_a_batch():
    images, index = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8), torch.tensor([5, 900, 0, 2**33])
    together = random_resized_crop(images, index, 3)
    alone = torch.cat([random_resized_crop(images[i : i + 1], index[i : i + 1], 3) for i in range(4)])
    assert (together.int() - alone.int()).abs().max() <= 1  # grey levels are rounded
    later = random_resized_crop(images[:1].expand(4, -1, -1, -1), index, 4)
    assert not torch.equal(later[0], together[0]) and not torch.equal(later[0], later[1])

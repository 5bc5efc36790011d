import pytest
import torch

from datamodules.digits import SPLITS, Digits


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in ("image", "truth", "index"))


def test_a_canvas_depends_on_its_split_index_and_seed_only():
    few, many, again = Digits(size=3), Digits(size=6), Digits(size=3, task="loop")
    assert all(same(few[i], many[i]) for i in range(3))
    assert all(same(few[i], again[i]) for i in range(3))
    assert few.fingerprint() == Digits(size=3).fingerprint()
    assert few.fingerprint()["image"] == again.fingerprint()["image"] != many.fingerprint()["image"]
    others = [Digits("val", size=3), Digits("test", size=3), Digits(size=3, seed=1), Digits(size=3, seed=2)]
    canvases = [few[i] for i in range(3)] + [other[i] for other in others for i in range(3)]
    assert len({canvas["image"].numpy().tobytes() for canvas in canvases}) == len(canvases)
    assert len({data.fingerprint()["image"] for data in (few, many, *others)}) == 6


def test_a_sample_is_an_image_a_label_an_index_and_the_place_of_the_digit():
    data = Digits("val", size=5, image_size=32)
    assert len(data) == 5
    assert {name: (value.dtype, value.shape) for name, value in data[4].items()} == {
        "image": (torch.uint8, (3, 32, 32)),
        "label": (torch.int64, ()),
        "index": (torch.int64, ()),
        "truth": (torch.bool, (32, 32)),
    }
    assert [data[i]["index"].item() for i in range(5)] == list(range(5))


def test_no_handwritten_digit_is_in_two_splits():
    handwritten = {split: {stroke.tobytes() for stroke in Digits(split, size=0).strokes[False]} for split in SPLITS}
    assert {split: len(strokes) for split, strokes in handwritten.items()} == {"train": 1200, "val": 300, "test": 297}
    assert not handwritten["train"] & handwritten["test"]
    assert not handwritten["train"] & handwritten["val"]
    assert not handwritten["val"] & handwritten["test"]


def blocks(sample, size):
    """Blocks of pixels (3, rows, columns, size²), and which of them the box of the digit touches."""
    image, truth = (sample[name].unfold(-2, size, size).unfold(-2, size, size) for name in ("image", "truth"))
    return image.flatten(-2).float(), truth.flatten(-2).any(-1)


def test_only_the_box_of_the_digit_differs_from_the_background():
    """Without scraps of other digits, the background is spots of one colour each."""
    boxes = set()
    for sample in Digits(size=30, scraps=0):
        rows, columns = (sample["truth"].any(side).nonzero().flatten() for side in (1, 0))
        assert len(rows) == len(columns) == 24 and sample["truth"].sum() == 24 * 24
        boxes.add((rows[0].item(), columns[0].item()))
        spots, touched = blocks(sample, 8)
        assert (spots.amax(-1) == spots.amin(-1)).all(0)[~touched].all()
        assert sample["image"][:, sample["truth"]].float().std(1).min() > 10
    assert all(len(set(places)) > 12 for places in zip(*boxes, strict=True))


def test_scraps_of_other_digits_lie_outside_the_box_too():
    with_scraps = 0
    for sample in Digits(size=20):
        spots, touched = blocks(sample, 8)
        with_scraps += (spots.amax(-1) != spots.amin(-1)).any(0)[~touched].any().item()
    assert with_scraps >= 15  # by chance, the digit covers them now and then


def test_coloured_digits_lie_on_one_colour_each_and_textures_are_uneven_everywhere():
    coloured, textured = (Digits(size=20, domain=domain, scraps=0) for domain in ("coloured", "textured"))
    behind = [sample["image"][:, ~sample["truth"]] for data in (coloured, textured) for sample in data]
    assert len({each.numpy().tobytes() for each in behind}) == 40
    for sample, outside in zip(coloured, behind, strict=False):
        assert (outside == outside[:, :1]).all()
        strokes = sample["image"][:, sample["truth"]].int() - outside[:, :1].int()
        assert (strokes.abs().amax(1) > 60).all()  # they show in every channel
    for sample in textured:
        found, touched = blocks(sample, 16)
        assert (found.std(-1)[:, ~touched] > 5).all()


def test_the_label_of_every_task_follows_from_the_digit():
    digit, odd, five_or_more, loop = (Digits(size=60, task=task) for task in ("digit", "odd", "five_or_more", "loop"))
    digits = [digit[i]["label"].item() for i in range(60)]
    assert set(digits) == set(range(10))
    assert [odd[i]["label"].item() for i in range(60)] == [int(d in (1, 3, 5, 7, 9)) for d in digits]
    assert [five_or_more[i]["label"].item() for i in range(60)] == [int(d in (5, 6, 7, 8, 9)) for d in digits]
    assert [loop[i]["label"].item() for i in range(60)] == [int(d in (0, 6, 8, 9)) for d in digits]


def test_the_digit_in_the_box_is_the_one_of_the_label():
    """Whatever its colour, the mean image that is most like what is in the box is mostly that of the label."""
    data = Digits("test", size=200, scraps=0)
    strokes, labels = torch.from_numpy(data.strokes[False]), torch.tensor(data.stroke_labels)
    means = torch.stack([strokes[labels == d].mean(0).flatten() for d in range(10)])
    means = torch.nn.functional.normalize(means - means.mean(1, keepdim=True))
    right = 0
    for sample in (data[i] for i in range(200)):
        inside = sample["image"].float()[:, sample["truth"]]  # (3, 24 · 24)
        inside = torch.nn.functional.normalize(inside - inside.mean(1, keepdim=True))
        right += int((inside @ means.T).abs().sum(0).argmax() == sample["label"])
    assert right > 120


def test_canvases_with_spots_are_what_they_always_were():
    canvases = torch.stack([sample["image"] for sample in Digits(size=20)])
    levels = [[134.465, 136.906, 130.998], [130.679, 121.014, 127.095], [120.817, 121.269, 121.608]]
    colours = canvases[:3].double().mean((2, 3))  # of each channel of the first three, which are rounded
    torch.testing.assert_close(colours, torch.tensor(levels).double(), rtol=0, atol=0.01)
    assert canvases.double().mean().item() == pytest.approx(127.7452, abs=0.01)


def test_plain_digits_are_white_on_black_and_inverted_ones_their_negative():
    plain, inverted = Digits(size=20, domain="plain"), Digits(size=20, domain="inverted")
    for one, other in zip(plain, inverted, strict=True):
        assert ((255 - one["image"].int()) - other["image"].int()).abs().max() <= 1  # both are rounded
        assert torch.equal(one["truth"], other["truth"]) and one["label"] == other["label"]
        assert (one["image"] == one["image"][:1]).all()  # no colours
        assert one["image"].median() == 0 and one["image"].max() > 200


@pytest.mark.parametrize("without", [None, "coloured", "inverted"])
def test_mixed_digits_look_like_those_of_four_domains_unless_one_is_left_out(without):
    """By what lies behind them: black, white or another colour; and by the size of the box."""
    looks = set()
    for sample in Digits(size=60, domain="mixed", scraps=0, without=without):
        colours = [tuple(pixel) for pixel in sample["image"][:, ~sample["truth"]].T.unique(dim=0).tolist()]
        behind = {(0, 0, 0): "black", (255, 255, 255): "white"}.get(colours[0], "colour")
        looks.add(("many" if len(colours) > 1 else behind, sample["truth"].sum().item()))
    every = {("black", 576), ("white", 576), ("colour", 576), ("black", 256)}
    assert looks == every - {("colour" if without == "coloured" else "white" if without else None, 576)}

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


def test_no_handwritten_digit_is_in_two_splits():
    handwritten = {split: {stroke.tobytes() for stroke in Digits(split, size=0).strokes[False]} for split in SPLITS}
    assert {split: len(strokes) for split, strokes in handwritten.items()} == {"train": 1200, "val": 300, "test": 297}
    assert not handwritten["train"] & handwritten["test"]
    assert not handwritten["train"] & handwritten["val"]
    assert not handwritten["val"] & handwritten["test"]


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

"""The benchmarks of audits: a fault changes the pixels of its mask alone, and groups are judged by it."""

import random

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.audit_faults import FAULTS, paste_on
from benchmarks.audits import POOL, Found, draw_photos, judge


@pytest.mark.parametrize("name", [*FAULTS, "background"])
def test_a_fault_changes_the_pixels_of_its_mask_alone(name):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    photo, other = Image.fromarray(noise), Image.new("RGB", (80, 64), (9, 90, 200))
    found, mask = (FAULTS[name] if name in FAULTS else lambda *each: paste_on(*each[:1], other, *each[1:]))(
        photo, random.Random(0)
    )
    assert np.array_equal(np.asarray(photo), noise)  # the caller's photo stays as it was
    if name == "background":  # the photo is smaller there, so pixels of the mask are those of the other one
        exact = (np.asarray(found) == np.asarray(other)[0, 0]).all(-1)
        assert exact.sum() > 0.6 * exact.size and not exact[~mask].any()
    else:
        changed = (np.asarray(found) != noise).any(-1)
        assert not changed[~mask].any() and changed[mask].mean() > 0.9


def test_groups_are_judged_by_masks_and_draws_are_exact():
    shares = torch.tensor([[1.0, 0.5, 0.2, 0.0], [0.0, 0.9, 0.0, 0.0]])  # planted: patches 0 and 1; patch 1
    patches = torch.tensor([[1, 0, 2], [1, 3, 0]])
    found = Found(patches, torch.tensor([[0, 0, 1], [1, 2, 1]]), torch.tensor([0.5, 0.1, 0.9]))
    judged = judge(found, shares)  # group 0: 2 of 2 planted, 1: 1 of 3, 2: 0 of 1
    assert judged["planted"] == [0] and judged["shares"] == pytest.approx([1.0, 1 / 3, 0.0])
    assert judged["rank"] == 2 and judged["area"] == 0.5
    assert judged["purity"] == pytest.approx((2 + 2 + 1) / 6) and judged["recall"] == pytest.approx(2 / 3)
    drawn = draw_photos(0.95, 1)
    assert sorted(torch.cat(drawn[:3]).tolist()) == list(range(POOL))
    for label in (0, 1):
        members = drawn.fit[drawn.fit % 2 == label]
        assert (drawn.variants[members] == label).sum() == round(0.95 * len(members))

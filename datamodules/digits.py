"""Handwritten digits on clutter: built-in images with several tasks on one input and a known object position.

Each canvas shows one of scikit-learn's digits in a random colour and place, among parts of other digits ("scraps").
For given settings, a canvas depends only on the split, its index and the seed.
"""

from collections.abc import Mapping
from functools import partial
from typing import Unpack

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from datamodules.fingerprints import digest
from datamodules.images import Images, Loading
from explainers.errors import InputError, check_positive

TASKS: dict[str, tuple[list[str], list[int]]] = {
    "digit": ([str(digit) for digit in range(10)], list(range(10))),
    "odd": (["even", "odd"], [digit % 2 for digit in range(10)]),
    "five_or_more": (["below five", "five or more"], [int(digit >= 5) for digit in range(10)]),
    "loop": (["open", "with a loop"], [int(digit in (0, 6, 8, 9)) for digit in range(10)]),
}
"""Task → names of its classes, and class index of each digit 0 to 9."""

SPLITS = {"train": slice(0, 1200), "val": slice(1200, 1500), "test": slice(1500, 1797)}
"""Handwritten digits of each split. The data set is ordered by writer, so the splits share almost no writers."""

MIXED = ("plain", "inverted", "coloured", "small")
DOMAINS = ("spots", *MIXED, "mixed", "textured")
"""Appearance of a canvas:

    spots      digits of any colour on grey spots
    plain      white digits on black
    inverted   black digits on white
    coloured   digits of any colour on a background of any other colour
    small      white digits on black, two thirds of the usual size
    mixed      each canvas as in plain, inverted, coloured or small, at random
    textured   digits of any colour on stripes
"""


class Digits(Dataset[dict[str, Tensor]]):
    """Canvases of one split and one domain, with the labels of one task.

    A sample has `image` uint8 (3, H, W), `label`, `index`, and `truth` boolean (H, W), the box around the digit.

    Args:
        split: one of `SPLITS`.
        task: one of `TASKS`.
        size: number of canvases.
        image_size: H and W, the side of a canvas, in pixels.
        scraps: parts of other digits on each canvas.
        domain: one of `DOMAINS`.
        without: the domain that `mixed` leaves out; `None` for none.
        seed: selects the digits, colours and places.

    Raises:
        InputError: if the task, the split or a domain is unknown, or the size of the canvas does not fit it.

    >>> sample = Digits(size=1, image_size=64)[0]
    >>> sample["image"].shape, int(sample["truth"].sum()) == 24 * 24
    (torch.Size([3, 64, 64]), True)
    """

    def __init__(
        self,
        split: str = "train",
        task: str = "digit",
        size: int = 2000,
        image_size: int = 64,
        scraps: int = 4,
        domain: str = "spots",
        seed: int = 0,
        without: str | None = None,
    ) -> None:
        for name, value, known in (("task", task, TASKS), ("split", split, SPLITS), ("domain", domain, DOMAINS)):
            if value not in known:
                raise InputError(f"expected one of {', '.join(known)} for {name}, got {value!r}")
        if without is not None and (domain != "mixed" or without not in MIXED):
            raise InputError(
                f"expected domain=mixed and without as one of {', '.join(MIXED)}, got domain={domain} and {without}"
            )
        check_positive(image_size=image_size)
        if domain == "spots" and image_size % 8:
            raise InputError(f"expected image_size as a multiple of 8 for spots, got {image_size}")
        self.classes, label_of = TASKS[task]
        self.image_size = image_size
        self.scraps = scraps
        self.domain = domain
        self.mixed = [name for name in MIXED if name != without]
        self.seed = seed * len(SPLITS) + list(SPLITS).index(split)
        digits = load_digits()
        ink = torch.from_numpy(digits.images[SPLITS[split]]).float()[:, None] / 16  # (n, 1, 8, 8)
        sides = {False: image_size * 3 // 8, True: image_size // 4}
        self.strokes = {  # small? → ink of the digits from 0 to 1, (n, 1, side, side)
            small: F.interpolate(ink, (side, side), mode="bilinear").numpy() for small, side in sides.items()
        }
        self.stroke_labels = [label_of[digit] for digit in digits.target[SPLITS[split]]]
        self.canvases = [self._draw(index) for index in range(size)]
        self.labels = torch.tensor([int(canvas["label"]) for canvas in self.canvases])  # int64, one for each sample

    def fingerprint(self) -> dict[str, str]:
        """A hash for each entry of the samples: equal for equal contents in the same order."""
        return {
            name: digest(*(canvas[name].numpy().tobytes() for canvas in self.canvases))
            for name in ("image", "label", "truth")
        }

    def __len__(self) -> int:
        return len(self.canvases)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.canvases[index]

    def _draw(self, index: int) -> dict[str, Tensor]:
        """The sample at a position."""
        random = np.random.default_rng((self.seed, index))
        which, *others = random.integers(len(self.stroke_labels), size=1 + self.scraps)
        domain = str(random.choice(self.mixed)) if self.domain == "mixed" else self.domain
        strokes = self.strokes[domain == "small"]
        canvas = self._background(domain, random)
        half = strokes.shape[-1] // 2
        for other in others:
            row, column = random.integers(0, half, size=2)  # a quarter of a digit does not reveal which digit it is
            self._place(canvas, strokes[other, :, row : row + half, column : column + half], domain, random)
        box = self._place(canvas, strokes[which], domain, random)
        truth = torch.zeros(canvas.shape[1:], dtype=torch.bool)
        truth[box] = True
        image = torch.from_numpy((canvas.clip(0, 1) * 255).round().astype(np.uint8))
        label = torch.tensor(self.stroke_labels[which])
        return {"image": image, "label": label, "index": torch.tensor(index), "truth": truth}

    def _background(self, domain: str, random: np.random.Generator) -> np.ndarray:
        """Background of a canvas, values from 0 to 1, (3, H, W)."""
        size = self.image_size
        if domain in ("plain", "small", "inverted"):
            return np.full((3, size, size), domain == "inverted", np.float32)
        if domain == "coloured":
            return np.broadcast_to(random.uniform(0, 1, (3, 1, 1)), (3, size, size)).astype(np.float32)
        if domain == "textured":
            angle = random.uniform(0, np.pi)
            period = random.uniform(size / 12, size / 6)
            row, column = np.mgrid[:size, :size]
            wave = np.sin((row * np.sin(angle) + column * np.cos(angle)) * 2 * np.pi / period)
            return (0.5 + 0.2 * wave * random.choice([-1, 1], size=(3, 1, 1))).astype(np.float32)
        spots = random.normal(0.5, 0.06, (3, 8, 8)).astype(np.float32)
        return spots.repeat(size // 8, 1).repeat(size // 8, 2)

    def _colour(self, canvas: np.ndarray, domain: str, random: np.random.Generator) -> np.ndarray:
        """Colour of strokes that is visible on `canvas` (3, H, W), values from 0 to 1, (3, 1, 1)."""
        if domain in ("plain", "small", "inverted"):
            return np.full((3, 1, 1), domain != "inverted", np.float32)
        if domain == "coloured":
            mean = canvas.mean((1, 2), keepdims=True)
            return mean + np.where(mean < 0.5, 1, -1) * random.uniform(0.4, 0.5, (3, 1, 1)).astype(np.float32)
        return 0.5 + random.choice([-1, 1], size=(3, 1, 1)) * random.uniform(0.3, 0.5, (3, 1, 1)).astype(np.float32)

    def _place(
        self, canvas: np.ndarray, strokes: np.ndarray, domain: str, random: np.random.Generator
    ) -> tuple[slice, slice]:
        """Paint strokes (1, side, side) on `canvas`, in place, at a random position; return the box around them."""
        side = strokes.shape[-1]
        row, column = random.integers(0, self.image_size - side + 1, size=2)
        colour = self._colour(canvas, domain, random)
        box = slice(row, row + side), slice(column, column + side)
        canvas[:, *box] += strokes * (colour - canvas[:, *box])
        return box


class DigitImages(Images):
    """Batches of `Digits`, with the same task and domain in every split; for other arguments see it and `Images`.

    Args:
        size: split → number of canvases; 6000 (train), 300 (val) and 200 (test) for splits that it leaves out.
        loading: see `Images`; the canvases do not depend on its seed, and no further process loads them by default.
    """

    def __init__(
        self,
        image_size: int,
        task: str = "digit",
        domain: str = "spots",
        scraps: int = 4,
        size: Mapping[str, int] | None = None,
        without: str | None = None,
        **loading: Unpack[Loading],
    ) -> None:
        sizes = {"train": 6000, "val": 300, "test": 200} | dict(size or {})
        check_positive(**{f"size.{split}": number for split, number in sizes.items()})
        train, val, test = (
            partial(Digits, split, task, sizes[split], image_size, scraps, domain, without=without)
            for split in ("train", "val", "test")
        )
        loading.setdefault("num_workers", 0)
        super().__init__(train, val, test, **loading)

"""Handwritten digits on clutter: the embedded default, with several tasks on one input and the evidence known.

Each canvas holds one of scikit-learn's digits in a random colour and place, among scraps of other digits. A canvas
depends on (`split`, its index, `seed`) alone.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

TASKS: dict[str, tuple[list[str], list[int]]] = {
    "digit": ([str(digit) for digit in range(10)], list(range(10))),
    "odd": (["even", "odd"], [digit % 2 for digit in range(10)]),
    "five_or_more": (["below five", "five or more"], [int(digit >= 5) for digit in range(10)]),
    "loop": (["open", "with a loop"], [int(digit in (0, 6, 8, 9)) for digit in range(10)]),
}
"""Names of the classes, and the class of each digit."""

SPLITS = {"train": slice(0, 1200), "val": slice(1200, 1500), "test": slice(1500, 1797)}
"""Which handwritten digits a split uses: the data set is in order of writers, so that splits share next to none."""


class Digits(Dataset[dict[str, Tensor]]):
    """`size` canvases of one split with the labels of one task.

    A sample holds `image` uint8 (3, S, S), `label`, `index`, and `truth` boolean (S, S): the box around the digit.

    Raises:
        ValueError: for a task or a split that is not there.
    """

    def __init__(
        self,
        split: str = "train",
        task: str = "digit",
        size: int = 2000,
        image_size: int = 64,
        scraps: int = 4,
        seed: int = 0,
    ) -> None:
        if task not in TASKS:
            raise ValueError(f"the digits' tasks are {', '.join(TASKS)}; got {task!r}")
        if split not in SPLITS:
            raise ValueError(f"the digits' splits are {', '.join(SPLITS)}; got {split!r}")
        self.classes, label_of = TASKS[task]
        self.task, self.image_size, self.scraps = task, image_size, scraps
        self.seed = seed * len(SPLITS) + list(SPLITS).index(split)
        digits = load_digits()
        ink = torch.from_numpy(digits.images[SPLITS[split]]).float()[:, None] / 16  # (n, 1, 8, 8)
        side = image_size * 3 // 8
        self.strokes = F.interpolate(ink, (side, side), mode="bilinear").numpy()  # (n, 1, side, side)
        self.stroke_labels = [label_of[digit] for digit in digits.target[SPLITS[split]]]
        self.canvases = [self._draw(index) for index in range(size)]
        self.labels = torch.tensor([int(canvas["label"]) for canvas in self.canvases])  # int64, (size,)

    def fingerprint(self) -> str:
        """Equal for equal samples."""
        drawn = self.seed, self.task, len(self), self.image_size, self.scraps
        return f"digits: seed, task, size, pixels, scraps {drawn}"

    def __len__(self) -> int:
        return len(self.canvases)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.canvases[index]

    def _draw(self, index: int) -> dict[str, Tensor]:
        random = np.random.default_rng((self.seed, index))
        which, *others = random.integers(len(self.strokes), size=1 + self.scraps)
        canvas = self._background(random)
        half = self.strokes.shape[-1] // 2
        for other in others:
            row, column = random.integers(0, half, size=2)  # a quarter of a digit shows strokes, not which digit
            self._place(canvas, self.strokes[other, :, row : row + half, column : column + half], random)
        box = self._place(canvas, self.strokes[which], random)
        truth = torch.zeros(canvas.shape[1:], dtype=torch.bool)
        truth[box] = True
        image = torch.from_numpy((canvas.clip(0, 1) * 255).round().astype(np.uint8))
        label = torch.tensor(self.stroke_labels[which])
        return {"image": image, "label": label, "index": torch.tensor(index), "truth": truth}

    def _background(self, random: np.random.Generator) -> np.ndarray:
        """Mid-grey with coloured spots, (3, S, S)."""
        spots = random.normal(0.5, 0.06, (3, 8, 8)).astype(np.float32)
        return spots.repeat(self.image_size // 8, 1).repeat(self.image_size // 8, 2)

    def _place(self, canvas: np.ndarray, strokes: np.ndarray, random: np.random.Generator) -> tuple[slice, slice]:
        """Paint strokes (1, side, side) in a random colour somewhere on `canvas`, in place; the box around them."""
        side = strokes.shape[-1]
        row, column = random.integers(0, self.image_size - side + 1, size=2)
        colour = 0.5 + random.choice([-1, 1], size=(3, 1, 1)) * random.uniform(0.3, 0.5, (3, 1, 1)).astype(np.float32)
        box = slice(row, row + side), slice(column, column + side)
        canvas[:, *box] += strokes * (colour - canvas[:, *box])
        return box

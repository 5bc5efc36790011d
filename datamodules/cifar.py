"""torchvision's CIFAR-10 and CIFAR-100 as samples."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.transforms.functional import pil_to_tensor

from datamodules.datasets import Sample, spread
from datamodules.decoding import resize_short_side
from datamodules.fingerprints import digest
from explainers.errors import InputError, check_positive


class Upsampled(Dataset[Sample]):
    """Samples of a torchvision data set of small square images, scaled with bicubic interpolation.

    Args:
        stored: the torchvision data set.
        chosen: positions of the samples in `stored`.
        image_size: side of the scaled images, in pixels.
    """

    def __init__(self, stored: CIFAR10, chosen: Sequence[int], image_size: int) -> None:
        check_positive(image_size=image_size)
        self.stored = stored
        self.chosen = chosen
        self.image_size = image_size
        self.classes = stored.classes
        self.labels = torch.tensor([stored.targets[i] for i in chosen])  # int64, one for each sample

    def fingerprint(self) -> dict[str, str]:
        """A hash for each entry of the samples: equal for equal contents in the same order."""
        pixels = (self.stored.data[i].tobytes() for i in self.chosen)
        return {"image": digest(self.image_size, *pixels), "label": digest(self.labels.tolist())}

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Sample:
        image, label = self.stored[self.chosen[index]]
        image = pil_to_tensor(resize_short_side(image, self.image_size)).contiguous()
        return {"image": image, "label": label, "index": index}


def cifar(root: str | Path, image_size: int, train: bool, name: str = "CIFAR10", limit: int | None = None) -> Upsampled:
    """torchvision's CIFAR-10 or CIFAR-100, read from disk. Nothing is downloaded.

    Args:
        root: folder that contains the unpacked archive, a folder such as cifar-10-batches-py.
        image_size: side of the scaled images, in pixels.
        train: True gives the training split, False the test split.
        name: CIFAR10 or CIFAR100.
        limit: maximum number of images, spread evenly over the data set; `None` takes all.

    Raises:
        InputError: if the data set is missing, incomplete, or has another name.
    """
    try:
        stored = {"CIFAR10": CIFAR10, "CIFAR100": CIFAR100}[name](str(root), train=train, download=False)
    except (KeyError, RuntimeError) as error:
        raise InputError(
            f"expected a complete CIFAR10 or CIFAR100 in {root}, got no {name}; download it with torchvision"
        ) from error
    return Upsampled(stored, spread(len(stored), limit), image_size)

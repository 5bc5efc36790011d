"""A number that is read of any output of any module, such as a region of a segmentation or a detected box."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from explainers.errors import InputError

TargetFunction = Callable[[Any], Tensor]
"""Function of what a module returns for B images → one number of each image, (B,)."""


class OutputReader(nn.Module):
    """A module whose further inputs are fixed, and what a function reads of its output.

    Args:
        model: the module.
        function: reads one number of each image; `None` returns the output itself.
        fixed: further inputs by name. A tensor of one row is repeated for every image.

    >>> import torch
    >>> twice = OutputReader(nn.Bilinear(2, 2, 3), lambda output: output[:, 0], {"input2": torch.ones(1, 2)})
    >>> twice(torch.zeros(4, 2)).shape
    torch.Size([4, 1])
    """

    def __init__(
        self, model: nn.Module, function: TargetFunction | None = None, fixed: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.function = function
        self.fixed = fixed or {}

    def _get_name(self) -> str:
        """Name of the module, for messages."""
        return self.model._get_name()

    def forward(self, images: Tensor) -> Any:
        """Compute the output for images (B, C, H, W), or what is read of it, (B, 1)."""
        output = self.model(images, **{name: _repeat(value, images) for name, value in self.fixed.items()})
        if self.function is None:
            return output
        numbers = self.function(output)
        if not isinstance(numbers, Tensor) or numbers.shape not in ((len(images),), (len(images), 1)):
            got = list(numbers.shape) if isinstance(numbers, Tensor) else type(numbers).__name__
            raise InputError(
                f"target= needs a function that returns one number for each image, a tensor of shape [{len(images)}]"
                f" for {len(images)} images, got {got}: reduce the other dimensions, as in output.mean((1, 2))"
            )
        return numbers.reshape(-1, 1)


def _repeat(value: Any, images: Tensor) -> Any:
    """A fixed input; a tensor on the device of the images, and a single row for each of them."""
    if not isinstance(value, Tensor):
        return value
    value = value.to(images.device)
    return value.expand(len(images), *value.shape[1:]) if value.shape[:1] == (1,) else value

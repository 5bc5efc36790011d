"""What the outputs of a module are: a number that a function reads of them, probabilities, embeddings or logits."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from explainers.errors import InputError
from explainers.models.heads import EMBEDS
from explainers.models.mapping import Inputs

TargetFunction = Callable[[Any], Tensor]
"""Function of a module's output for B images → one number of each image, (B,)."""

RESHAPES = ("View", "Reshape", "Unsafe", "Squeeze", "Unsqueeze", "Slice", "Select", "Alias", "Transpose", "Clone")
"""What the names of a graph's nodes begin with that return the same values in another shape."""

UNIT = f"its outputs have length 1, so they are embeddings: {EMBEDS}; score=softmax if they are logits"
"""What is said of outputs for which `are_embeddings` is true."""


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
        """Compute the output for images (B, C, H, W), or the number that is read of it, (B, 1)."""
        output = self.model(images, **{name: _repeat(value, images) for name, value in self.fixed.items()})
        if self.function is None:
            return output
        try:
            numbers = self.function(output)
        except Exception as error:  # of the function: only its author can say which
            got = list(output) if isinstance(output, Mapping) else list(getattr(output, "shape", ()))
            raise InputError(
                f"target= needs a function of what {self._get_name()} returns, a {type(output).__name__} {got}, got one"
                f" that raises {type(error).__name__}: {' '.join(str(error).split())[:120]}: correct it"
            ) from error
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
    value = value.to(images.device, images.dtype if value.is_floating_point() else value.dtype)
    return value.expand(len(images), *value.shape[1:]) if value.shape[:1] == (1,) else value


def check_no_probabilities(logits: Tensor, name: str) -> None:
    """Raise an InputError for logits (3, K) with a graph that are the output of a softmax, sigmoid or tanh."""
    sums = logits.sum(1)
    if logits.shape[1] > 1 and (logits >= 0).all() and torch.allclose(sums, sums.mean().clamp(min=1e-3), rtol=1e-4):
        raise InputError(
            f"expected logits of {name}, got probabilities, which sum to {sums[0]:.3g}: leave out its softmax, or"
            " return their logarithm"
        )
    last = logits.grad_fn
    while last is not None and last.name().startswith(RESHAPES):
        last = last.next_functions[0][0]
    kind = "" if last is None else last.name().lower().removeprefix("hard").removesuffix("backward0")
    if kind in ("sigmoid", "tanh"):
        what = "probabilities" if kind == "sigmoid" else "values"
        otherwise = "leave out its sigmoid and give score=sigmoid, or " if kind == "sigmoid" else ""
        raise InputError(
            f"expected logits of {name}, got {what} of a {kind}: {otherwise}give score=value to explain them as they"
            " are"
        )


def are_embeddings(outputs: Tensor, given: Inputs) -> bool:
    """Whether outputs (B, K) have length 1, and no score or names of classes are given: cosines compare such rows."""
    unit = outputs.shape[1] > 1 and torch.allclose(outputs.norm(dim=1), torch.ones(()).to(outputs), atol=1e-3)
    return unit and given.score is None and not given.classes

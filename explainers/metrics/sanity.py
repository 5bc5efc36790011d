"""Sanity of explanations: they hardly change with noise in the image, and do change when the model forgets."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from explainers.errors import InputError, check_positive
from explainers.metrics.agreement import spearman
from explainers.metrics.means import MeanOfImages
from explainers.sampling import uniform

NOISE = 0xA015E
"""Seed of the first draw of noise; draw s has the seed `NOISE` + s."""


def with_noise(images: Tensor, index: Tensor, draw: int, radius: float) -> Tensor:
    """Add uniform noise to every value of every pixel, independently, and round to uint8.

    Args:
        images: uint8, (B, C, H, W).
        index: index of each image in the data set, (B,); the noise depends on it and on `draw` alone.
        draw: number of the draw.
        radius: largest absolute value of the noise, as a fraction of the pixel range 0 ... 255.

    Returns:
        uint8, (B, C, H, W).

    Raises:
        InputError: if `radius` is less than one level of a pixel, or more than 1.

    >>> noisy = with_noise(torch.full((1, 3, 32, 32), 100, dtype=torch.uint8), torch.tensor([0]), draw=0, radius=0.02)
    >>> noisy.min().item(), noisy.max().item()
    (95, 105)
    """
    if not 1 / 255 <= radius <= 1:
        raise InputError(
            f"expected radius from 1/255, one level of a pixel, to 1, got radius={radius}: take 0.02 for five levels"
        )
    values = images[0].numel()
    counter = index[:, None] * values + torch.arange(values, device=index.device)  # (B, C·H·W)
    noise = (2 * uniform(counter, NOISE + draw) - 1).view(images.shape) * 255 * radius
    return (images + noise).round().clamp(0, 255).to(torch.uint8)


def max_sensitivity(
    explain: Callable[[Tensor, Tensor], Tensor],
    images: Tensor,
    classes: Tensor,
    index: Tensor,
    heatmaps: Tensor,
    draws: int = 4,
    radius: float = 0.02,
) -> Tensor:
    """Compute max-sensitivity, the largest change of a heatmap when noise is added (SENS_MAX of Yeh et al., 2019).

    max_s ‖φ(x + noise_s) − φ(x)‖ / ‖φ(x)‖ over random draws s, a lower bound of the maximum over all noise of this
    radius. The division by ‖φ(x)‖ makes heatmaps of any unit comparable. The explained class stays that of x. A method
    that draws random numbers anew in every call changes for this reason, too.

    Args:
        explain: uint8 images (B, C, H, W) and classes (B,) → heatmaps (B, P, P).
        images: x, uint8 (B, C, H, W).
        classes: the class to explain in each image, (B,).
        index: index of each image in the data set, (B,), on which the noise depends.
        heatmaps: φ(x), (B, P, P).
        draws: number of draws for each image.
        radius: see `with_noise`.

    Returns:
        float64, (B,); NaN for a heatmap of zeros, which has no relative change.

    >>> images, labels = torch.full((1, 1, 8, 8), 100, dtype=torch.uint8), torch.tensor([0])
    >>> change = max_sensitivity(lambda images, classes: images[:, 0], images, labels, torch.tensor([0]), images[:, 0])
    >>> 0.02 < change.item() < 0.05
    True
    """
    check_positive(draws=draws)
    norms = heatmaps.double().flatten(1).norm(dim=1)
    changes = [
        (explain(with_noise(images, index, draw, radius), classes).double() - heatmaps).flatten(1).norm(dim=1)
        for draw in range(draws)
    ]
    return torch.where(norms > 0, torch.stack(changes).amax(0) / norms, torch.nan)


def random_weights(module: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Draw other values of all parameters of a module, from a normal distribution with the mean and spread of each.

    They take the place of trained weights in the last step of the cascading randomisation of Adebayo et al. (2018),
    which draws them as before training. Buffers stay, also the running statistics of batch normalisation.

    The draws of a parameter depend on its name, its shape and the seed, on every device. A parameter of equal values,
    such as a single number, has no spread and stays as it is, and so do integers.

    Args:
        module: the module, which is not changed.
        seed: another seed gives other values.

    Returns:
        Parameter name → values.

    >>> layer = nn.Linear(100, 100)
    >>> drawn = random_weights(layer)["weight"]
    >>> bool((drawn.std() / layer.weight.std() - 1).abs() < 0.05), bool((drawn - layer.weight).abs().max() > 0.1)
    (True, True)
    """
    return {
        name: _redrawn(parameter.detach(), f"{seed} {name}")
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point()
    }


def _redrawn(values: Tensor, key: str) -> Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"))
    noise = torch.randn(values.shape, generator=generator).to(values.device)
    std, mean = torch.std_mean(values.float(), correction=0)
    return (mean + std * noise).to(values.dtype)


@contextmanager
def replaced(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Give some parameters of a module other values; afterwards they have exactly their own, also after an exception.

    Args:
        module: the module, which is changed in place: all that refers to it computes with the other values.
        weights: parameter name → values, see `random_weights`.

    >>> layer = nn.Linear(2, 1)
    >>> own = layer.bias.item()
    >>> with replaced(layer, {"bias": torch.tensor([7.0])}):
    ...     layer.bias.item()
    7.0
    >>> layer.bias.item() == own
    True
    """
    parameters = dict(module.named_parameters())
    before = {name: parameters[name].detach().clone() for name in weights}

    @torch.no_grad()
    def write(values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            parameters[name].copy_(value)

    try:
        write(weights)
        yield
    finally:
        write(before)


class MaxSensitivity(MeanOfImages):
    """Max-sensitivity, averaged over the images whose heatmap is not 0, see `max_sensitivity`."""

    column = "Max-sensitivity ↓"
    higher_is_better = False

    def update(self, values: Tensor) -> None:
        """Add images, by their values of `max_sensitivity`, (B,)."""
        self.add(values)


class Randomisation(MeanOfImages):
    """|ρ| between heatmaps (B, P, P) of the trained and of the randomised model, averaged over images.

    ρ is Spearman's rank correlation. A method with a high |ρ| highlights much the same patches whatever the model has
    learned: it shows the image, the architecture or its own training, and not the model. The sign of ρ does not count,
    because a heatmap turned upside down highlights the same structure; Adebayo et al. (2018) report ρ of the heatmaps,
    and ρ of their absolute values. Independent heatmaps of N patches have |ρ| ≈ 0.8 / √(N − 1), and smooth ones more.
    Images with a constant heatmap are left out.
    """

    column = "ρ after randomisation ↓"
    higher_is_better = False

    def update(self, heatmaps: Tensor, randomised_heatmaps: Tensor) -> None:
        self.add(spearman(heatmaps.flatten(1), randomised_heatmaps.flatten(1)).abs())

"""Sanity checks: heatmaps should hardly change with noise in the image, and should change with the weights."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from explainers.errors import check_positive
from explainers.metrics.agreement import rank_correlation
from explainers.runtime.sampling import uniform

NOISE = 0xA015E  # seed of the noise; draw s uses the seed `NOISE` + s


def add_noise(images: Tensor, index: Tensor, draw: int, radius: float) -> Tensor:
    """Add uniform noise to every value of every pixel, independently, and round to uint8.

    Args:
        images: uint8, (B, C, H, W).
        index: index of each image in the data set, (B,); the noise depends only on it and on `draw`.
        draw: number of the draw, 0 or more.
        radius: largest absolute value of the noise, as a fraction of the pixel range 0 ... 255, in 1/255 ... 1.

    Returns:
        uint8, (B, C, H, W).
    """
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
    """Compute max-sensitivity, the largest change of a heatmap under noise (SENS_MAX of Yeh et al., 2019).

    max_s ‖φ(x + noise_s) − φ(x)‖ / ‖φ(x)‖ over random draws s is a lower bound of the maximum over all noise of this
    radius. What a method draws anew in every call adds to it.

    Args:
        explain: function from uint8 images (B, C, H, W) and classes (B,) to heatmaps (B, rows, columns).
        images: x, uint8, (B, C, H, W).
        classes: the class to explain in each image, (B,).
        index: see `add_noise`, as for `radius`.
        heatmaps: φ(x), (B, rows, columns).
        draws: number of draws of noise for each image, above 0.

    Returns:
        float64, (B,); NaN for a heatmap of zeros, which has no relative change.
    """
    check_positive(draws=draws)
    norms = heatmaps.double().flatten(1).norm(dim=1)
    changes = [
        (explain(add_noise(images, index, draw, radius), classes).double() - heatmaps).flatten(1).norm(dim=1)
        for draw in range(draws)
    ]
    return torch.where(norms > 0, torch.stack(changes).amax(0) / norms, torch.nan)


def random_weights(module: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Draw new values for each parameter of a module, from a normal distribution with its mean and standard deviation.

    They replace the trained weights, as in the last step of the cascading randomisation of Adebayo et al. (2018), which
    draws from the initialisation instead. Buffers keep their values. The draws of a parameter depend on its name, its
    shape and the seed, and not on the device. A parameter whose values are all equal keeps them.

    Returns:
        Name of each floating-point parameter → new values; the module is not changed.
    """
    return {
        name: _redraw(parameter.detach(), f"{seed} {name}")
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point()
    }


def _redraw(values: Tensor, key: str) -> Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"))
    noise = torch.randn(values.shape, generator=generator, dtype=torch.float32).to(values.device)
    std, mean = torch.std_mean(values.float(), correction=0)
    return (mean + std * noise).to(values.dtype)


@contextmanager
def replace_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the values of some parameters inside this context; on exit, also by an exception, restore them exactly.

    The module is changed in place, so that every object that holds it uses the new values of `random_weights`.
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


def randomisation(heatmaps: Tensor, randomised: Tensor) -> Tensor:
    """Compute |ρ| between heatmaps (B, rows, columns) of the trained and of the randomised model.

    ρ is Spearman's rank correlation (Adebayo et al., 2018, also report that of absolute values). With a high |ρ|,
    heatmaps show the image, the architecture or the training of the explainer rather than what the model learned. The
    sign is ignored, because a negated heatmap highlights the same structure. Independent heatmaps of N patches have
    |ρ| ≈ 0.8 / √(N − 1) on average, and smooth ones more. A constant heatmap shows nothing that the model learned, so
    its |ρ| is 1; another heatmap and a constant one have 0.

    Returns:
        float64, (B,).
    """
    scores = heatmaps.flatten(1)
    correlation = rank_correlation(randomised.flatten(1), scores).abs()
    return correlation.masked_fill((scores == scores[:, :1]).all(1), 1.0)

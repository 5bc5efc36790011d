"""DAVE: Input × Gradient with constant gates, averaged over small shifts of the image."""

import torch
from torch import Tensor

from explainers.errors import check_positive, check_range
from explainers.masking import PatchGrid
from explainers.models import TargetModel
from explainers.posthoc.pixel_gradients import PixelExplainer, images_in_memory
from explainers.posthoc.propagation import FROZEN
from explainers.posthoc.white_box import class_functionals
from explainers.runtime.progress import advance
from explainers.transformer.blocks import find_blocks
from explainers.transformer.recording import record_pass

STEPS = 0.7548776662466927, 0.5698402909980532
"""1 / p and 1 / p² of the real p with p³ = p + 1: multiples of them, modulo 1, cover a square evenly."""


def even_shifts(count: int, radius: int) -> Tensor:
    """Spread shifts (rows, columns) evenly over a square of ± `radius` pixels, no shift first: integers, (count, 2).

    >>> even_shifts(4, radius=8).tolist()
    [[0, 0], [-4, -7], [-8, 2], [4, -5]]
    """
    positions = (0.5 + torch.arange(count)[:, None].double() * torch.tensor(STEPS).double()) % 1
    return ((2 * positions - 1) * radius).round().long()


def shift_images(images: Tensor, shifts: Tensor) -> Tensor:
    """Move images (b, C, H, W) down and to the right by shifts (n, 2), in pixels: (b, n, C, H, W).

    The pixels at the border are repeated, and a gradient returns to the pixels from which it came.

    >>> shift_images(torch.tensor([[[[1.0, 2.0, 3.0]]]]), torch.tensor([[0, 1], [0, -1]]))[0, :, 0, 0].tolist()
    [[1.0, 1.0, 2.0], [2.0, 3.0, 3.0]]
    """
    rows, columns = (
        (torch.arange(side, device=images.device) - shift[:, None]).clamp(0, side - 1)
        for side, shift in zip(images.shape[-2:], shifts.mT, strict=True)
    )
    return images[:, :, rows[:, :, None], columns[:, None]].transpose(1, 2)


class DAVE(PixelExplainer):
    """x ⊙ mean over shifts T of T⁻¹ ∇f(T x) with constant gates, summed over each patch (Wróbel et al., ICML 2026).

    With attention, scales of normalisations and GELU(x) / x as constants in the blocks, the gradient is that of the
    effective linear map of the model (arXiv 2602.06613), without the change of that map. Its mean over small shifts, of
    the image there and of the gradient back, keeps what moves with the image and removes what belongs to the grid of
    the patches. The paper's low-pass filter is here the sum over each patch; `details` has the unfiltered pixels.

    The group of transformations is not known here beyond its size, about 50: these are shifts of at most half a patch.

    Args:
        samples: number of shifts, the first of which is none; each takes a forward and a backward pass.
        radius: largest shift in pixels; `None` for half a patch.
    """

    def __init__(
        self, target: TargetModel, grid: PatchGrid, samples: int = 50, radius: int | None = None, chunk_size: int = 64
    ) -> None:
        super().__init__(target, grid, chunk_size)
        find_blocks(target)  # raises an InputError for a CNN, whose stages have no rules
        check_positive(samples=samples)
        self.samples = self.forward_passes = samples
        self.radius = grid.patch_size // 2 if radius is None else radius
        check_range(0, radius=self.radius)
        self.register_buffer("shifts", even_shifts(samples, self.radius), persistent=False)
        self.shifts: Tensor

    def pixels(self, normalised: Tensor, wanted: Tensor) -> Tensor:
        limit, shifts = images_in_memory(self.chunk_size, normalised), self.shifts.to(normalised.device)
        found = []
        for part, own in zip(normalised.split(limit), wanted.split(limit), strict=True):
            chunks = shifts.split(max(1, limit // len(part)))
            gradients = sum((self._gradients(part, own, chunk) for chunk in chunks), torch.zeros_like(part))
            found.append((part * gradients).sum(1) / self.samples)
        return torch.cat(found)

    def _gradients(self, normalised: Tensor, wanted: Tensor, shifts: Tensor) -> Tensor:
        """Sum the gradients at images (b, C, H, W) over some shifts of them."""
        images = normalised.detach().requires_grad_()
        with record_pass(self.target, FROZEN, start=-1) as record:
            embeddings = self.target.embed(shift_images(images, shifts).flatten(0, 1))
        each = wanted.repeat_interleave(len(shifts), 0)
        functionals = each if each.dim() == 2 else class_functionals(self.target, embeddings, each)
        advance(len(embeddings))
        return record.gradients(embeddings, functionals[:, None], [images])[0][:, 0].detach()

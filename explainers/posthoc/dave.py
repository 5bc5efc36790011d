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


def even_shifts(count: int, radius: int) -> Tensor:
    """Spread shifts (rows, columns) evenly over a square of ± `radius` pixels, no shift first: integers, (count, 2)."""
    steps = torch.tensor([0.7548776662466927, 0.5698402909980532]).double()  # 1 / p and 1 / p² of the p with p³ = p + 1
    return ((2 * ((0.5 + torch.arange(count)[:, None] * steps) % 1) - 1) * radius).round().long()


def shift_images(images: Tensor, shifts: Tensor) -> Tensor:
    """Move images (b, C, H, W) down and to the right by shifts (n, 2), repeating pixels at the border: (b, n, C, H, W).

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

    With attention, scales of normalisations and GELU(x) / x as constants in the blocks, the gradient is the effective
    linear map of the model (arXiv 2602.06613). Its mean over small shifts, of the image there and of the gradient back,
    keeps what moves with the image and removes what belongs to the grid of the patches.

    Of the paper's transformations only the number, about 50, is known here: these are shifts of at most half a patch.
    Its low-pass filter is here the sum over each patch.

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
        limit, found = images_in_memory(self.chunk_size, normalised), []
        for part, own in zip(normalised.split(limit), wanted.split(limit), strict=True):
            total = torch.zeros_like(part)
            for shifts in self.shifts.to(part.device).split(max(1, limit // len(part))):
                images = part.detach().requires_grad_()
                with record_pass(self.target, FROZEN, start=-1) as record:
                    embeddings = self.target.embed(shift_images(images, shifts).flatten(0, 1))
                each = own.repeat_interleave(len(shifts), 0)
                functionals = each if each.dim() == 2 else class_functionals(self.target, embeddings, each)
                total += record.gradients(embeddings, functionals[:, None], [images])[0][:, 0]
                advance(len(embeddings))
            found.append((part * total).sum(1) / self.samples)
        return torch.cat(found)

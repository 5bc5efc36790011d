"""Feature maps of CNNs, and of other models with stages: where the model computes them, and their record.

The outputs of the stages stand for the tokens that enter the blocks of a transformer. The last stage is layer −1. Also
blocks that other files do not know, such as those of CaiT and XCiT, are stages, if they output patches row by row.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from explainers.errors import UnsupportedModel
from explainers.models import TargetModel
from explainers.models.gradients import check_gradients
from explainers.transformer.recording import Record, record_input_gradients
from explainers.transformer.rules import Rules


def find_stages(target: TargetModel) -> list[nn.Module]:
    """Return the modules whose outputs are the feature maps of a model, as timm lists them."""
    names = [level.get("module", "") for level in getattr(target.backbone, "feature_info", [])]
    try:
        stages = [target.backbone.get_submodule(name) for name in names if name]
    except AttributeError:
        stages = []
    if not stages:
        raise missing_maps(target)
    return stages


def missing_maps(target: TargetModel) -> UnsupportedModel:
    """The error for a model without feature maps that the embedding depends on."""
    otherwise = "a transformer or a CNN of timm, or a method for any model, such as RISE or IntegratedGradients"
    return UnsupportedModel("a model with layers of tokens or of square feature maps", target.name, otherwise)


def token_grid(target: TargetModel, output: Any, number: int) -> tuple[int, int] | None:
    """Return rows and columns of a stage's output if it holds patches alone, row by row: (B, N, C)."""
    if not isinstance(output, Tensor) or output.dim() != 3:
        return None
    backbone, last = target.backbone, len(target.backbone.feature_info) - 1
    if hasattr(backbone, "reroll") and (number < last or backbone.q_pool < last):
        return None  # Hiera sorts patches by windows, until it has pooled them all
    rows, columns = target.grid.shape
    height = round((output.shape[1] * rows / columns) ** 0.5)
    width = output.shape[1] // height
    return (height, width) if height * width == output.shape[1] and height * columns == width * rows else None


@contextmanager
def record_stages(target: TargetModel, start: int = 0) -> Iterator[Record]:
    """Record the feature maps (B, h, w, C) of the forward pass that runs inside this context, as `inputs`.

    An UnsupportedModel says that the stages from `start` on, where the graph begins, do not output feature maps.
    """
    record = Record((), Rules(), attention=False)
    channels = [level["num_chs"] for level in target.backbone.feature_info]
    maps: dict[int, Tensor] = {}

    def leave(number: int, stage: nn.Module, inputs: Any, output: Any) -> Tensor:
        shape = token_grid(target, output, number)
        output = output.unflatten(1, shape) if shape else output
        if not isinstance(output, Tensor) or output.dim() != 4 or number in maps:
            raise missing_maps(target)
        output = output.detach().requires_grad_() if number == start else output
        channels_first = not shape and output.shape[1] == channels[number]
        maps[number] = output.movedim(1, -1) if channels_first else output
        passed_on = maps[number].movedim(-1, 1) if channels_first else maps[number]
        passed_on = passed_on.flatten(1, 2) if shape else passed_on
        return passed_on.clone()  # the next layer may change it in place

    with ExitStack() as stack:
        stack.enter_context(record_input_gradients(target))
        stack.enter_context(check_gradients(target, ("stages", start)))
        for number, stage in list(enumerate(find_stages(target)))[start:]:
            stack.callback(stage.register_forward_hook(partial(leave, number)).remove)
        yield record
    record.inputs = [maps.get(number, torch.empty(0)) for number in range(len(channels))]


def check_stages(target: TargetModel, size: tuple[int, int], start: int) -> None:
    """Raise an UnsupportedModel unless the embedding depends on the maps of all stages from `start` on."""
    blank = torch.zeros(1, len(target.mean), *size, device=target.mean.device, dtype=torch.float32)
    with record_stages(target, start) as record:
        embedding = target.embed(blank)
    maps = record.inputs[start:]
    try:
        gradients = torch.autograd.grad(embedding, maps, torch.ones_like(embedding), allow_unused=True)
    except RuntimeError as error:  # no graph at all
        raise missing_maps(target) from error
    if any(gradient is None for gradient in gradients):
        raise missing_maps(target)

"""What all processes of a training compute together."""

import torch
from torch import Tensor, distributed


def of_all_processes(values: Tensor) -> Tensor:
    """Gather a tensor of all processes, with a new first dimension; in a single process, the tensor itself."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return values
    values = values.contiguous()
    parts = [torch.empty_like(values) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, values)
    return torch.stack(parts)

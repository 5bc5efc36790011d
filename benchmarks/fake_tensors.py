"""Tensors without numbers: what the code of a module allocates, added up without computing anything.

`torch._subclasses.FakeTensorMode` runs real code with tensors that have a shape and a storage size, but no numbers, and
`Memory` adds up the storages that are alive. What stands for a GPU:

- Fake tensors are on the CPU, because the backward pass of fake CUDA tensors needs a GPU in torch 2.15.
  `cuda_autocast` makes autocast choose the same types as on CUDA.
- Attention is the CPU's flash attention, whose results have the sizes of CUDA's: no T × T matrix where the code allows
  fused attention.
- Draws of patches and coalitions are real: what is computed from known numbers alone is known. Where the code reads a
  number of a fake tensor, checks of values pass.
- Not counted: what lives inside a kernel (the float32 sums of flash attention's backward pass, workspaces of cuBLAS and
  cuDNN), rounding of blocks beyond 512 bytes, the CUDA context and NCCL. `benchmarks/memory.py` has a reserve for them.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other folders of the project are not installed

from explainers.transformer.blocks import readout

BLOCK = 512
"""Bytes that CUDA's allocator rounds up to."""
FLOAT32 = {
    *("layer_norm", "native_layer_norm", "group_norm", "softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod"),
    *("norm", "pow", "__pow__", "__rpow__", "exp", "log", "log1p", "expm1", "reciprocal", "rsqrt", "softplus"),
    *("logsumexp", "cosine_similarity", "kl_div", "nll_loss", "l1_loss", "smooth_l1_loss", "mse_loss", "cross_entropy"),
}
"""Functions that autocast computes in float32 on CUDA; on a CPU it leaves some of them in bfloat16."""
ATEN = torch.ops.aten
KNOWN = {ATEN.arange.default, ATEN.arange.start, ATEN.arange.start_step, ATEN.eye.default, ATEN.linspace.default}
"""These make tensors of known numbers, as `torch.tensor` does."""
READS: dict[Any, Any] = {
    ATEN._local_scalar_dense.default: lambda tensor: tensor.dtype != torch.bool and 0,
    ATEN.allclose.default: lambda tensor: True,
}
"""What the code reads from tensors whose numbers are not known, so that checks of values pass."""


def _positions(index: Tensor | None) -> Tensor | None:
    """An index of known numbers instead of a mask, whose result has a known size."""
    if index is None or isinstance(index, FakeTensor) or index.dtype != torch.bool:
        return index
    with unset_fake_temporarily():
        return index.nonzero()[:, 0]


class Memory(TorchDispatchMode):
    """Adds up the bytes of all storages that were allocated in this mode and are alive.

    Attributes:
        current: bytes now.
        peak: the largest number of bytes since `restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        known = not any(isinstance(each, FakeTensor) for each in given)
        single = func in (ATEN.zeros.default, ATEN.ones.default) and not list(args[0])
        if known and (given or func in KNOWN or single):  # draws of coalitions and patches, steps of the optimiser
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
        elif func in READS:
            return READS[func](args[0])
        else:
            if func is ATEN.index.Tensor:
                args = args[0], [_positions(each) for each in args[1]]
            result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        return result

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, once."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.alive and storage.nbytes():
            size = -(-storage.nbytes() // BLOCK) * BLOCK
            self.alive.add(storage._cdata)
            weakref.finalize(storage, self._remove, storage._cdata, size).atexit = False
            self.current += size
            self.peak = max(self.peak, self.current)

    def _remove(self, key: int, size: int) -> None:
        self.alive.discard(key)
        self.current -= size

    def restart(self) -> None:
        """Forget the peak."""
        gc.collect()
        self.peak = self.current


class CudaTypes(TorchFunctionMode):
    """Casts the arguments of `FLOAT32` functions under the CPU's autocast, as CUDA's autocast does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, _float32, (tuple(args), kwargs))
        return func(*args, **kwargs)


def _float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """bf16-mixed of Lightning on CUDA, for tensors on the CPU."""
    with torch.autocast("cpu", torch.bfloat16), CudaTypes():
        yield


class NoDraws(TorchDispatchMode):
    """Makes weights zero, because random numbers for them take most of the time to build a model.

    What was in their memory would not do: torch draws numbers until all are in the range of a truncated distribution.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (ATEN.uniform_.default, ATEN.normal_.default, ATEN.erfinv_.default):
            return args[0].zero_()
        return func(*args, **(kwargs or {}))


def make_fake(module: nn.Module, mode: FakeTensorMode, memory: Memory) -> None:
    """Replace all parameters and buffers by fake ones."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = replaced = mode.from_tensor(tensor)  # type: ignore[assignment]
                    memory.add(replaced)


def _known_readout(*arguments: Any) -> Tensor:
    with unset_fake_temporarily():
        return readout(*arguments)


@contextmanager
def fake(build: Callable[[], Any]) -> Iterator[tuple[Any, Memory]]:
    """A module that `build` makes, with fake weights, and the memory of all that is allocated in this context."""
    with NoDraws():
        module = build()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, Memory() as memory:
        make_fake(module, mode, memory)
        gc.collect()
        with patch("explainers.transformer.direct_paths.readout", _known_readout):  # how many tokens are read
            yield module, memory


def count_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of all tensors among these."""
    return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, Tensor))

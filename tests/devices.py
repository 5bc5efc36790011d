"""A device that refuses to mix, for tests without a GPU: tensors of real numbers that say they are on another device.

The device is called `meta`, because autograd needs no driver for it. Every operation that would fail on a GPU because
one of its tensors is on the CPU raises a `Mixed`, and so do `numpy()` and the CPU's generators.
"""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from explainers.runtime import modes

DEVICE = torch.device("meta")
ATEN = torch.ops.aten
COPIES = {ATEN._to_copy.default, ATEN.copy_.default}
INDEXED = {
    *(ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default),
    *(ATEN._index_put_impl_.default, ATEN._unsafe_index.Tensor),
}
"""Their indices, the second argument, may be on the CPU."""


WITHOUT = set()
"""Types of numbers that the device lacks."""


class Mixed(RuntimeError):
    """Tensors of two devices met."""


class OnDevice(torch.Tensor):
    """A tensor of real numbers, which are in `numbers`, that says it is on the device."""

    @staticmethod
    def __new__(cls, numbers):
        return torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, numbers.stride(), numbers.storage_offset(), dtype=numbers.dtype, device=DEVICE
        )

    def __init__(self, numbers):
        self.numbers = numbers

    def __repr__(self):
        return f"OnDevice({self.numbers})"

    def __reduce_ex__(self, protocol):  # a file is read to the CPU, unless it is said otherwise
        return self.numbers.detach().__reduce_ex__(protocol)

    def new_tensor(self, data, *args, device=DEVICE, **settings):
        return torch.tensor(data, *args, device=device, **settings)

    def numpy(self, **settings):
        raise Mixed("numpy() of a tensor of the device")

    def __getitem__(self, index):
        return super().__getitem__(indexed(index))

    def __setitem__(self, index, values):
        super().__setitem__(indexed(index), values)

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})


class RefusesToMix(TorchDispatchMode):
    """Sees the operations that make tensors, and those of tensors on the CPU alone, too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})


def computed(func, args, kwargs):
    """Run an operation with real numbers; its results are where those of a GPU would be."""
    wanted, given = kwargs.get("device"), list(tensors((*args, *kwargs.values())))
    on_device = [each for each in given if isinstance(each, OnDevice)]
    there = bool(on_device) if wanted is None else torch.device(wanted) == DEVICE
    if not there and not on_device:
        return func(*args, **kwargs)
    check(func, args, kwargs, given, there)
    numbers, options = [real(each) for each in args], {name: real(each) for name, each in kwargs.items()}
    if wanted is not None:
        options = options | {"device": torch.device("cpu")}
    result = func(*numbers, **options)
    if func in COPIES:
        if func is ATEN.copy_.default:
            return args[0]
        result = result.clone() if result is numbers[0] else result
    if not there:
        return result
    if func is ATEN.empty.memory_format:  # nobody may rely on what is in new memory
        result.fill_(torch.nan if result.is_floating_point() else result.dtype != torch.bool and 99)
    result = OnDevice(result) if isinstance(result, torch.Tensor) else tree_map_only(torch.Tensor, OnDevice, result)
    lacking = [each for each in tensors([result]) if each.dtype in WITHOUT]
    if lacking:
        raise TypeError(f"the device has no {lacking[0].dtype}, which {func} makes")
    alias = any(each.alias_info for each in func._schema.returns)
    return return_and_correct_aliasing(func, args, kwargs, result) if alias else result


def indexed(index):
    """An index whose lists are tensors, because autograd would copy them to the device without their numbers."""
    if isinstance(index, tuple):
        return tuple(indexed(each) for each in index)
    return torch.tensor(index) if isinstance(index, list) else index


def tensors(values):
    """The tensors among arguments of an operation, which may be lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


def real(value):
    """An argument of an operation, with its real numbers."""
    if isinstance(value, (list, tuple)):
        return [real(each) for each in value]
    return value.numbers if isinstance(value, OnDevice) else value


def check(func, args, kwargs, given, there):
    """Raise where a GPU would: for a CPU tensor beside one of the device, unless it is a single number."""
    generator = kwargs.get("generator")
    if there and generator is not None:
        raise Mixed(f"{func} on the device got a generator of the {generator.device.type.upper()}")
    if func in COPIES:
        return
    if func in INDEXED and isinstance(args[0], OnDevice):
        given = [each for each in (args[0], *args[2:]) if isinstance(each, torch.Tensor)]
    numbers_pass = torch.Tag.pointwise in func.tags or func in INDEXED
    for tensor in given:
        if not isinstance(tensor, OnDevice) and not (numbers_pass and tensor.dim() == 0):
            raise Mixed(f"{func} got tensors of the device, and one of the CPU of shape {list(tensor.shape)}")


class Autocast(torch.autocast):
    """Autocast knows no device of this name: it is that of the CPU."""

    def __init__(self, device_type, *args, **kwargs):
        super().__init__("cpu" if device_type == DEVICE.type else device_type, *args, **kwargs)


@contextmanager
def refusing_to_mix(float64=True):
    """Everything that is on the device, or goes there, is so in this context; the device may lack float64."""
    with ExitStack() as changes:
        if not float64:
            changes.enter_context(patch.object(modes, "WITHOUT_FLOAT64", {DEVICE.type}))
            changes.callback(WITHOUT.clear)
            WITHOUT.add(torch.float64)
        changes.enter_context(RefusesToMix())
        changes.enter_context(patch("torch.autocast", Autocast))
        changes.enter_context(patch("torch.load", loaded(torch.load)))
        for name in ("tensor", "as_tensor"):  # they would make tensors without numbers
            changes.enter_context(patch(f"torch.{name}", moved(getattr(torch, name))))
        yield


def moved(build):
    """The function, which makes a tensor on the CPU and moves it to where it is wanted."""
    return lambda data, *args, device=None, **settings: build(data, *args, **settings).to(device)


def loaded(load):
    """`torch.load`, which moves what it read to where it is wanted."""

    def read(file, map_location=None, **settings):
        there = map_location is not None and torch.device(map_location) == DEVICE
        values = load(file, "cpu", **settings)
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(DEVICE), values) if there else values

    return read


class Pretended(CPUAccelerator):
    """An accelerator of Lightning with this device."""

    def setup_device(self, device):
        """Nothing to set up."""


def on_device():
    """Arguments of a Trainer that runs on the device."""
    return {"strategy": SingleDeviceStrategy(device=DEVICE, accelerator=Pretended())}

"""Count on a CPU where a host would wait for a device: CPU tensors stand in for those of a device.

Everything computed from the given tensors counts as being on the device. Reading a number of it on the host waits, and
so does an operation whose output length depends on it. Kernels run as they would on CUDA: those in Triton, in its
interpreter, else those in torch.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from dgcopt.flat.buckets import Bucket
from dgcopt.kernels import Kernel

__all__ = ["Operations", "Waits", "as_on_cuda"]

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.is_nonzero,
    aten.equal,
    aten.bincount,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
}
BY_MASK = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Waits(TorchDispatchMode):
    """Records the operations within it that would wait for a device.

    Args:
        on_device: tensors that are on the device when it begins.

    Attributes: `found`, of each wait the operation and the lines of dgcopt that led to it.
    """

    def __init__(self, on_device: Iterable[Tensor]) -> None:
        super().__init__()
        self.found: list[str] = []
        self._storages = {
            self._key(tensor): tensor.untyped_storage() for tensor in on_device
        }  # kept: no key comes twice
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Waits:
        mode = self
        cpu, tolist = Tensor.cpu, Tensor.tolist

        def counted_cpu(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not mode.has(tensor):
                return cpu(tensor, *args, **kwargs)
            mode.wait("cpu")
            with _disable_current_modes():
                copy = tensor.clone()
            return copy

        def counted_tolist(tensor: Tensor) -> Any:
            if mode.has(tensor):
                mode.wait("tolist")
            return tolist(tensor)

        self._patch.setattr(Tensor, "cpu", counted_cpu)
        self._patch.setattr(Tensor, "tolist", counted_tolist)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _tensors((args, kwargs))
        touched = any(self.has(tensor) for tensor in given)
        if touched and _waits(func.overloadpacket, args, kwargs or {}):
            self.wait(func.overloadpacket.__name__)
        made = func(*args, **(kwargs or {}))
        if touched:
            self.put([*_tensors(made), *(given if func._schema.is_mutable and not _tensors(made) else [])])
        return made

    def has(self, tensor: Tensor) -> bool:
        """True if a tensor is on the device."""
        return self._key(tensor) in self._storages

    def put(self, tensors: Iterable[Tensor]) -> None:
        """A kernel has written to tensors."""
        self._storages.update((self._key(tensor), tensor.untyped_storage()) for tensor in tensors)

    def wait(self, operation: str) -> None:
        """Record one."""
        stack = traceback.extract_stack()
        ours = [
            f"{frame.filename.split('dgcopt/')[-1]}:{frame.lineno}" for frame in stack if "/dgcopt/" in frame.filename
        ]
        self.found.append(f"{operation} at {' < '.join(reversed(ours[-5:]))}")

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


def _waits(packet: Any, args: Any, kwargs: Any) -> bool:
    if packet in BY_MASK:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if packet is aten.repeat_interleave:
        return kwargs.get("output_size") is None
    return packet in READS


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Buckets and kernels do what they do on CUDA, where tensors are on the CPU."""
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        modes = [
            mode for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack() if isinstance(mode, Waits)
        ]
        with _disable_current_modes():
            launch(self, *args, **kwargs)
        for mode in modes:  # whatever it has written to, it has read from a device
            mode.put(arg for arg in args if isinstance(arg, Tensor))

    def implementation(kernel: Kernel[Any, Any], *arguments: Any) -> Any:
        return kernel.triton if kernel.in_triton and kernel.takes_triton(*arguments) else kernel.specification

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launched)
        patch.setattr(Kernel, "implementation", implementation)
        patch.setattr(torch.cuda, "device_of", lambda _: contextlib.nullcontext())
        patch.setattr(Bucket, "is_cpu", False)
        yield

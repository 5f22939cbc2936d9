"""Launching a Triton kernel with little host work.

``JITFunction[grid](...)`` computes a kernel's specialization at every launch: 7 to 15 µs in Python. A :class:`Launcher`
keeps the compiled kernel under a key that determines the specialization, and launches it with ``CompiledKernel.run``,
which ``JITFunction.run`` also calls. If that shortcut is untested (another compiler, an untested version of Triton, a
profiler's hook, tracing by Dynamo, the interpreter), it uses the public launch. :meth:`Launcher.first` is for a kernel
of every step: later launches compute no key either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from .. import native
from ..errors import NotSupported
from .cuda import CUDA
from .detect import detect_device
from .triton import interpreted

TESTED = ((3, 6), (3, 7), (3, 8))
"""Versions of Triton in which the shortcut is tested; with 3.7 attention only in engines."""
MISALIGNED = 15  # Triton specializes a pointer on divisibility by 16
INTERPRETED = interpreted()
PLAIN = frozenset({Tensor, torch.nn.Parameter})
"""Types of tensors that have data."""
Grid = tuple[int, int, int]
"""Programs along three axes."""
Repeat = Callable[[Grid, tuple[int, ...]], None]
"""A function that launches a kernel again, with a grid, and addresses and sizes in one tuple."""


def prepares() -> bool:
    """Whether the shortcut is tested here, so that :meth:`Launcher.first` returns a function."""
    if INTERPRETED or detect_device() is not CUDA:
        return False
    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) in TESTED


def _hooked() -> bool:
    """Whether a profiler hooks launches."""
    hook = triton.knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


class Launcher:
    """A kernel with parameters in this order: tensors, numbers without effect on its code, all others.

    Args:
        kernel: decorated with ``triton.jit``; the numbers of ``sizes`` are in its ``do_not_specialize``.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Any, Any] = {}
        self._short: bool | None = None

    def __call__(
        self,
        grid: Grid,
        tensors: tuple[Tensor, ...],
        numbers: tuple[Any, ...],
        *,
        sizes: tuple[Any, ...] = (),
        warps: int = 4,
        stages: int = 3,
    ) -> None:
        """Launch.

        Args:
            grid: programs along three axes, none of them zero.
            tensors: the leading arguments.
            numbers: strides, sizes of weights, constants; each combination of their values is kept, so few may exist.
            sizes: numbers below 2**31 that vary from call to call, and tensor descriptors, all of one kind.
            warps, stages: options of the compiled kernel.

        Raises:
            NotSupported: the tensors are in host memory and kernels are not interpreted, or a tensor has no data.
        """
        device = tensors[0].get_device()
        if device < 0 and not INTERPRETED:
            raise NotSupported("the tensors are on the CPU")
        if torch.compiler.is_dynamo_compiling():
            self.kernel[grid](*tensors, *sizes, *numbers, num_warps=warps, num_stages=stages)
            return
        if self._short is None:
            self._short = prepares()
        if not self._short or _hooked():
            native.require_data(tensors)
            self.kernel[grid](*tensors, *sizes, *numbers, num_warps=warps, num_stages=stages)
            return
        if not PLAIN.issuperset(map(type, tensors)):  # one may be fake: its address, or a view's, means nothing
            native.require_data(tensors)
        pointers = [tensor.data_ptr() for tensor in tensors]
        aligned = 0
        for pointer in pointers:
            aligned += aligned + (not pointer & MISALIGNED)
        key = (device, warps, stages, aligned, numbers, *[tensor.dtype for tensor in tensors])
        compiled = self._compiled.get(key)
        if compiled is None:
            native.require_data(tensors)
            self._compiled[key] = self.kernel[grid](*tensors, *sizes, *numbers, num_warps=warps, num_stages=stages)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled.run(
            *grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *pointers, *sizes, *numbers
        )

    def first(
        self, grid: Grid, tensors: tuple[Tensor, ...], numbers: tuple[Any, ...], *, sizes: tuple[int, ...], warps: int
    ) -> Repeat | None:
        """Launch, and return a function that launches again; ``None`` if the shortcut is untested.

        The caller of the function ensures that its tensors have the dtypes, device and alignment of these.
        """
        native.require_data(tensors)
        compiled = self.kernel[grid](*tensors, *sizes, *numbers, num_warps=warps)
        if not prepares():
            return None
        device, stream_of = tensors[0].get_device(), torch._C._cuda_getCurrentRawStream
        run, fixed = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)

        def launch(grid: Grid, arguments: tuple[int, ...]) -> None:
            if _hooked():
                compiled[grid](*arguments, *numbers)
            else:
                run(*grid, stream_of(device), *fixed, *arguments, *numbers)

        return launch

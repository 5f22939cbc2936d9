"""Run a warp-specialized Gluon kernel on the CPU, for which Triton has no interpreter.

Only the features that the Hopper kernels use are emulated. Each partition of a program is a thread. Whatever the device
may do late is done late: the bytes of a copy arrive at the wait, products see them only behind a fence, and until then
the buffer holds NaN. A product reads its buffers when it is issued and again at its wait, and must find the same
numbers. Therefore a buffer that is read or reused too early gives an error or a wrong result, and so does a barrier
that never completes.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

UNFILLED = {1: 0xFF, 2: 0x7FBB, 4: 0x7FBB7FBB}
"""Bytes of an element → the NaN that a buffer holds until it is full; no computation makes this one."""
PATIENCE = 20.0
"""Seconds after which a wait counts as a deadlock."""
LAYOUTS = ("Blocked", "Slice", "NVMMADistributed", "DotOperand", "NVMMAShared", "SwizzledShared", "DistributedLinear")


class Pointer:
    """An address of a tensor's memory, or a tensor of them."""

    def __init__(self, storage: Tensor, offset: Any) -> None:
        self.storage, self.offset = storage, offset
        self.dtype = SimpleNamespace(element_ty=storage.dtype)

    @classmethod
    def of(cls, tensor: Tensor) -> Pointer:
        """Address of the first element; all of the tensor's storage can be reached."""
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(tensor.as_strided((size,), (1,), 0), tensor.storage_offset())

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.storage, self.offset + other)

    def load(self, mask: Any = None, other: Any = 0) -> Tensor:
        offset = torch.as_tensor(self.offset)
        if mask is None:
            return self.storage[offset]
        offset, mask = torch.broadcast_tensors(offset, mask)
        return torch.where(mask, self.storage[torch.where(mask, offset, 0)], torch.tensor(other).to(self.storage.dtype))

    def store(self, value: Tensor, mask: Tensor) -> None:
        offset, value, mask = torch.broadcast_tensors(torch.as_tensor(self.offset), value, mask)
        self.storage[offset[mask]] = value[mask]


class Barrier:
    """A barrier: completes a phase after ``count`` arrivals and the expected bytes of copies, which land then."""

    def __init__(self, changed: threading.Condition) -> None:
        self.changed, self.count, self.arrived, self.phases = changed, 0, 0, 0
        self.bytes, self.copies = 0, list[Callable[[], object]]()

    def arrive(self, count: int, expected: int = 0) -> None:
        with self.changed:
            self.arrived += count
            self.bytes += expected
            assert self.arrived <= self.count, "more arrivals than a phase has"
            self._complete()

    def copy(self, size: int, copy: Callable[[], object]) -> None:
        with self.changed:
            self.bytes -= size
            self.copies.append(copy)
            assert self.bytes >= 0, "more bytes than are expected"
            self._complete()

    def _complete(self) -> None:
        if self.arrived == self.count and not self.bytes:
            for copy in self.copies:
                copy()
            self.arrived, self.phases, self.copies = 0, self.phases + 1, []
            self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: self.phases % 2 != parity, PATIENCE)
        if not done:
            raise TimeoutError("deadlock")


class Descriptor:
    """A tensor descriptor for bulk copies: four dimensions, 64-bit addresses, zeros outside."""

    def __init__(self, made: Any) -> None:
        self.source = Pointer.of(made.base)
        self.shape, self.strides, self.block = made.shape, made.strides, made.block_shape
        assert all(stride * made.base.element_size() < 1 << 40 for stride in self.strides)

    def load(self, place: list[Any]) -> Tensor:
        size = self.source.storage.element_size()
        found = torch.zeros(self.block, dtype=self.source.storage.dtype)
        at = [int(start) + torch.arange(length) for start, length in zip(place, self.block, strict=True)]
        for index in product(*(range(length) for length in self.block[:-1])):
            row = [int(line[n]) for line, n in zip(at, index, strict=False)]
            if all(0 <= n < bound for n, bound in zip(row, self.shape, strict=False)):
                address = sum(n * stride * size for n, stride in zip(row, self.strides, strict=False)) % (1 << 64)
                address -= (address >> 63) << 64
                inside = (at[-1] >= 0) & (at[-1] < self.shape[-1])
                offset = self.source.offset + address // size + torch.where(inside, at[-1], 0)
                found[index] = torch.where(inside, self.source.storage[offset], 0)
        return found


class Shared:
    """A buffer in shared memory.

    Args:
        memory: the buffer's numbers.
        late: takes a store that products see only behind a fence; without it a store is seen at once.
    """

    def __init__(self, memory: Tensor, late: Callable[[Callable[[], object]], None] | None = None) -> None:
        self.memory, self.dtype, self.late = memory, memory.dtype, late

    def index(self, index: Any) -> Shared:
        return Shared(self.memory[int(index)], self.late)

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.memory[start : start + length])

    def store(self, value: Tensor) -> None:
        if self.late:
            empty(self.memory)
            self.late(lambda: self.memory.copy_(value))
        else:
            self.memory.copy_(value)

    def load(self, layout: object) -> Tensor:
        return self.memory.clone()

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.memory.permute(order))

    @property
    def shape(self) -> torch.Size:
        return self.memory.shape

    def reshape(self, shape: list[int]) -> Shared:
        assert list(self.shape) == [length for length in shape if length > 1]
        return Shared(self.memory[(None,) * (len(shape) - self.memory.dim())])

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> Chunks:
        assert dtype is self.dtype
        assert shape[1] == self.shape[1]
        assert shape[0] * shape[2] == self.shape[0] * self.shape[2]
        return Chunks(self.memory.unflatten(2, (-1, shape[2])))


class Chunks:
    """Tiles stored as chunks of some columns each, one after another in shared memory."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    def index(self, index: Any) -> Shared:
        stage, part = divmod(int(index), self.memory.shape[2])
        return Shared(self.memory[stage, :, part])


class Barriers:
    """Several barriers, or one of them selected by an index."""

    def __init__(self, each: list[Barrier]) -> None:
        self.each = each

    def index(self, index: Any) -> Barriers:
        return Barriers([self.each[int(index)]])


def aggregate(cls: Any) -> Any:
    """Gluon's decorator of that name: only the annotated fields have values, and these cannot be changed."""
    fields = tuple(cls.__annotations__)

    def init(self: Any, *values: Any, **named: Any) -> None:
        given = {**dict(zip(fields, values, strict=False)), **named}
        assert len(values) + len(named) == len(fields), f"{cls.__name__} has {len(fields)} fields"
        assert set(given) == set(fields), f"{cls.__name__} has the fields {fields}"
        vars(self).update(given)

    def refuse(self: Any, name: str, value: Any) -> None:
        raise AttributeError(f"cannot assign to field '{name}' of {cls.__name__}")

    cls.__init__, cls.__setattr__ = init, refuse
    return cls


def multiple_of(value: Tensor, factors: list[int]) -> Tensor:
    """Gluon's hint of that name, which is not checked."""
    assert all(not (value % factor).any() for factor in factors), f"not multiples of {factors}: {value.flatten()}"
    return value


def _bits(memory: Tensor) -> Tensor:
    return memory.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[memory.element_size()])


def empty(memory: Tensor) -> Tensor:
    """Return memory that nothing was written to."""
    _bits(memory).fill_(UNFILLED[memory.element_size()])
    return memory


def unfilled(memory: Tensor) -> bool:
    """Whether nothing was written to a part of the memory."""
    return bool((_bits(memory) == UNFILLED[memory.element_size()]).any())


class Product:
    """A product that was issued and not yet waited for."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self.work, self.result = work, None

    def finish(self) -> None:
        self.result = self.work()


class Machine:
    """The names that a kernel imports.

    Args:
        programs: number along the first axis of the grid.
        seed: of the random delays of threads.
    """

    def __init__(self, programs: int, seed: int = 0) -> None:
        self.programs, self.program, self.others = programs, 0, (0, 0)
        self.changed = threading.Condition()
        self.local = threading.local()
        self.random = random.Random(seed)

    def run(self, kernel: Callable[..., None], *arguments: Any, more: tuple[int, int] = (1, 1)) -> None:
        """Run all programs, one after another; ``more`` holds the grid's sizes along its other axes."""
        made = lambda value: Descriptor(value) if hasattr(value, "block_shape") else value
        given = [Pointer.of(value) if isinstance(value, Tensor) else made(value) for value in arguments]
        for others in product(*map(range, more)):
            self.others = others
            for program in range(self.programs):
                self.program = program
                kernel(*given)

    def load(self, directory: Path, names: tuple[str, ...]) -> dict[str, Any]:
        """Return the names that a kernel's files define; a file may use the names of those before it.

        A name is a path below the directory without ``.py``. All files share one namespace; their imports are left out.
        """
        found = self._names()
        for name in names:
            source = (directory / f"{name}.py").read_text()
            source = re.sub(r"^(import triton|from (triton|\.))[^(\n]*(\([^)]*\))?$", "", source, flags=re.MULTILINE)
            exec(compile(source.replace(".type.layout", ".layout"), name, "exec"), found)
        return found

    def _names(self) -> dict[str, Any]:
        def jit(fn: Any = None, **_: Any) -> Any:
            return fn if fn is not None else lambda fn: fn

        nothing = lambda *args, **kwargs: None
        number = lambda value: value if isinstance(value, Tensor) else torch.tensor(value)

        def assembly(text: str, constraints: str, args: list[Tensor], **_: Any) -> Any:
            if text == "mov.b32 {$0, $1}, $2;":
                return args[0].view(torch.int16).unflatten(-1, (-1, 2)).unbind(-1)
            halves = {"cvt.rn.bf16x2.f32 $0, $2, $1;": torch.bfloat16, "cvt.rn.f16x2.f32 $0, $2, $1;": torch.float16}
            return torch.stack(args, -1).to(halves[text]).view(torch.int32).squeeze(-1)

        dtypes = ("int16", "int32", "int64", "float32", "bfloat16")
        language = SimpleNamespace(
            **{f"{name}Layout": nothing for name in LAYOUTS},
            **{name: getattr(torch, name) for name in dtypes},
            constexpr=lambda value: value,
            to_tensor=number,
            tensor=Tensor,
            shared_memory_descriptor=Shared,
            static_range=range,
            convert_layout=lambda value, layout: value,
            num_warps=lambda: 4,
            program_id=lambda axis: torch.tensor((self.program, *self.others)[axis]),
            num_programs=lambda axis: self.programs,
            cdiv=lambda a, b: -(-a // b),
            cast=lambda value, dtype, bitcast=False: value.view(dtype) if bitcast else number(value).to(dtype),
            maximum=lambda a, b: torch.maximum(number(a), number(b)),
            minimum=lambda a, b: torch.minimum(number(a), number(b)),
            max=lambda x, axis: x.amax(axis),
            sum=lambda x, axis: x.sum(axis),
            exp2=torch.exp2,
            log2=torch.log2,
            where=torch.where,
            multiple_of=multiple_of,
            arange=lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            associative_scan=lambda x, axis, combine: x.cumsum(axis),
            reshape=torch.reshape,
            permute=torch.permute,
            broadcast=torch.broadcast_tensors,
            split=lambda x: x.unbind(-1),
            join=lambda low, high: torch.stack((low, high), -1),
            inline_asm_elementwise=assembly,
            load=lambda pointer, mask=None, other=0: pointer.load(mask, other),
            store=lambda pointer, value, mask: pointer.store(value, mask),
            allocate_shared_memory=self._allocate,
            warp_specialize=self._specialize,
        )
        return {
            "gluon": SimpleNamespace(jit=jit, constexpr_function=jit),
            "aggregate": aggregate,
            "range": lambda *bounds: map(torch.tensor, range(*map(int, bounds))),
            "gl": language,
            "triton": SimpleNamespace(jit=jit),
            "tl": language,
            "mbarrier": SimpleNamespace(
                MBarrierLayout=nothing, init=self._init, arrive=self._arrive, wait=self._wait, expect=self._expect,
            ),
            "tma": SimpleNamespace(async_load=self._copy_in_bulk),
            "async_copy": SimpleNamespace(
                async_copy_global_to_shared=self._copy, commit_group=self._commit, wait_group=self._wait_group,
            ),
            "fence_async_shared": self._fence,
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._wait_products,
        }  # fmt: skip

    def _allocate(self, dtype: torch.dtype, shape: list[int], layout: object) -> Shared | Barriers:
        if dtype is torch.int64:
            return Barriers([Barrier(self.changed) for _ in range(shape[0])])
        memory = torch.full(shape, 1 << 30, dtype=dtype if not dtype.is_floating_point else torch.int32)
        if memory.dtype is dtype:
            return Shared(memory)
        return Shared(empty(memory.to(dtype)), None if dtype is torch.float32 else self._store_late)

    def _store_late(self, store: Callable[[], object]) -> None:
        self.local.arrived.append(store)

    def _specialize(self, parts: list[Any], warps: list[int], registers: list[int]) -> None:
        errors: list[BaseException] = []

        def part(fn: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            self.local.copies, self.local.groups, self.local.arrived, self.local.products = [], [], [], []
            try:
                fn(*arguments)
                assert not self.local.copies
                assert not self.local.groups
                assert not self.local.products
            except BaseException as error:  # of a thread: it is raised again below
                errors.append(error)

        threads = [threading.Thread(target=part, args=each, daemon=True) for each in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _dawdle(self, longest: float = 2e-3) -> None:
        if self.random.random() < 0.2:
            time.sleep(self.random.random() * longest)

    def _init(self, barrier: Barriers, count: int) -> None:
        (one,) = barrier.each
        one.count = count

    def _arrive(self, barrier: Barriers, *, count: int = 1, pred: Any = True) -> None:
        self._dawdle()
        (one,) = barrier.each
        if pred:
            one.arrive(count)

    def _expect(self, barrier: Barriers, size: int) -> None:
        self._dawdle()
        (one,) = barrier.each
        one.arrive(1, size)

    def _copy_in_bulk(self, source: Descriptor, place: list[Any], barrier: Barriers, buffer: Shared) -> None:
        self._dawdle()
        (one,) = barrier.each
        assert list(buffer.shape) == source.block
        empty(buffer.memory)
        one.copy(buffer.memory.nbytes, lambda: buffer.memory.copy_(source.load(place)))

    def _wait(self, barrier: Barriers, phase: Any, pred: Any = True) -> None:
        self._dawdle()
        (one,) = barrier.each
        if pred:
            one.wait(int(phase))

    def _copy(self, buffer: Shared, pointer: Pointer, mask: Tensor) -> None:
        empty(buffer.memory)
        self.local.copies.append(lambda: buffer.memory.copy_(pointer.load(mask)))

    def _commit(self) -> None:
        self.local.groups.append(self.local.copies)
        self.local.copies = []

    def _wait_group(self, most: int) -> None:
        while len(self.local.groups) > most:
            self.local.arrived += self.local.groups.pop(0)

    def _fence(self) -> None:
        for copy in getattr(self.local, "arrived", ()):  # outside the parts there are none
            copy()
        self.local.arrived = []

    def _multiply(self, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async

        left = a.memory if isinstance(a, Shared) else a

        def multiply() -> Tensor:
            assert not unfilled(left), "a buffer was not full"
            assert not unfilled(b.memory), "a buffer was not full"
            return left.float() @ b.memory.float()

        early = multiply()

        def work() -> Tensor:
            assert torch.equal(multiply().view(torch.int32), early.view(torch.int32)), "a buffer changed"
            return early + (acc.result if isinstance(acc, Product) else acc) if use_acc else early

        self.local.products.append(Product(work))
        return self.local.products[-1]  # type: ignore[no-any-return]

    def _wait_products(self, most: int, deps: list[Any]) -> Any:
        self._dawdle(2e-2)
        while len(self.local.products) > most:
            self.local.products.pop(0).finish()
        found = tuple(each.result if isinstance(each, Product) else each for each in deps)
        return found[0] if len(found) == 1 else found

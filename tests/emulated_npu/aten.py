"""ATen on the emulated NPU: each operator is the CPU's, on the same memory.

Device memory is host memory, so a CPU tensor over an NPU tensor's storage (``alias``) costs no copy. An operator's
NPU arguments become aliases, the CPU kernel runs, and its result comes back as the NPU tensor that it aliases, as a
view of one, or as a new NPU tensor. Operators that launch nothing (views, empty, resize_) stay the wheel's own.

The wheel registers a boxed fallback already and PyTorch takes one only, so every operator is registered by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

CPU = torch.device("cpu")

GENUINE = {
    "_conj", "_efficientzerotensor", "_has_compatible_shallow_copy_type", "_neg_view", "_pin_memory", "_reshape_alias",
    "alias", "as_strided", "data_ptr", "detach", "empty.memory_format", "empty_like", "empty_strided",
    "empty_with_format", "is_pinned", "is_set_to", "lift", "lift_fresh", "lift_fresh_copy", "new_empty",
    "new_empty_strided", "record_stream", "resize_", "set_", "set_.source_Storage",
    "set_.source_Storage_storage_offset", "set_.source_Tensor", "set_.source_Tensor_storage_offset", "unfold", "view",
    "view.dtype", "view_as_complex", "view_as_real",
}  # fmt: skip
"""Operators of the wheel that work without a kernel."""

MIXED = {"copy_", "_copy_from", "_copy_from_and_resize", "_to_copy", "index", "index_put", "_index_put_impl_", "to"}
"""Operators that take tensors of two devices; all others want one, but for scalars on the CPU."""

_libraries: list[torch.library.Library] = []


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of an NPU tensor; valid while the NPU tensor is."""
    storage = tensor.untyped_storage()
    bytes_ = storage.nbytes()
    if bytes_ == 0 or storage.data_ptr() == 0:
        return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype)
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, bytes_)
    made = torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        made = torch._conj(made)
    return made


def to_npu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A new NPU tensor with the values and strides of a CPU tensor."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        alias(made).copy_(tensor)
    return made


class Call:
    """One operator's arguments as the CPU sees them, and the way back."""

    def __init__(self, operator: str, device: torch.device | None = None) -> None:
        self.operator = operator
        self.device = device
        """The NPU that the results are on: an argument's, or the one that is named."""
        self._aliases: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._on_cpu = 0

    def into(self, value: Any) -> Any:
        """The CPU's view of an argument: tensors become aliases, generators CPU generators."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, list | tuple):
            return [self.into(item) for item in value]
        if isinstance(value, torch.device) and value.type == "npu":
            return CPU
        if isinstance(value, torch.Generator) and value.device.type == "npu":
            return cpu_generator(value)
        return value

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if value.device.type != "npu":
            self._on_cpu += value.dim() > 0
            return value
        if self.device is None:
            self.device = value.device
        for original, made in self._aliases:
            if original is value:
                return made
        self._aliases.append((value, alias(value)))
        return self._aliases[-1][1]

    def replace(self, original: torch.Tensor, made: torch.Tensor) -> None:
        """Let the CPU write another tensor than the alias."""
        self._aliases = [(npu, made if npu is original else cpu) for npu, cpu in self._aliases]

    def check_devices(self) -> None:
        """Refuse tensors of two devices, as the real one does."""
        found = {original.device for original, _ in self._aliases}
        if len(found) + bool(self._on_cpu) > 1:
            names = ", ".join(sorted({str(device) for device in found} | ({"cpu"} if self._on_cpu else set())))
            raise RuntimeError(f"Expected all tensors to be on the same device, but {self.operator} got {names}")

    def back(self, value: Any) -> Any:
        """The NPU's view of a result."""
        if isinstance(value, list | tuple):
            made = [self.back(item) for item in value]
            return made if isinstance(value, list) else tuple(made)
        if not isinstance(value, torch.Tensor) or self.device is None:
            return value
        for original, made in self._aliases:
            if made is value:
                return original
        if value.layout != torch.strided or value.device.type != "cpu":
            return value
        if value.numel():
            pointer = value.untyped_storage().data_ptr()
            for original, made in self._aliases:
                if made.numel() and made.untyped_storage().data_ptr() == pointer:
                    with torch.inference_mode(original.is_inference()):  # a view is what its base is
                        empty = torch.empty(0, dtype=value.dtype, device=original.device)
                        storage = original.untyped_storage()
                        return empty.set_(storage, value.storage_offset(), value.shape, value.stride())
        return to_npu(value, self.device)


def cpu_generator(generator: torch.Generator) -> torch.Generator:
    """A CPU generator for one call. An NPU generator is a seed and an offset, which each call advances."""
    state = generator.get_state().clone()
    seed, offset = state[-16:].view(torch.int64).tolist()
    state[-8:].view(torch.int64)[0] = offset + 4
    generator.set_state(state)
    made = torch.Generator("cpu")
    made.manual_seed((seed * 1_000_003 + offset) % (1 << 63))
    return made


def run(operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an operator's CPU kernel on the memory of its NPU arguments."""
    schema = operator._schema
    wanted = kwargs.get("device")
    call = Call(schema.name, _indexed(wanted) if wanted is not None and torch.device(wanted).type == "npu" else None)
    cpu_args = [call.into(value) for value in args]
    cpu_kwargs = {name: call.into(value) for name, value in kwargs.items()}
    if schema.name.removeprefix("aten::") not in MIXED:
        call.check_devices()
    if cpu_kwargs.get("pin_memory"):
        cpu_kwargs["pin_memory"] = False
    if _wants_generator(schema, len(args)) and cpu_kwargs.get("generator") is None and call.device is not None:
        torch.npu.init()
        cpu_kwargs["generator"] = cpu_generator(torch.npu.default_generators[call.device.index])
    resized = []
    for argument in schema.arguments:
        if argument.kwarg_only and argument.is_out and isinstance(kwargs.get(argument.name), torch.Tensor):
            original = kwargs[argument.name]
            if original.device.type == "npu":  # memory that is only borrowed cannot be resized
                fresh = torch.empty(0, dtype=original.dtype)
                resized.append((original, fresh))
                call.replace(original, fresh)
                cpu_kwargs[argument.name] = fresh
    result = operator(*cpu_args, **cpu_kwargs)
    for original, fresh in resized:
        if original.shape != fresh.shape:
            original.resize_(fresh.shape)
        if fresh.numel():
            alias(original).copy_(fresh)
    if wanted is not None and torch.device(wanted).type != "npu":
        return result
    return call.back(result)


def _indexed(device: Any) -> torch.device:
    device = torch.device(device)
    return device if device.index is not None else torch.device("npu", torch.npu.current_device())


def _wants_generator(schema: Any, positional: int) -> bool:
    return any(argument.name == "generator" and i >= positional for i, argument in enumerate(schema.arguments))


def install(launch: Callable[..., Any]) -> int:
    """Serve every ATen operator that the wheel has a kernel of, or that the CPU alone has; returns how many.

    Args:
        launch: called with an operator, the function that runs it, its arguments and its keyword arguments.
    """
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    served = 0
    for name, operator in _operators("aten"):
        if name not in GENUINE and _has_npu_or_only_cpu(f"aten::{name}"):
            library.impl(name, _served(operator, launch), "PrivateUse1", allow_override=True)
            served += 1
        if has_kernel(f"aten::{name}", "AutogradPrivateUse1"):
            library.impl(name, below_autograd(operator), "AutogradPrivateUse1", allow_override=True)
    return served


def _operators(namespace: str) -> Iterator[tuple[str, torch._ops.OpOverload]]:
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith(f"{namespace}::"):
            name = full.partition("::")[2]
            packet, _, overload = name.partition(".")
            found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
            if found is not None:
                yield name, found


def has_kernel(operator: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, key))


def _has_npu_or_only_cpu(operator: str) -> bool:
    composite = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return has_kernel(operator, "PrivateUse1") or (
        has_kernel(operator, "CPU") and not any(has_kernel(operator, key) for key in composite)
    )


def _served(operator: torch._ops.OpOverload, launch: Callable[..., Any]) -> Callable[..., Any]:
    kernel = functools.partial(run, operator)
    return lambda *args, **kwargs: launch(operator, kernel, args, kwargs)


def below_autograd(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    """Instead of a kernel of the wheel's that calls aclnn for its gradient: the kernel below, or FakeTensorMode."""

    def redispatch(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)

    return redispatch

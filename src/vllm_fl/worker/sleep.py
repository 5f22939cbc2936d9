"""Sleep mode with main memory as the device: the memory of the KV cache and of weights returns to the system.

Tensors keep their identity and lose their storage, so layers, and compiled code that reads addresses in every call,
find them again. vLLM's own allocators for sleep mode are CUDA's and XPU's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import filter as matching
from typing import Any

from torch import Tensor, UntypedStorage, nn

from fl_dispatch.hosting.memory import heap
from fl_dispatch.logger_manager import get_logger

logger = get_logger(__name__)

WEIGHTS, CACHE = "weights", "kv_cache"
MIB = 1 << 20


class Memory:
    """Memory that a sleeping worker releases, by vLLM's tags, and allocates again when it wakes up.

    Level 1 releases the cache, and keeps the weights in main memory. Level 2 also releases the weights; the caller that
    wakes the worker loads them again.
    """

    def __init__(self) -> None:
        self.given: dict[str, list[tuple[UntypedStorage, int]]] = {}

    def give_back(self, tag: str, tensors: Iterable[Tensor]) -> None:
        """Release the storages of tensors, unless the tag's are released."""
        if tag in self.given:
            return
        storages = {found.data_ptr(): found for found in (tensor.untyped_storage() for tensor in tensors)}
        given = [(found, found.nbytes()) for found in storages.values() if found.nbytes() and found.resizable()]
        for storage, _ in given:
            storage.resize_(0)
        heap.give_back()
        self.given[tag] = given
        logger.info("sleep: %.1f MiB of %s given back", sum(size for _, size in given) / MIB, tag)

    def take(self, tags: Iterable[str] | None) -> None:
        """Fill the memory that was released under these tags with zeros, or all of it."""
        for tag in list(self.given) if tags is None else tags:
            for storage, size in self.given.pop(tag, ()):
                storage.resize_(size)
                storage.fill_(0)  # type: ignore[attr-defined]  # PyTorch has it, and its stub does not


def cache_tensors(layers: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the KV cache of a model's attention layers."""
    for layer in layers:
        found = getattr(layer, "kv_cache", None)
        for tensor in found if isinstance(found, list | tuple) else (found,):
            if isinstance(tensor, Tensor):
                yield tensor


def weight_tensors(model: nn.Module, kept: Iterable[str] = ()) -> list[Tensor]:
    """Return the parameters of a model, except those with a name that matches a pattern of ``kept``.

    Raises:
        ValueError: no name matches a pattern.
    """
    parameters, names = dict(model.named_parameters()), set[str]()
    for pattern in kept:
        found = matching(parameters, pattern)
        if not found and pattern != "draft.*":  # vLLM's name for all of a draft model, if there is one
            raise ValueError(f"sleep_preserve_parameter_names: no parameter matches {pattern!r}")
        names.update(found)
    return [parameter for name, parameter in parameters.items() if name not in names]

"""Tensors over memory that they do not keep alive, because the memory pool of captured graphs does."""

from __future__ import annotations

import torch


def over_its_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory, in a storage of PyTorch's own class.

    Only for devices that use PyTorch's own storages. An extension may derive a larger class and assume it for every
    storage of its device, and would then access memory after the end of this one.
    """
    memory = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, memory.nbytes())
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

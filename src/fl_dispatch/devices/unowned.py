"""Tensors over memory that they do not keep alive, which the memory pool of captured graphs does instead."""

from __future__ import annotations

import torch


def over_its_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory, in a storage of PyTorch's own class.

    Only for devices that use PyTorch's own storages. An extension may derive a larger class and take every storage of
    its device for one, so that it reads and writes behind the end of this one, in whatever memory is there.
    """
    memory = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, memory.nbytes())
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

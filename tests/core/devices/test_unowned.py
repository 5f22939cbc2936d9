"""Tensors over memory that they do not keep alive."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fl_dispatch.devices import BUILTIN_DEVICES, CPU
from fl_dispatch.devices.unowned import over_its_storage


def test_a_view_is_the_same_memory_and_does_not_keep_it() -> None:
    owner = torch.arange(24.0).view(4, 6)
    part, memory = owner[1:, ::2], StorageWeakRef(owner.untyped_storage())
    view = over_its_storage(part)
    assert (view.stride(), view.storage_offset()) == (part.stride(), part.storage_offset())
    assert view.tolist() == part.tolist()
    owner.fill_(7)
    assert view.tolist() == [[7.0] * 3] * 3
    del owner, part
    assert memory.expired()


def test_only_devices_whose_storages_are_pytorchs_own_take_it() -> None:
    extensions = [spec for spec in BUILTIN_DEVICES if spec.dispatch_key == "PrivateUse1"]
    assert {"ascend", "mthreads"} <= {spec.name for spec in extensions}
    assert [spec.name for spec in extensions if spec.unowned_view is over_its_storage] == []
    assert all(spec.unowned_view is over_its_storage for spec in BUILTIN_DEVICES if spec.torch_type == "cuda")


def test_by_default_a_device_keeps_the_tensor() -> None:
    tensor = torch.ones(2)
    assert CPU.unowned_view(tensor) is tensor

"""Native code of this project reads nothing before it has been checked, whatever it is called with.

A fault ends the process, so calls are made in processes of their own. ``test_native_fuzz.py`` makes random ones.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fl_dispatch import native
from fl_dispatch.backends.vendor.cpu.impl import own_attention, own_integers
from fl_dispatch.backends.vendor.cpu.impl.own_attention import why_unavailable
from fl_dispatch.errors import NotSupported

compiled = pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable())

FAKE = """
import json, sys, warnings
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from fl_dispatch import NotSupported, get_default_manager
from fl_dispatch.evidence.verify import implementations
from fl_dispatch.ops import OPERATORS
from fl_dispatch.ops.named import of_arguments

warnings.simplefilter("ignore")
mode = FakeTensorMode()
for impl in implementations(get_default_manager(), None, ["vendor.cpu.cpp"]):
    if impl.op_name == "linear":  # PyTorch's dispatcher calls it, by a fake function where tensors are fake
        continue
    samples = OPERATORS[impl.op_name].samples(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
    supports = of_arguments(impl.supports, OPERATORS[impl.op_name].parameters)
    taken = next(sample for sample in samples if sample.args[0].numel() and supports(*sample.args) is True)
    print(impl.op_name, "begins", flush=True)
    for begin in (0, 1):  # a view's address is no 0
        with mode:
            args = [
                torch.empty((len(arg) + begin, *arg.shape[1:]), dtype=arg.dtype)[begin:]
                if isinstance(arg, Tensor) else arg
                for arg in taken.args
            ]
        for inside in (False, True):
            try:
                if inside:
                    with mode:
                        impl.fn(*args)
                else:
                    impl.fn(*args)
                print(impl.op_name, "ran")
            except NotSupported as error:
                print(impl.op_name, "declined:", error)
            except Exception as error:
                print(impl.op_name, type(error).__name__, error)
"""


def called(program: str) -> list[str]:
    """The lines that a program prints until it ends, and how it ended."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return [
        *done.stdout.splitlines(),
        f"status {done.returncode} {done.stderr[-800:] if done.returncode else ''}".strip(),
    ]


@compiled
def test_a_native_implementation_declines_fake_tensors_and_views_into_them() -> None:
    *lines, status = called(FAKE)
    assert status == "status 0", lines
    names = [line.partition(" ")[0] for line in lines if line.endswith(" begins")]
    assert {"kv_cache_write", "paged_attention", "fused_moe", "scaled_linear", "weight_only_linear"} <= set(names)
    said = [line for line in lines if not line.endswith(" begins") and not line.startswith("scaled_moe")]
    assert len(said) == 4 * len([name for name in names if name != "scaled_moe"])
    wrong = [
        line for line in said if "declined: a FakeTensor" not in line or "has no data that native code" not in line
    ]
    assert wrong == []


def test_an_address_is_given_of_data_in_main_memory_alone() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    view, empty = tensor[1:, 2:], torch.empty(0, 4)
    assert native.addresses((tensor, None, view), (tensor,)) == [
        tensor.data_ptr(),
        None,
        view.data_ptr(),
        tensor.data_ptr(),
    ]
    native.addresses((empty,))
    with FakeTensorMode():
        fake = torch.empty(4, 4)[1:]
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    for wrong in (fake, freed, tensor.to("meta"), tensor.to_sparse()):
        for given in (((wrong,), ()), ((), (wrong,))):
            with pytest.raises(NotSupported, match="has no data that native code could read"):
                native.addresses(*given)
    with pytest.raises(NotSupported, match="a FakeTensor torch.float32 of shape"):
        native.require_data((tensor, fake))

    def of_row(row: torch.Tensor) -> torch.Tensor:
        with pytest.raises(NotSupported, match="has no data"):
            native.addresses((row,))
        return row

    torch.vmap(of_row)(tensor)


@compiled
def test_caches_of_different_sizes_are_declined_and_not_written_past_their_end() -> None:
    new, keys, values = torch.ones(1, 2, 16), torch.zeros(4, 16, 2, 16), torch.zeros(2, 16, 2, 16)
    with pytest.raises(NotSupported, match="different blocks or heads"):
        own_attention.kv_cache_write(new, new, keys, values, torch.tensor([40]))


@pytest.mark.skipif(bool(own_integers.why_unavailable()), reason=own_integers.why_unavailable())
def test_a_scale_that_is_copied_for_a_call_lives_until_the_call_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[bool] = []
    x, weight = (torch.randint(-127, 127, (rows, 64), dtype=torch.int8) for rows in (5, 24))
    scale, copies = torch.rand(1, 1).expand(5, 1), []
    addresses = native.addresses

    def noted(read: Any, written: Any = ()) -> Any:
        import weakref

        copies.append(weakref.ref(read[1]))
        return addresses(read, written)

    def called(*_: Any) -> int:
        alive.append(copies[-1]() is not None)
        return 1

    monkeypatch.setattr(native, "addresses", noted)
    monkeypatch.setattr(own_integers, "function", lambda *which: called)
    own_integers.scaled_linear(x, scale, weight, torch.rand(24, 1))
    assert alive == [True]

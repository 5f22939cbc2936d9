"""ATen replacement: who asks for it, what names mean, and that no kernel of FlagGems can make an answer wrong."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib.util
import json
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flaggems_standin
from fl_dispatch import DispatchError, freeze_dispatch, get_default_manager, thaw_dispatch
from fl_dispatch.aten_replacement import apply_blacklist, register_replacement, replaced_operators
from fl_dispatch.aten_replacement.slot import slot_of
from fl_dispatch.backends.flaggems import library
from fl_dispatch.backends.flaggems.aten import names, replacement
from fl_dispatch.backends.flaggems.aten.decision import why_not
from fl_dispatch.cli.doctor import examine
from fl_dispatch.compiled.freezing import Manifest
from fl_dispatch.devices import CPU, CUDA
from fl_dispatch.hosting.layers.survey import Survey
from fl_dispatch.hosting.records import runs
from fl_dispatch.hosting.records.report import dispatch_report
from fl_dispatch.hosting.start import aten, oplist
from fl_dispatch.settings import Settings, load_settings
from flaggems_standin import CONFIG, log

capturing = False
CHIP = dataclasses.replace(CPU, name="chip", torch_type="chip", triton=True, is_capturing=lambda: capturing)
"""A device of its own whose tensors are the CPU's, and which captures graphs while :data:`capturing` is set."""
TABLE = {key: fn.__name__ for key, fn in CONFIG}
A, B = torch.randn(3, 4), torch.randn(4, 5)


@pytest.fixture
def gems(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in is installed; afterwards every operator is PyTorch's own again."""
    for name, module in flaggems_standin.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(library, "why_missing", lambda: "")
    library.gems.cache_clear()
    log.clear()
    register_replacement(replacement)
    yield
    replacement.remove()
    library.gems.cache_clear()


def start(**settings: Any) -> str:
    for name in ("flagos_whitelist", "flagos_blacklist"):
        if name in settings:
            settings[name] = frozenset(settings[name])
    return replacement.replace(Settings.of(**settings), CHIP)


# -- whether ----------------------------------------------------------------------------------------------------------

ASKED = {"aten_replacement": True}


@pytest.mark.parametrize(
    ("device", "settings", "reason"),
    [
        (CHIP, {}, ""),
        (CHIP, {"aten_replacement": False}, "aten_replacement is off"),
        (CHIP, {"use_flaggems": False, **ASKED}, "FlagGems is switched off"),
        (CHIP, {"enabled": False, **ASKED}, "dispatch is off"),
        (CHIP, {"batch_invariant": True, **ASKED}, "batch invariance"),
        (CHIP, {"flagos_whitelist": {"silu_and_mul", "rms_norm"}, **ASKED}, "names no ATen operator"),
        (CHIP, {"flagos_whitelist": {"silu_and_mul", "mm"}}, ""),
        (CPU, ASKED, "no kernels for device 'cpu'"),
        (CUDA, {}, "on device 'cuda' only"),
        (CUDA, ASKED, ""),
        (CUDA, {"flagos_whitelist": {"mm"}}, ""),
        (CUDA, {"flagos_whitelist": {"mm"}, "aten_replacement": False}, "aten_replacement is off"),
    ],
)
def test_who_asks_for_it(device: Any, settings: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "why_missing", lambda: "")
    found = why_not(Settings.of(**settings), device)
    assert reason in found if reason else found == ""


def test_without_flaggems_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "why_missing", lambda: "flag_gems is not installed")
    assert start() == "flag_gems is not installed"
    assert replacement.report()["why_not"] == "flag_gems is not installed"


def test_a_decision_does_not_import_flaggems() -> None:
    why_not(Settings(), CHIP)
    examine()
    assert not flaggems_standin.is_imported()


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("mm", {"mm", "mm.out", "addmm"}),
        ("mm.out", {"mm.out"}),
        ("mm.default", {"mm"}),
        ("addmm", {"addmm"}),
        ("add", {"add.Tensor"}),
        ("mul", {"mul_.Tensor"}),
        ("mul_", {"mul_.Tensor"}),
        ("add_", set()),
        ("softmax", {"_softmax"}),
        ("_softmax", {"_softmax"}),
        ("div", {"div.Tensor", "true_divide.Tensor"}),
        ("true_divide", {"div.Tensor", "true_divide.Tensor"}),
        ("mm_out", {"mm.out"}),
        ("mmm", set()),
        ("aten::mm", {"mm", "mm.out", "addmm"}),
        ("aten::mm.out", {"mm.out"}),
    ],
)
def test_a_name_means_its_variants(name: str, keys: set[str]) -> None:
    assert names.expand(name, TABLE) == keys


def test_an_unknown_name_is_a_warning_with_the_nearest_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert names.expand_all(["cumsun", "silu_and_mul", "cumsum"], TABLE, "environment variable X") == {"cumsum"}
    (message,) = (record.getMessage() for record in caplog.records)
    assert message == ("environment variable X: FlagGems replaces no ATen operator 'cumsun'; did you mean cumsum?")


def test_a_blacklist_means_atens_operators_of_our_names_too() -> None:
    table = {**TABLE, "rms_norm": "rms_norm"}
    assert names.expand_all(["rms_norm"], table, "x") == set()
    assert names.expand_all(["rms_norm"], table, "x", deny=True) == {"rms_norm"}


def test_a_list_takes_names_as_the_list_of_what_runs_has_them() -> None:
    settings = load_settings({"VLLM_FL_FLAGOS_WHITELIST": "aten::mm.out,aten::rms_norm,silu_and_mul"})
    assert settings.policy.flagos_whitelist is not None
    table = {**TABLE, "rms_norm": "rms_norm"}
    assert names.expand_all(settings.policy.flagos_whitelist, table, "x") == {"mm.out", "rms_norm"}


def real_table() -> dict[str, str]:
    """FlagGems' own table, read from its source: importing it needs a GPU."""
    spec = importlib.util.find_spec("flag_gems")
    if spec is None or spec.origin is None:
        pytest.skip("FlagGems is not installed")
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_FULL_CONFIG"
    )
    assert isinstance(table, ast.Tuple)
    return {item.elts[0].value: item.elts[1].id for item in table.elts}  # type: ignore[attr-defined]


def test_names_of_the_specification_in_flaggems_own_table() -> None:
    table = real_table()
    assert names.expand("mm", table) == {"mm", "mm.out", "addmm", "addmm.out"}
    assert names.expand("to_copy", table) == {"_to_copy"}
    assert names.expand("zeros", table) == {"zeros"}
    assert names.expand("softmax", table) == {"_softmax"}
    assert {"add.Tensor", "add_.Tensor"} <= names.expand("add", table)
    assert {"div.Tensor", "divide.Tensor", "true_divide.Scalar"} <= names.expand("div", table)
    refused = {key for key in table if names.why_refused(key)}
    assert {"rand", "randn_like", "exponential_", "multinomial", "normal_", "bernoulli_.float"} <= refused
    assert not refused & {"mm", "embedding", "native_layer_norm", "linalg_vector_norm"}


def test_every_operator_of_flaggems_table_has_a_native_kernel_to_compare_with() -> None:
    lost = []
    for key in real_table():
        try:
            torch.library.get_kernel(f"aten::{key}", "CPU")
        except RuntimeError:
            lost.append(key)
    assert len(lost) < 25, lost  # operators for GPUs only, and names that ATen does not have


# -- what runs --------------------------------------------------------------------------------------------------------


def test_flaggems_runs_and_pytorch_says_so(gems: None) -> None:
    expected = (A.double() @ B.double()).float()
    assert start() == ""
    assert torch.equal(torch.mm(A, B), expected)
    assert log.count("mm") >= 2  # for the check, and for the call
    found = replacement.report()
    assert found["calls"]["mm"] == 1
    assert replaced_operators()["aten::mm"] == "flaggems_standin.mm"
    assert "unheard_of" in found["skipped"]
    assert found["skipped"]["exponential_"].startswith("its random numbers")


def test_a_wrong_kernel_is_found_and_pytorchs_answer_returned(gems: None, caplog: pytest.LogCaptureFixture) -> None:
    start()
    bias = torch.randn(5)
    with caplog.at_level(logging.WARNING):
        assert torch.allclose(torch.nn.functional.linear(A, B.T.contiguous(), bias), A @ B + bias, atol=1e-5)
    assert "ATen operator 'addmm' is left to PyTorch, for FlagGems' is wrong: " in caplog.text
    assert "addmm" not in replacement.report()["replaced"]
    assert "aten::addmm" not in replaced_operators()


def test_arguments_that_are_all_zero_do_not_hide_a_wrong_kernel(gems: None) -> None:
    start()
    torch.addmm(torch.zeros(5), torch.zeros(3, 4), torch.zeros(4, 5))
    assert list(replacement.report()["wrong"]) == ["addmm"]


def test_what_a_wrong_kernel_would_overwrite_is_not_overwritten(gems: None) -> None:
    start()
    x = torch.ones(3)
    x.mul_(2.0)
    assert x.tolist() == [2.0, 2.0, 2.0]
    assert list(replacement.report()["wrong"]) == ["mul_.Tensor"]


def test_a_kernel_that_always_raises_is_left_to_pytorch_once_learning_ends(gems: None) -> None:
    start()
    for _ in range(2):
        assert torch.softmax(A, -1).sum().item() == pytest.approx(3)
    found = replacement.report()
    assert found["declined"] == {"_softmax": "1 kind of arguments, last ValueError: no kernel for this shape"}
    assert (found["wrong"], found["native"], log.count("softmax")) == ({}, {"_softmax": 2}, 1)
    replacement.settle()
    found = replacement.report()
    assert (found["wrong"], found["declined"]) == ({"_softmax": "ValueError: no kernel for this shape"}, {})
    assert "aten::_softmax" not in replaced_operators()


def test_strict_ends_the_start(gems: None) -> None:
    start(strict=True)
    with pytest.raises(DispatchError, match="strict: FlagGems' ATen operator 'addmm' is wrong"):
        torch.addmm(torch.ones(5), A, B)


def test_the_callers_mistake_is_nobodys_fault(gems: None) -> None:
    start()
    with pytest.raises(RuntimeError):
        torch.mm(A, A)
    assert "mm" in replacement.report()["replaced"]
    assert replacement.report()["wrong"] == {}


def test_a_number_in_the_place_of_a_tensor(gems: None) -> None:
    start()
    half = torch.ones(2, dtype=torch.float16)
    integers = torch.arange(3)
    assert (half + 0.5).dtype is torch.float16
    assert (integers + 1).tolist() == [1, 2, 3]
    assert (integers + 0.5).dtype is torch.float32
    assert replacement.report()["calls"]["add.Tensor"] == 3
    replacement.seal()
    assert (half[:1] + 0.5).dtype is torch.float16  # PyTorch's kernel: these sizes are new
    assert (integers[:1] + 1).dtype is torch.int64
    assert (integers[:1] + 0.5).dtype is torch.float32
    assert (torch.tensor(1, dtype=torch.int32) + 1).dtype is torch.int32
    assert (torch.tensor(1.0, dtype=torch.float16) + 1.5).dtype is torch.float16
    assert replacement.report()["native"]["add.Tensor"] == 5


def test_once_sealed_a_new_kind_of_arguments_runs_pytorchs_kernel(gems: None) -> None:
    start()
    torch.mm(A, B)
    replacement.seal()
    log.clear()
    torch.mm(A, B)
    assert log == ["mm"]
    assert torch.mm(A[:2], B).shape == (2, 5)
    assert torch.mm(A, B.T.contiguous().T).shape == (3, 5)  # other strides
    assert log == ["mm"]
    found = replacement.report()
    assert (found["calls"], found["native"], found["sealed"]) == ({"mm": 2}, {"mm": 2}, True)


def test_the_out_variant_is_an_operator_of_its_own(gems: None) -> None:
    start()
    result = torch.empty(3, 5)
    assert torch.mm(A, B, out=result) is result
    assert torch.allclose(result, A @ B, atol=1e-6)
    assert replacement.report()["calls"]["mm.out"] == 1


def test_an_out_that_pytorch_would_resize_is_never_given_to_flaggems(gems: None) -> None:
    start()
    log.clear()
    assert torch.mm(A, B, out=torch.empty(0)).shape == (3, 5)
    assert log == []
    assert "mm.out" in replacement.report()["replaced"]


def test_what_is_read_and_written_at_once_is_pytorchs(gems: None) -> None:
    square = torch.eye(4)
    start()
    torch.mm(square, square + 1, out=torch.empty(4, 4))
    torch.mm(square, square + 1, out=square)
    found = replacement.report()
    assert (found["calls"]["mm.out"], found["native"]["mm.out"]) == (1, 1)


def test_a_product_with_its_own_transpose_is_a_kind_of_its_own(gems: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def mm(a: Tensor, b: Tensor) -> Tensor:
        log.append("one" if a.data_ptr() == b.data_ptr() else "two")
        return flaggems_standin.mm(a, b)

    monkeypatch.setattr(flaggems_standin, "CONFIG", (("mm", mm),))
    sys.modules.update(flaggems_standin.modules())
    start()
    square, other = torch.randn(4, 4), torch.randn(4, 4)
    torch.mm(square, square.T)
    assert [entry for entry in log if entry != "mm"] == ["one", "one"]  # the check, and the call
    replacement.remove()
    start()
    torch.mm(square, other.T)
    replacement.seal()
    log.clear()
    torch.mm(square, square.T)
    assert log == []
    torch.mm(square, other.T)
    assert log == ["two", "mm"]


def test_calls_from_within_flaggems_are_no_replacement(gems: None) -> None:
    start()
    torch.cumsum(A, 0)  # the stand-in calls PyTorch's cumsum
    assert replacement.report()["calls"] == {"cumsum": 1}
    library.gems().mm(A, B)  # as our operators call FlagGems
    assert replacement.report()["calls"] == {"cumsum": 1, "mm": 1}  # its inner PyTorch call came through the dispatcher


def test_a_result_in_the_memory_of_an_argument_is_wrong_where_pytorch_makes_a_copy(
    gems: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clone(x: Tensor, *, memory_format: Any = None) -> Tensor:
        return x

    monkeypatch.setattr(flaggems_standin, "CONFIG", (("clone", clone),))
    sys.modules.update(flaggems_standin.modules())
    start()
    x = torch.ones(4)
    x.clone().zero_()
    assert x.tolist() == [1, 1, 1, 1]
    assert "memory of other arguments" in replacement.report()["wrong"]["clone"]


def test_no_number_is_one_kind_of_arguments_and_nothing_wrong(gems: None) -> None:
    start()
    for _ in range(3):
        assert (torch.ones(3) + float("nan")).isnan().all()
    assert (replacement.report()["wrong"], replacement.report()["calls"]) == ({}, {"add.Tensor": 3})
    assert log.count("add") == 4  # one of them is the check


def test_what_a_large_unchecked_call_would_add_to_is_not_given_to_flaggems(
    gems: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fl_dispatch.backends.flaggems.aten import guard

    tuned = set()

    def mul_(a: Tensor, b: Tensor | float) -> Tensor:
        """Tunes itself on a real call, by running many times."""
        before, runs = a.clone(), 1 if a.shape in tuned else 3
        for _ in range(runs):
            a.copy_(before.double() * b if a.numel() < 10 else a.double() * b)
        tuned.add(a.shape)
        return a

    monkeypatch.setattr(flaggems_standin, "CONFIG", (("mul_.Tensor", mul_), ("mm.out", flaggems_standin.mm_out)))
    sys.modules.update(flaggems_standin.modules())
    monkeypatch.setattr(guard, "LARGEST_LATER", 300)
    start()
    assert torch.ones(4).mul_(2.0).tolist() == [2] * 4
    assert torch.ones(1000).mul_(2.0).tolist() == [2] * 1000
    torch.mm(A, B, out=torch.empty(3, 5))
    torch.mm(A, torch.ones(4, 100), out=torch.empty(3, 100))  # what is only written bears it
    assert replacement.report()["calls"] == {"mm.out": 2, "mul_.Tensor": 1}


def test_results_beyond_the_limit_exist_once(gems: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from fl_dispatch.backends.flaggems.aten import guard

    def zeros(size: list[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        log.append(f"zeros {size}")
        return torch.empty(size, dtype=dtype).fill_(0)

    monkeypatch.setattr(flaggems_standin, "CONFIG", (("zeros", zeros),))
    sys.modules.update(flaggems_standin.modules())
    monkeypatch.setattr(guard, "LARGEST_FIRST", 400)
    monkeypatch.setattr(guard, "LARGEST_LATER", 200)
    start()
    assert torch.zeros(101).sum() == 0
    assert log == []  # nothing smaller was right before
    torch.zeros(50)
    torch.zeros(101)
    assert log == ["zeros [50]", "zeros [50]", "zeros [101]"]
    torch.zeros(101, dtype=torch.int32)
    assert log[3:] == []
    assert replacement.report()["native"] == {"zeros": 2}


def test_inside_a_capture_a_new_kind_runs_pytorchs_kernel(gems: None, monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    torch.mm(A, B)
    monkeypatch.setattr(sys.modules[__name__], "capturing", True)
    torch.mm(A, B)
    torch.mm(A[:1], B)
    found = replacement.report()
    assert (found["calls"], found["native"]) == ({"mm": 2}, {"mm": 1})


# -- kinds of arguments that FlagGems does not take -------------------------------------------------------------------


@pytest.fixture
def narrow(gems: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlagGems' ``cumsum`` takes even lengths only, and its ``mm`` no more than three rows."""

    def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
        log.append("cumsum")
        if x.shape[0] % 2:
            raise NotImplementedError("odd")
        return x.flip(dim).flip(dim).cumsum(dim)

    def mm(a: Tensor, b: Tensor) -> Tensor:
        return flaggems_standin.mm(a, b) if a.shape[0] <= 3 else torch.zeros(a.shape[0], b.shape[1])

    monkeypatch.setattr(flaggems_standin, "CONFIG", (("cumsum", cumsum), ("mm", mm)))
    sys.modules.update(flaggems_standin.modules())


def test_a_kind_for_which_flaggems_raises_is_pytorchs_and_others_stay(
    narrow: None, caplog: pytest.LogCaptureFixture
) -> None:
    start()
    with caplog.at_level(logging.INFO):
        for length in (1, 2, 3, 1, 2, 3):
            assert torch.ones(length).cumsum(0).tolist() == list(range(1, length + 1))
    assert log.count("cumsum") == 2 + 3  # each odd length once, and the even one for its check and for two calls
    (record,) = (record for record in caplog.records if "cumsum" in record.getMessage())
    assert record.levelno == logging.INFO  # every answer is right, and the operator runs
    assert record.getMessage() == (
        "ATen operator 'cumsum': arguments for which FlagGems' raises are PyTorch's: NotImplementedError: odd"
    )
    replacement.seal()
    found = replacement.report()
    assert (found["calls"], found["native"], found["wrong"]) == ({"cumsum": 2}, {"cumsum": 4}, {})
    assert found["declined"] == {"cumsum": "2 kinds of arguments, last NotImplementedError: odd"}
    assert "cumsum" in found["replaced"]
    torch.ones(1).cumsum(0)
    torch.ones(2).cumsum(0)
    assert log.count("cumsum") == 6


def test_numbers_in_the_place_of_tensors_for_which_flaggems_raises_are_one_kind(
    gems: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(a: Tensor, b: Tensor | float, *, alpha: float = 1) -> Tensor:
        log.append("add")
        if isinstance(b, float):
            raise AttributeError("'float' object has no attribute 'shape'")
        return a - (-b)

    monkeypatch.setattr(flaggems_standin, "CONFIG", (("add.Tensor", add),))
    sys.modules.update(flaggems_standin.modules())
    start()
    for number in range(40):
        assert (torch.ones(2) + number / 2).tolist() == [1 + number / 2] * 2
    assert (torch.ones(2) + torch.ones(2)).tolist() == [2, 2]
    assert len(log) == 3
    found = replacement.report()
    assert (found["native"], found["calls"], found["wrong"]) == ({"add.Tensor": 40}, {"add.Tensor": 1}, {})


def test_a_kind_for_which_flaggems_is_wrong_bans_the_operator(narrow: None) -> None:
    start()
    torch.mm(A, B)
    torch.mm(torch.ones(4, 4), B)
    assert list(replacement.report()["wrong"]) == ["mm"]
    log.clear()
    torch.mm(A, B)
    assert log == []


def test_an_operator_that_raises_for_many_kinds_is_pytorchs_altogether(narrow: None) -> None:
    from fl_dispatch.backends.flaggems.aten.guard import MOST_DECLINED

    start()
    torch.ones(2).cumsum(0)
    for number in range(MOST_DECLINED + 1):
        assert replacement.report()["wrong"] == {}
        torch.ones(2 * number + 1).cumsum(0)
    assert replacement.report()["wrong"] == {"cumsum": "NotImplementedError: odd (the last of 17 kinds of arguments)"}
    assert replacement.report()["declined"] == {}


def test_with_strict_a_kind_for_which_flaggems_raises_ends_the_start(narrow: None) -> None:
    start(strict=True)
    with pytest.raises(DispatchError, match="strict: FlagGems' ATen operator 'cumsum' raised NotImplementedError: odd"):
        torch.ones(3).cumsum(0)


def test_an_unchecked_large_kind_for_which_flaggems_raises_is_pytorchs(
    narrow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fl_dispatch.backends.flaggems.aten import guard

    start()
    torch.ones(2).cumsum(0)
    monkeypatch.setattr(guard, "LARGEST_LATER", 8)
    for _ in range(2):
        assert torch.ones(3).cumsum(0).tolist() == [1, 2, 3]
    assert torch.ones(4).cumsum(0).tolist() == [1, 2, 3, 4]
    found = replacement.report()
    assert (found["calls"], found["native"], found["wrong"]) == ({"cumsum": 2}, {"cumsum": 2}, {})


# -- errors of kinds that were right before ---------------------------------------------------------------------------


@pytest.fixture
def failing(gems: None, monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Once it holds an error, FlagGems' ``mm`` and ``mm.out`` raise it."""
    errors: list[BaseException] = []

    def mm(a: Tensor, b: Tensor) -> Tensor:
        if errors:
            raise errors[0]
        return flaggems_standin.mm(a, b)

    def mm_out(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        return out.copy_(mm(a, b))

    monkeypatch.setattr(flaggems_standin, "CONFIG", (("mm", mm), ("mm.out", mm_out)))
    sys.modules.update(flaggems_standin.modules())
    return errors


@pytest.mark.parametrize("sealed", [False, True])
def test_an_error_of_a_known_kind_leaves_the_operator_to_pytorch(
    sealed: bool, failing: list[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    start()
    expected = torch.mm(A, B)
    if sealed:
        replacement.seal()
    failing.append(ValueError("shared memory"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.allclose(torch.mm(A, B), expected, atol=1e-5)
    (message,) = (r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)
    assert message == "ATen operator 'mm' is left to PyTorch, for FlagGems' raised ValueError: shared memory"
    found = replacement.report()
    assert (found["calls"], found["native"], found["replaced"]) == ({"mm": 1}, {"mm": 1}, ["mm.out"])
    assert found["wrong"] == {"mm": "ValueError: shared memory"}
    assert list(replaced_operators()) == ["aten::mm.out"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        KeyboardInterrupt(),
    ],
)
def test_out_of_memory_and_a_dead_device_are_the_callers(error: BaseException, failing: list[BaseException]) -> None:
    start()
    torch.mm(A, B)
    failing.append(error)
    with pytest.raises(type(error)):
        torch.mm(A, B)
    assert replacement.report()["wrong"] == {}


def test_with_strict_an_error_of_a_known_kind_is_the_callers(failing: list[BaseException]) -> None:
    start(strict=True)
    torch.mm(A, B)
    failing.append(ValueError("shared memory"))
    with pytest.raises(ValueError, match="shared memory") as raised:
        torch.mm(A, B)
    assert "in FlagGems' ATen operator 'mm'; a blacklist can name it" in raised.value.__notes__


def test_inside_a_capture_an_error_is_the_callers(
    failing: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    torch.mm(A, B)
    failing.append(ValueError("shared memory"))
    monkeypatch.setattr(sys.modules[__name__], "capturing", True)
    with pytest.raises(ValueError, match="shared memory"):
        torch.mm(A, B)


def test_what_a_failed_call_may_have_written_is_not_computed_again(failing: list[BaseException]) -> None:
    start()
    torch.mm(A, B, out=torch.empty(3, 5))
    failing.append(ValueError("shared memory"))
    with pytest.raises(ValueError, match="shared memory") as raised:
        torch.mm(A, B, out=torch.empty(3, 5))
    assert "in FlagGems' ATen operator 'mm.out'; a blacklist can name it" in raised.value.__notes__


def test_what_pytorch_does_not_take_either_is_the_callers_mistake(gems: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def embedding(weight: Tensor, indices: Tensor, *_: Any, **__: Any) -> Tensor:
        if int(indices.max()) >= weight.shape[0]:
            raise ValueError("no such row")
        return weight[indices]

    monkeypatch.setattr(flaggems_standin, "CONFIG", (("embedding", embedding),))
    sys.modules.update(flaggems_standin.modules())
    start()
    torch.embedding(A, torch.tensor([0, 2]))
    with pytest.raises(IndexError):
        torch.embedding(A, torch.tensor([0, 3]))
    assert (replacement.report()["wrong"], replacement.report()["calls"]) == ({}, {"embedding": 1})


# -- lists ------------------------------------------------------------------------------------------------------------


def test_a_white_list_replaces_exactly_those(gems: None) -> None:
    assert start(flagos_whitelist={"mm", "silu_and_mul"}) == ""
    assert replacement.report()["replaced"] == ["addmm", "mm", "mm.out"]
    torch.add(A, A)
    assert log == []


def test_a_list_may_name_one_overload(gems: None) -> None:
    start(flagos_whitelist={"div.Tensor"})
    assert replacement.report()["replaced"] == ["div.Tensor"]
    start(flagos_blacklist={"div.Tensor", "mm"})
    assert replacement.report()["replaced"] == ["_softmax", "add.Tensor", "cumsum", "mul_.Tensor", "true_divide.Tensor"]


def test_random_operators_are_refused_even_when_asked_for(gems: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        start(flagos_whitelist={"exponential_", "mm"})
    assert "not replaced: exponential_: its random numbers" in caplog.text
    assert start(flagos_whitelist={"exponential_"}) == "the lists leave no ATen operator"


def test_random_operators_of_another_flaggems_are_refused_too() -> None:
    random = ("randint", "randint_like", "poisson", "cauchy_", "log_normal_", "normal.float_Tensor", "bernoulli_.float")
    assert all(names.why_refused(key) for key in random)
    assert not any(names.why_refused(key) for key in ("mm.out", "sort", "no_such_operator", "mm.no_such_overload"))


@pytest.mark.parametrize(
    ("settings", "level"),
    [
        ({}, logging.INFO),
        ({"aten_replacement": False}, logging.INFO),
        ({"flagos_whitelist": {"silu_and_mul"}}, logging.INFO),
        ({"flagos_whitelist": {"mm"}}, logging.WARNING),
        ({"aten_replacement": True}, logging.WARNING),
    ],
)
def test_what_was_asked_for_and_is_not_done_is_a_warning(
    settings: dict[str, Any], level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "why_missing", lambda: "flag_gems is not installed")
    with caplog.at_level(logging.INFO):
        start(**settings)
    (record,) = (record for record in caplog.records if "PyTorch's own" in record.getMessage())
    assert record.levelno == level


def test_that_nothing_could_be_replaced_is_said_with_the_reason(gems: None) -> None:
    for _ in range(2):
        why = start(flagos_whitelist={"unheard_of"})
        assert why.startswith("none of 1 ATen operators could be replaced; 'unheard_of'")


def test_what_flaggems_leaves_out_itself_is_reported(gems: None, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tuple(entry for entry in CONFIG if entry[0] != "cumsum")
    monkeypatch.setattr(flaggems_standin, "CONFIG", left)  # the table still names it
    start()
    assert replacement.report()["skipped"]["cumsum"] == "FlagGems leaves it out on this device"


def test_what_a_list_leaves_to_pytorch_comes_back_with_what_it_had_learned(gems: None) -> None:
    start()
    torch.mm(A, B)
    replacement.seal()
    for listed, calls in ((["mm"], 1), ([], 2)):
        apply_blacklist(listed)
        torch.mm(A, B)
        assert replacement.report()["calls"] == {"mm": calls}
    assert replacement.report()["wrong"] == {}


# -- the process ------------------------------------------------------------------------------------------------------


def test_a_second_start_learns_again_and_another_selection_replaces_the_first(gems: None) -> None:
    start()
    torch.mm(A, B)
    replacement.seal()
    assert start() == ""
    torch.mm(A[:2], B)
    assert replacement.report()["calls"] == {"mm": 2}
    start(flagos_blacklist={"mm"})
    torch.mm(A, B)
    assert replacement.report()["calls"] == {}
    assert start(use_flaggems=False) != ""
    log.clear()
    torch.add(A, A)
    assert log == []
    assert replaced_operators() == {}


def test_settle_takes_a_wrong_one_out(gems: None) -> None:
    start()
    torch.addmm(torch.ones(5), A, B)
    assert slot_of("addmm", "CPU").guard is not None
    replacement.settle()
    assert slot_of("addmm", "CPU").guard is None
    log.clear()
    torch.addmm(torch.ones(5), A, B)
    assert log == []
    assert list(replacement.report()["wrong"]) == ["addmm"]


def test_after_another_start_the_process_is_as_if_nothing_had_been_replaced(gems: None, tmp_path: Path) -> None:
    before = freeze_dispatch()
    thaw_dispatch()
    nothing = replacement.report()
    start()
    assert aten.is_active()
    torch.mm(A, B)
    torch.addmm(torch.ones(5), A, B)
    torch.mm(A[:2], B)
    off = Settings.of(use_flaggems=False, oplist_path=tmp_path / "list.txt")
    replacement.replace(off, CHIP)
    assert not aten.is_active()
    log.clear()
    torch.mm(A, B)
    torch.ones(3, dtype=torch.float16).add(0.5)
    assert log == []
    after = freeze_dispatch()
    thaw_dispatch()
    assert (after.aten, after.hash) == ({}, before.hash)
    assert replacement.report() == {**nothing, "why_not": f"FlagGems is switched off ({off.origin('use_flaggems')})"}
    path = oplist.record(get_default_manager(), off, None)
    assert path is None or "aten::" not in path.read_text()


def test_operators_come_and_go_while_another_thread_calls_them() -> None:
    """In a process of its own, for what goes wrong here ends it."""
    code = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
import flaggems_standin, torch
from fl_dispatch.backends.flaggems import library
from fl_dispatch.backends.flaggems.aten import replacement
from fl_dispatch.devices import CPU
from fl_dispatch.settings import Settings
modules = flaggems_standin.modules()
modules["flag_gems"].device = "cpu"
sys.modules.update(modules)
replacement.why_not = lambda settings, device: ""
torch.set_num_threads(1)
x, errors, done = torch.eye(8), [], threading.Event()
def call():
    try:
        while not done.is_set():
            assert torch.equal(torch.mm(x, x), x)
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=call) for _ in range(2)]
for thread in threads:
    thread.start()
for round in range(100):
    replacement.replace(Settings.of(flagos_whitelist=frozenset({"mm"})), CPU)
    before = len(flaggems_standin.log)
    while len(flaggems_standin.log) == before and not errors:
        time.sleep(0.001)
    replacement.remove()
done.set()
for thread in threads:
    thread.join()
print(errors)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(flaggems_standin.__file__).parent)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_flaggems_that_does_not_load_ends_a_start_only_where_it_was_asked_for(
    gems: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(**_: Any) -> None:
        raise OSError("no driver")

    monkeypatch.setattr(sys.modules["flag_gems"], "enable", broken)
    with caplog.at_level(logging.WARNING):
        assert start() == "FlagGems does not load: OSError: no driver"
    assert "ATen operators are not replaced: FlagGems does not load" in caplog.text
    with pytest.raises(DispatchError, match="were to be replaced, and FlagGems does not load"):
        start(aten_replacement=True)
    assert replaced_operators() == {}


def test_flaggems_for_another_device_replaces_nothing(gems: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["flag_gems"], "device", "cuda")
    assert start() == "FlagGems works on 'cuda', this device is 'chip'"


def test_the_manifest_the_list_the_report_and_the_record_name_what_is_replaced(
    gems: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    before = freeze_dispatch()
    thaw_dispatch()
    start(flagos_whitelist={"mm"})
    torch.addmm(torch.ones(5), A, B)
    torch.mm(A, B)
    replacement.settle()
    after = freeze_dispatch()
    thaw_dispatch()
    assert after.hash != before.hash
    assert after.aten == {"aten::mm": "flaggems_standin.mm", "aten::mm.out": "flaggems_standin.mm_out"}
    assert Manifest.from_data(json.loads(json.dumps(after.as_data()))) == after
    assert "aten::mm: flaggems_standin.mm here, nothing there" in after.differences(before)
    path = oplist.record(get_default_manager(), Settings(oplist_path=tmp_path / "list.txt"), rank=1)
    assert path is not None
    assert path.read_text() == "aten::mm\naten::mm.out\n"
    assert json.loads(json.dumps(dispatch_report()["aten"]))["FlagGems"]["calls"] == {"mm": 1}
    runs.record("vLLM 0.32", "tiny", Survey("vLLM", {}, {}, {}), {})
    line = "2 replaced by FlagGems; called: mm 1; left to PyTorch: addmm"
    assert runs.recorded()[0].aten == line
    assert examine()["runs"][0][-1] == line


def test_a_manifest_can_be_pickled_and_copied(gems: None) -> None:
    start(flagos_whitelist={"mm"})
    manifest = freeze_dispatch()
    thaw_dispatch()
    for other in (pickle.loads(pickle.dumps(manifest)), copy.deepcopy(manifest)):
        assert other == manifest
        assert (other.hash, other.as_data()) == (manifest.hash, manifest.as_data())
        assert "aten::mm" in other.aten

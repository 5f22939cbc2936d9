"""Something wrong at registration names who did it, where, and everything that is wrong."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fl_dispatch import BackendImplKind, OpImpl
from fl_dispatch import discovery as discovery_module
from fl_dispatch.discovery import Target, imported, load_backend, slow_imports
from fl_dispatch.errors import RegistrationError
from fl_dispatch.knowledge import availability as availability_module
from fl_dispatch.knowledge.availability import Availability
from fl_dispatch.registry import OpRegistry

HERE = Path(__file__)


def wrong_norm(x: Any, weight: Any, residual: Any = 3, epsilon: float = 1e-5, mine: Any = ...) -> Any:
    return x


def right_activation(x: Any) -> Any:
    return x


def impl(op_name: str, impl_id: str, fn: Any, vendor: str = "acme", **fields: Any) -> OpImpl:
    return OpImpl(op_name, impl_id, BackendImplKind.VENDOR, fn, vendor=vendor, **fields)


def here(fn: Any) -> str:
    return f"{fn.__module__} ({HERE}:{fn.__code__.co_firstlineno})"


def test_a_wrong_signature_names_its_place_and_every_difference() -> None:
    with pytest.raises(RegistrationError) as caught:
        OpRegistry().register_impl(impl("rms_norm", "vendor.acme", wrong_norm))
    text = str(caught.value)
    assert here(wrong_norm) in text
    assert "'residual' is out of order" in text
    assert "'residual' has the default 3, the declaration has the default None" in text
    assert "'epsilon' has the default 1e-05, the declaration has the default 1e-06" in text


def test_a_duplicate_id_says_who_holds_it() -> None:
    registry = OpRegistry()
    registry.register_impl(impl("silu_and_mul", "vendor.acme", right_activation))
    with pytest.raises(RegistrationError) as caught:
        registry.register_impl(impl("silu_and_mul", "vendor.acme", lambda x: x))
    assert f"registered already, by {here(right_activation)}" in str(caught.value)


def test_a_vendors_name_that_another_backend_has_for_an_operator_is_said(caplog: pytest.LogCaptureFixture) -> None:
    registry = OpRegistry()
    registry.register_impl(impl("silu_and_mul", "vendor.acme", right_activation))

    def second(collecting: Any) -> None:
        collecting.register_impl(impl("silu_and_mul", "vendor.acme.second", right_activation))

    def other(collecting: Any) -> None:
        collecting.register_impl(impl("silu_and_mul", "vendor.bolt", right_activation, vendor="bolt"))

    def part(collecting: Any) -> None:
        collecting.register_impl(impl("gelu_and_mul", "vendor.acme.part", right_activation))

    with caplog.at_level(logging.WARNING):
        assert load_backend(registry, Target("other", "here", lambda: other, named=False))
        assert load_backend(registry, Target("part", "here", lambda: part, named=False))
        assert not caplog.records
        assert load_backend(registry, Target("second", "here", lambda: second, named=False))
    assert "'second' registers for the vendor 'acme'" in caplog.text
    assert here(right_activation) in caplog.text


def test_a_slow_import_names_the_module_and_the_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery_module, "SLOW", 0.05)
    monkeypatch.setattr(discovery_module, "_slow", {})
    with caplog.at_level(logging.WARNING):
        imported(Target("quick", "entry point quick_fl.backend", lambda: len, False))
        assert not caplog.records
        imported(Target("acme", "entry point acme_fl.backend", lambda: time.sleep(0.1), False))
    assert "Import of backend 'acme' (entry point acme_fl.backend) took 0.1 s" in caplog.text
    assert list(slow_imports()) == ["'acme' (entry point acme_fl.backend)"]


def test_a_slow_availability_check_is_one_warning_for_all_operators(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(availability_module, "SLOW", 0.05)
    slow = SimpleNamespace(is_available=lambda: time.sleep(0.1) is None)
    known = Availability()
    with caplog.at_level(logging.WARNING):
        for op_name in ("silu_and_mul", "gelu_and_mul"):
            known.of(impl(op_name, "vendor.acme", right_activation, available=slow.is_available))
        known.of(impl("silu_and_mul", "vendor.quick", right_activation, available=lambda: True))
    (record,) = caplog.records
    assert f"is_available of 'vendor.acme' ({here(right_activation)}) took 0.1 s" in record.getMessage()
    assert list(known.slow) == ["vendor.acme"]

"""Backend classes: what they register, and what a chip vendor may rely on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fl_dispatch.backends.base import Backend
from fl_dispatch.backends.reference.register_ops import register_builtins as register_references
from fl_dispatch.backends.vendor.template.template import TemplateBackend
from fl_dispatch.evidence.verify import implementations, verify
from fl_dispatch.manager import OpManager
from fl_dispatch.ops import OPERATORS
from fl_dispatch.registry import OpRegistry
from fl_dispatch.types import BackendImplKind, BackendPriority, OpImpl


class Chip(Backend):
    asked = 0

    @property
    def name(self) -> str:
        return "chip"

    @property
    def vendor(self) -> str:
        return "chip"

    def is_available(self) -> bool:
        Chip.asked += 1
        return False

    def attention_backend(self, use_mla: bool = False) -> str:
        return "chip.Attention"

    def silu_and_mul(self, x: Any) -> Any:
        return x

    def warm_up(self) -> None:
        raise AssertionError("not an operator")


def implementations_of_chip(**options: Any) -> list[OpImpl]:
    return Chip().implementations(BackendImplKind.VENDOR, "vendor.chip", **options)


def test_every_method_named_like_an_operator_is_an_implementation_in_the_order_of_the_catalogue() -> None:
    found = implementations_of_chip()
    assert [impl.op_name for impl in found] == ["silu_and_mul", "attention_backend"]
    assert {(impl.impl_id, impl.vendor, impl.effective_priority) for impl in found} == {("vendor.chip", "chip", 100)}


def test_an_implementation_is_available_when_its_backend_is() -> None:
    before = Chip.asked
    assert not any(impl.is_available() for impl in implementations_of_chip())
    assert Chip.asked == before + 2


def test_priority_and_supports_reach_the_implementation() -> None:
    (silu, attention) = implementations_of_chip(priority=7, supports={"silu_and_mul": lambda x: "never"})
    assert (silu.effective_priority, attention.effective_priority) == (7, 7)
    assert silu.supports is not None
    assert silu.supports(None) == "never"
    assert attention.supports is None


def test_a_predicate_for_an_operator_that_the_backend_lacks_is_an_error() -> None:
    with pytest.raises(ValueError, match="chip: supports names 'rms_norm'"):
        implementations_of_chip(supports={"rms_norm": lambda *args: True})


def test_a_backend_needs_a_name_and_nothing_else() -> None:
    nothing = type("Nothing", (Backend,), {"name": "nothing"})()
    assert nothing.vendor is None
    assert nothing.is_available()
    assert nothing.implementations(BackendImplKind.REFERENCE, "reference.nothing") == []
    with pytest.raises(TypeError, match="abstract"):
        type("Nameless", (Backend,), {})()


def test_the_reference_covers_every_operator_that_computes() -> None:
    registry = OpRegistry()
    register_references(registry)
    assert registry.list_operators() == [name for name, op in OPERATORS.items() if not op.selection]
    impl = registry.get_implementation("rms_norm", "reference.torch")
    assert impl is not None
    assert (impl.kind, impl.effective_priority, impl.is_available()) == (BackendImplKind.REFERENCE, 50, True)


def test_the_template_never_runs_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FL_DISPATCH_TEMPLATE", raising=False)
    assert not TemplateBackend().is_available()
    monkeypatch.setenv("FL_DISPATCH_TEMPLATE", "1")
    assert TemplateBackend().is_available()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_template_registers_and_is_right(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_DISPATCH_TEMPLATE", "1")
    manager = OpManager()
    for op_name in ("silu_and_mul", "rms_norm"):
        (ours,) = implementations(manager, [op_name], ["vendor.template"])
        found = verify(manager, ours, dtype, torch.device("cpu"))
        assert found.problems == []
        assert found.samples > 10


def test_a_backend_may_be_registered_impl_by_impl() -> None:
    """The long form, as the vendor guide has it."""
    backend, registry = Chip(), OpRegistry()
    impls = [
        OpImpl(
            op_name="silu_and_mul",
            impl_id="vendor.chip",
            kind=BackendImplKind.VENDOR,
            fn=backend.silu_and_mul,
            vendor="chip",
            priority=BackendPriority.VENDOR,
        )
    ]
    registry.register_many(impls)
    impl = registry.get_implementation("silu_and_mul", "vendor.chip")
    assert impl is not None
    assert not impl.is_available()

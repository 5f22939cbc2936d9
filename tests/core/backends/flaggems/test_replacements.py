"""A backend other than FlagGems replaces PyTorch's own operators: a worker's report, record and manifest name it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import pytest

from builders import impl
from fl_dispatch import aten_replacement
from fl_dispatch.aten_replacement import (
    AtenReplacement,
    ReplacementReport,
    apply_blacklist,
    kept_operators,
    register_replacement,
    replaced_operators,
)
from fl_dispatch.devices import CPU, DeviceSpec
from fl_dispatch.errors import DispatchError, RegistrationError
from fl_dispatch.hosting.records.report import dispatch_report
from fl_dispatch.hosting.start import aten
from fl_dispatch.registry import OpRegistry
from fl_dispatch.settings import Settings


@dataclass
class Vendor:
    """Replaces what it is told to."""

    NAME: str = "Chip"
    wanted: tuple[str, ...] = ("mm", "add.Tensor")
    running: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    sealed: bool = False

    def replace(self, settings: Settings, device: DeviceSpec) -> str:
        self.running = {key: f"chip.{key}" for key in self.wanted if settings.policy.enabled}
        return "" if self.running else "dispatch is off"

    def operators(self) -> Mapping[str, str]:
        return {f"aten::{key}": run for key, run in self.running.items()}

    def settle(self) -> Mapping[str, str]:
        return self.wrong

    def leave(self, operators: Mapping[str, str]) -> None:
        for key, why in operators.items():
            self.wrong[key] = why
            self.running.pop(key, None)

    def resume(self, operators: Collection[str]) -> None:
        for key in operators:
            del self.wrong[key]
            self.running[key] = f"chip.{key}"

    def seal(self) -> None:
        self.sealed = True

    def report(self) -> ReplacementReport:
        why_not = "" if self.running else "dispatch is off"
        calls = dict.fromkeys(self.running, 3)
        return ReplacementReport(why_not=why_not, sealed=self.sealed, replaced=sorted(self.running), calls=calls,
                                 native={}, waits=[], declined={}, wrong=self.wrong, skipped={})  # fmt: skip


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, AtenReplacement]:
    """Only what a test registers, and the built-in backends when it makes a manager."""
    found: dict[str, AtenReplacement] = {}
    monkeypatch.setattr(aten_replacement, "_registered", found)
    monkeypatch.setattr(aten_replacement, "_kept", {})
    return found


def test_a_workers_report_and_record_name_each_backend() -> None:
    register_replacement(Vendor())
    aten.replace(Settings(), CPU)
    assert dispatch_report()["aten"]["Chip"]["replaced"] == ["add.Tensor", "mm"]
    assert aten.describe().startswith("2 replaced by Chip; called: mm 3, add.Tensor 3; none by FlagGems: ")
    assert replaced_operators() == {"aten::add.Tensor": "chip.add.Tensor", "aten::mm": "chip.mm"}
    assert aten.is_active()


def test_learning_ends_for_each_backend_and_what_is_wrong_elsewhere_is_left() -> None:
    one, other = Vendor(), Vendor("Other", ("mul",))
    register_replacement(one)
    register_replacement(other)
    aten.replace(Settings(), CPU)
    assert not any(aten.settle().values())
    aten.leave({"Chip": {"mm": "on rank 1: wrong"}})
    aten.seal()
    assert replaced_operators() == {"aten::add.Tensor": "chip.add.Tensor", "aten::mul": "chip.mul"}
    assert aten.settle()["Chip"] == {"mm": "on rank 1: wrong"}
    assert one.sealed
    assert other.sealed


def test_single_overloads_stay_pytorchs_and_come_back_when_the_list_is_another() -> None:
    register_replacement(Vendor())
    register_replacement(Vendor("Other", ("mul.Tensor", "mul.out")))
    aten.replace(Settings.of(aten_blacklist=frozenset({"aten::mm.default", "mul.out"})), CPU)
    assert list(replaced_operators()) == ["aten::add.Tensor", "aten::mul.Tensor"]
    assert aten.report()["Chip"]["wrong"] == {"mm": "aten_blacklist (code)"}
    assert kept_operators() == ("aten::mm", "aten::mul.out")
    apply_blacklist({"add.Tensor", "mm"})
    assert list(replaced_operators()) == ["aten::mul.Tensor", "aten::mul.out"]
    apply_blacklist({"*"})
    assert not replaced_operators()
    apply_blacklist(())
    assert list(replaced_operators()) == ["aten::add.Tensor", "aten::mm", "aten::mul.Tensor", "aten::mul.out"]


def test_a_backend_that_knows_no_lists_runs_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Vendor, "resume")
    register_replacement(Vendor())
    aten.replace(Settings(), CPU)
    assert list(replaced_operators()) == ["aten::add.Tensor", "aten::mm"]


def test_two_backends_cannot_replace_one_operator() -> None:
    register_replacement(Vendor())
    register_replacement(Vendor("Other", ("mm",)))
    with pytest.raises(DispatchError, match="aten::mm is replaced by two backends, Chip and Other"):
        aten.replace(Settings(), CPU)


def test_nothing_is_active_where_every_backend_says_why_not() -> None:
    register_replacement(Vendor())
    aten.replace(Settings.of(enabled=False), CPU)
    assert not aten.is_active()
    assert aten.describe().startswith("none by Chip: dispatch is off; none by FlagGems: ")


def test_a_name_has_one_replacement_and_the_same_may_come_again(registered: dict[str, AtenReplacement]) -> None:
    chip = Vendor()
    register_replacement(chip)
    register_replacement(chip)
    with pytest.raises(RegistrationError, match="'Chip' already"):
        register_replacement(Vendor())
    with pytest.raises(RegistrationError, match="'Chip' already"):
        OpRegistry(OpRegistry(), "second").register_replacement(Vendor())
    assert registered == {"Chip": chip}


def test_a_backend_with_two_replacements_of_one_name_leaves_nothing_behind() -> None:
    root = OpRegistry()
    own = OpRegistry(root, "twice")
    own.register_impl(impl("default.a"))
    own.register_replacement(Vendor())
    with pytest.raises(RegistrationError, match="'Chip' already"):
        own.register_replacement(Vendor())
    register_replacement(Vendor())  # somebody else takes the name before the backend is done
    with pytest.raises(RegistrationError, match="'Chip' already"):
        own.commit()
    assert root.list_operators() == []
    assert not root.snapshot().sources


def test_a_backend_that_fails_leaves_no_replacement_behind(registered: dict[str, AtenReplacement]) -> None:
    collecting = OpRegistry(OpRegistry(), "chip")
    collecting.register_replacement(Vendor())
    assert registered == {}
    collecting.commit()
    assert registered.keys() == {"Chip"}

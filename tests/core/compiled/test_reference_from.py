"""From how many tokens on an operator does what its reference does, so that compiled code may hold the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fl_dispatch import BackendImplKind, Manifest, OpImpl, SelectionPolicy, get_default_manager, set_global_policy
from fl_dispatch.devices import ASCEND, CPU, CUDA
from fl_dispatch.hosting.start import first_choices
from fl_dispatch.hosting.start.first_choices import boundary, joins, of_one_backend, reference_from, without_kernels
from fl_dispatch.manager import reset_default_manager
from fl_dispatch.settings.selection_policy import TunedRule

FEW, PLAIN = "vendor.few", "vendor.plain"


@pytest.fixture(autouse=True)
def products() -> Iterator[None]:
    get_default_manager().ensure_initialized()
    for impl_id, properties in ((FEW, {"reference_from": 33}), (PLAIN, {})):
        get_default_manager().registry.register_impl(
            OpImpl(
                "linear", impl_id, BackendImplKind.VENDOR, lambda x, weight, bias=None: x, impl_id[7:],
                properties=properties,
            )
        )  # fmt: skip
    yield
    set_global_policy(SelectionPolicy())
    reset_default_manager()


def choice(impl_id: str, tokens: tuple[int, int | None] | None = None, **more: Any) -> dict[str, Any]:
    when = {} if tokens is None else {"when": {"dtype": None, "tokens": list(tokens), "phase": None}}
    return {"runs": [impl_id], **when, **more}


@pytest.mark.parametrize(
    ("choices", "begin"),
    [
        ([choice("reference.torch")], 1),
        ([choice(FEW)], 33),
        ([choice(PLAIN)], None),
        ([choice(PLAIN, (1, 8)), choice("reference.torch")], 9),
        ([choice(PLAIN, (1, 64)), choice(FEW)], 65),
        ([choice(FEW, (1, 8)), choice("reference.torch")], 33),
        ([choice(PLAIN, (1, 8)), choice(PLAIN)], None),
        ([choice(PLAIN, (33, None)), choice("reference.torch")], None),
        ([{"runs": [FEW, "reference.torch"]}], None),
        ([choice(FEW, **{"not for": ["vendor.few: bfloat16"]})], None),
        ([{"runs": ["reference.torch"], "when": {"dtype": "float32", "tokens": None, "phase": None}}, choice(FEW)], 33),
        ([{"runs": [PLAIN], "when": {"dtype": "float32", "tokens": None, "phase": None}}, choice(FEW)], None),
    ],
)
def test_frozen_choices_say_from_where_on_they_are_the_reference(choices: list[Any], begin: int | None) -> None:
    assert reference_from(Manifest({"linear": choices}, {}, {}), "linear") == begin


def test_a_layer_has_its_own_choices_or_those_of_the_operator() -> None:
    manifest = Manifest({"linear": [choice(FEW)], "linear@model.layers.0": [choice(PLAIN)]}, {}, {})
    assert reference_from(manifest, "linear", "model.layers.0") is None
    assert reference_from(manifest, "linear", "model.layers.1") == 33


@pytest.mark.parametrize(("first", "begin"), [(FEW, 33), (PLAIN, None), ("reference.torch", 1)])
def test_before_the_start_first_choices_say_so(first: str, begin: int | None) -> None:
    set_global_policy(SelectionPolicy.from_dict(per_op_order={"linear": [f"impl:{first}"]}))
    assert boundary("linear") == begin


JOINED, PARTS = "rotary_embedding_kv_cache_write", ("rotary_embedding", "kv_cache_write")


@pytest.mark.parametrize(
    ("others", "rules", "found"),
    [
        ((), {}, True),
        (("kv_cache_write",), {}, False),
        (("rotary_embedding",), {}, False),
        (("kv_cache_write",), {JOINED: ["vendor:own"]}, True),
    ],
)
def test_a_joined_operator_takes_the_place_of_kernels_of_its_own_vendor_alone(
    others: tuple[str, ...], rules: dict[str, list[str]], found: bool
) -> None:
    vendors = {name: "other" if name in others else "own" for name in (JOINED, *PARTS)}
    for name, vendor in vendors.items():
        get_default_manager().registry.register_impl(
            OpImpl(
                name, f"vendor.{vendor}", BackendImplKind.VENDOR, lambda *args, **options: None, vendor,
                priority=1000, signature="unchecked",
            )
        )  # fmt: skip
    set_global_policy(SelectionPolicy.from_dict(prefer="vendor", per_op_order=rules))
    assert joins(JOINED, PARTS)
    assert of_one_backend(JOINED, PARTS) is found


@pytest.mark.parametrize(
    ("tokens", "found"),
    [(1, [FEW]), (2, [PLAIN]), (8, [PLAIN, "reference.torch"]), (None, [FEW, PLAIN, "reference.torch"])],
)
def test_first_choices_for_some_tokens_are_those_that_such_calls_meet(tokens: int | None, found: list[str]) -> None:
    rules = (
        TunedRule(order=(f"impl:{FEW}",), tokens=(1, 1)),
        TunedRule(order=(f"impl:{PLAIN}",), tokens=(2, 4)),
        TunedRule(order=(f"impl:{PLAIN}",), tokens=(5, None), dtype="bfloat16"),
        TunedRule(order=("reference",)),
    )
    set_global_policy(SelectionPolicy(op_tuned=(("linear", rules),)))
    assert [impl.impl_id for impl in get_default_manager().first_choices("linear", tokens=tokens)] == found


def test_a_reference_is_no_kernel_on_an_accelerator_that_triton_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    operators, registry = ["gated_delta_rule_update"], get_default_manager().registry
    set_global_policy(SelectionPolicy.from_dict(deny_vendors={"cpu"}))
    assert without_kernels(operators, CUDA) == operators
    assert without_kernels(operators, CPU) == []
    for why, lacking in (("no driver", []), ("", operators)):
        monkeypatch.setattr(first_choices, "why_unserved", lambda why=why: why)
        assert without_kernels(operators, ASCEND) == lacking
    fn = registry.get_implementation(operators[0], "reference.torch").fn
    registry.register_impl(OpImpl(operators[0], "default.own", BackendImplKind.DEFAULT, fn))
    assert without_kernels(operators, CUDA) == []

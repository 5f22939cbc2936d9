from __future__ import annotations

import copy
import pickle

import pytest

from builders import impl
from fl_dispatch import BackendImplKind, BackendPriority, OpImpl, Traits, match_token, types


def test_the_kind_is_the_token_that_selects_it() -> None:
    assert [str(kind) for kind in BackendImplKind] == ["flagos", "vendor", "reference"]


def test_priorities_leave_room_between_them() -> None:
    assert [int(p) for p in (BackendPriority.DEFAULT, BackendPriority.VENDOR, BackendPriority.REFERENCE)] == [
        150,
        100,
        50,
    ]


def test_a_vendor_implementation_names_its_vendor() -> None:
    with pytest.raises(ValueError, match="must specify vendor name"):
        OpImpl("op", "vendor.x", BackendImplKind.VENDOR, lambda: None)


def test_only_a_vendor_implementation_has_a_vendor() -> None:
    with pytest.raises(ValueError, match="only VENDOR"):
        OpImpl("op", "default.x", BackendImplKind.DEFAULT, lambda: None, vendor="x")


@pytest.mark.parametrize(("op_name", "impl_id"), [("", "a"), ("op", ""), (" op", "a"), ("op", 3)])
def test_names_are_proper_strings(op_name: str, impl_id: str) -> None:
    with pytest.raises(ValueError, match="must be a non-empty string"):
        OpImpl(op_name, impl_id, BackendImplKind.DEFAULT, lambda: None)


def test_an_implementation_is_a_frozen_value() -> None:
    with pytest.raises(AttributeError):
        impl("default.a").op_name = "other"  # type: ignore[misc]


def test_the_priority_defaults_to_the_kinds() -> None:
    assert impl("vendor.a").priority == 100
    assert impl("vendor.a", priority=7).priority == 7


def test_availability_is_asked_of_the_field_then_the_function_then_the_backend() -> None:
    class Backend:
        def is_available(self) -> bool:
            return False

        def op(self) -> None: ...

    def marked() -> None: ...

    marked._is_available = lambda: False  # type: ignore[attr-defined]
    assert not impl("default.a", Backend().op).is_available()
    assert not impl("default.a", marked).is_available()
    assert impl("default.a", marked, available=lambda: True).is_available()
    assert impl("default.a").is_available()


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(3)])
def test_an_availability_check_that_raises_is_a_no_with_its_reason(error: BaseException) -> None:
    def check() -> bool:
        raise error

    available, reason = impl("default.a", available=check).availability()
    assert not available
    assert type(error).__name__ in reason


TOKENS = ["flagos", "vendor", "reference", "vendor:a", "vendor:b", "impl:default.x", "impl:vendor.a", "unknown", ""]


@pytest.mark.parametrize(
    ("impl_id", "named_by"),
    [
        ("default.x", {"flagos", "impl:default.x"}),
        ("vendor.a", {"vendor", "vendor:a", "impl:vendor.a"}),
        ("vendor.b", {"vendor", "vendor:b"}),
        ("reference.torch", {"reference"}),
    ],
)
def test_tokens_name_implementations(impl_id: str, named_by: set[str]) -> None:
    assert {token for token in TOKENS if match_token(impl(impl_id), token)} == named_by


@pytest.mark.parametrize("properties", [Traits(graphs=False, chunk=256), {"graphs": False, "chunk": 256}])
def test_properties_are_the_same_as_traits_and_by_their_names(properties: Traits | dict[str, object]) -> None:
    found = impl("default.a", properties=properties)
    assert (found.traits.graphs, found.traits.chunk, found.traits.inductor) == (False, 256, True)
    assert found.properties == {"graphs": False, "chunk": 256}
    assert found.properties.get("inductor") is None


def test_a_property_at_its_default_is_in_the_mapping_that_gave_it() -> None:
    given = {"graphs": True, "chunk": None, "kv_block": 32, "acme_clusters": 4}
    found = impl("default.a", properties=given)
    assert found.properties == given
    assert found.properties["graphs"] is True
    assert "inductor" not in found.properties
    assert copy.deepcopy(found.traits) == pickle.loads(pickle.dumps(found.traits)) == given


def test_traits_can_be_copied_and_pickled_and_extra_holds_no_trait() -> None:
    given = Traits(graphs=False, extra={"tile": 64})
    assert pickle.loads(pickle.dumps(given)) == copy.deepcopy(given) == given
    with pytest.raises(TypeError, match="'graphs' is a trait of its own"):
        Traits(extra={"graphs": False})


def test_names_of_traits_are_constants_of_the_module() -> None:
    assert {name: getattr(types, name) for name in ("GRAPHS", "KV_LAYOUT")} == {
        "GRAPHS": "graphs",
        "KV_LAYOUT": "kv_layout",
    }
    with pytest.raises(AttributeError, match="has no attribute 'GRAPHICS'"):
        _ = types.GRAPHICS


def test_a_property_that_is_no_trait_is_a_vendors_own() -> None:
    found = impl("default.a", properties={"acme_clusters": 4, "kv_block": 32})
    assert found.traits.extra == {"acme_clusters": 4}
    assert found.properties["acme_clusters"] == 4
    assert sorted(found.properties) == ["acme_clusters", "kv_block"]


def test_a_trait_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(TypeError, match="batch_invarant"):
        Traits(batch_invarant=True)  # type: ignore[call-arg]

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from builders import impl, manager_of
from fl_dispatch import (
    PREFER_DEFAULT,
    VALID_PREFER_VALUES,
    ConfigError,
    PolicyManager,
    SelectionPolicy,
    call_op,
    get_default_manager,
    get_policy,
    get_policy_epoch,
    policy_context,
    policy_from_config,
    reset_default_manager,
    reset_global_policy,
    set_global_policy,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from fl_dispatch.settings import TunedRule

pytestmark = pytest.mark.usefixtures("results_are_names")


def test_the_default_policy_prefers_flagos_and_restricts_nothing() -> None:
    policy = SelectionPolicy()
    assert (policy.prefer, policy.strict, policy.per_op_order) == (PREFER_DEFAULT, False, ())
    assert (policy.deny_vendors, policy.allow_vendors) == (frozenset(), None)


@pytest.mark.parametrize(
    ("prefer", "order"),
    [
        ("flagos", ["flagos", "vendor", "reference"]),
        ("vendor", ["vendor", "flagos", "reference"]),
        ("reference", ["reference", "flagos", "vendor"]),
    ],
)
def test_prefer_gives_the_order(prefer: str, order: list[str]) -> None:
    assert SelectionPolicy(prefer=prefer).get_default_order() == order


def test_an_unknown_preference_is_refused() -> None:
    with pytest.raises(ValueError, match="Invalid prefer value"):
        SelectionPolicy(prefer="fastest")
    with pytest.raises(ValueError, match="Invalid prefer value"), with_preference("fastest"):
        pass
    assert {"flagos", "vendor", "reference"} == VALID_PREFER_VALUES


def test_a_policy_is_a_hashable_frozen_value() -> None:
    one = SelectionPolicy.from_dict(prefer="vendor", per_op_order={"a": ["vendor"]}, deny_vendors={"x"})
    two = SelectionPolicy.from_dict(prefer="vendor", per_op_order={"a": ["vendor"]}, deny_vendors=["x"])
    assert one == two
    assert hash(one) == hash(two)
    assert one.fingerprint() == two.fingerprint() != SelectionPolicy().fingerprint()
    with pytest.raises(AttributeError):
        one.prefer = "flagos"  # type: ignore[misc]


def test_a_policy_travels_as_text() -> None:
    policy = SelectionPolicy(
        prefer="vendor",
        strict=True,
        per_op_order=(("a@layers.*", ("vendor:x", "reference")),),
        deny_vendors=frozenset({"y"}),
        allow_vendors=frozenset(),
        op_tuned=(("a", (TunedRule(order=("vendor",), dtype="bfloat16", tokens=(1, None), phase="decode"),)),),
        flagos_whitelist=frozenset({"mm"}),
        batch_invariant=True,
    )
    assert SelectionPolicy.from_json(policy.to_json()) == policy


def test_deny_beats_allow() -> None:
    policy = SelectionPolicy.from_dict(allow_vendors={"a", "b"}, deny_vendors={"b"})
    assert [policy.is_vendor_allowed(vendor) for vendor in ("a", "b", "c")] == [True, False, False]


def test_an_empty_allow_list_allows_nobody() -> None:
    assert not SelectionPolicy.from_dict(allow_vendors=[]).is_vendor_allowed("a")


def test_the_most_specific_scope_gives_the_order() -> None:
    policy = SelectionPolicy.from_dict(
        per_op_order={
            "op": ["flagos"],
            "op@layers.*": ["vendor"],
            "op@layers.3.*": ["reference"],
            "op@layers.3.norm": ["impl:x"],
        }
    )
    assert policy.get_per_op_order("op") == ["flagos"]
    assert policy.get_per_op_order("op", "layers.1.norm") == ["vendor"]
    assert policy.get_per_op_order("op", "layers.3.mlp") == ["reference"]
    assert policy.get_per_op_order("op", "layers.3.norm") == ["impl:x"]
    assert policy.get_per_op_order("other") is None
    assert policy.per_op_order_dict["op"] == ["flagos"]


def test_an_empty_order_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing could run"):
        SelectionPolicy.from_dict(per_op_order={"op": []})


def test_set_global_policy_returns_the_one_before_and_counts() -> None:
    epoch = get_policy_epoch()
    before = set_global_policy(SelectionPolicy(prefer="vendor"))
    assert before.prefer == "flagos"
    assert get_policy().prefer == "vendor"
    assert get_policy_epoch() > epoch
    assert PolicyManager.get_instance() is PolicyManager.get_instance()


def test_reset_reads_the_environment_again(monkeypatch: pytest.MonkeyPatch) -> None:
    set_global_policy(SelectionPolicy(prefer="vendor"))
    monkeypatch.setenv("VLLM_FL_PREFER", "reference")
    assert get_policy().prefer == "vendor"
    reset_global_policy()
    assert get_policy().prefer == "reference"
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    reset_default_manager()
    assert get_policy().prefer == "vendor"


def test_contexts_nest_and_end() -> None:
    set_global_policy(SelectionPolicy())
    with with_preference("vendor"):
        with with_strict_mode(), with_denied_vendors("a"):
            with with_denied_vendors("b"):
                assert get_policy().deny_vendors == {"a", "b"}
            assert (get_policy().prefer, get_policy().strict) == ("vendor", True)
            assert get_policy().deny_vendors == {"a"}
        assert get_policy().strict is False
    assert get_policy() == SelectionPolicy()


def test_allowed_vendors_replace_and_denied_vendors_add() -> None:
    set_global_policy(SelectionPolicy.from_dict(allow_vendors={"a"}, deny_vendors={"z"}))
    with with_allowed_vendors("b"), with_denied_vendors("y"):
        assert get_policy().allow_vendors == {"b"}
        assert get_policy().deny_vendors == {"y", "z"}
    with with_allowed_vendors():
        assert get_policy().allow_vendors == frozenset()


def test_a_context_ends_when_its_block_raises() -> None:
    set_global_policy(SelectionPolicy())
    with pytest.raises(KeyError), with_preference("vendor"):
        raise KeyError
    assert get_policy() == SelectionPolicy()


def test_a_context_decides_what_a_call_runs_in_its_own_thread_only() -> None:
    manager = manager_of(impl("default.a"), impl("vendor.b"))
    seen: list[str] = []
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with with_preference("vendor"):
            inside.set()
            done.wait(10)
            seen.append(manager.call("demo", 1))

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    assert manager.call("demo", 1) == "default.a"
    done.set()
    thread.join()
    assert seen == ["vendor.b"]


def test_interleaved_tasks_each_see_their_own_context() -> None:
    manager = get_default_manager()
    manager.registry.register_many([impl("default.a"), impl("vendor.b"), impl("reference.c")])
    expected = {"flagos": "default.a", "vendor": "vendor.b", "reference": "reference.c"}

    async def task(prefer: str) -> bool:
        right = True
        with with_preference(prefer):
            for _ in range(50):
                await asyncio.sleep(0)
                right &= call_op("demo", 1) == expected[prefer]
        return right

    async def main() -> list[bool]:
        return await asyncio.gather(*(task(prefer) for prefer in expected for _ in range(3)))

    assert all(asyncio.run(main()))


def test_a_registration_is_seen_inside_a_context_that_is_open() -> None:
    manager = get_default_manager()
    manager.registry.register_impl(impl("default.a"))
    with with_preference("vendor"):
        assert call_op("demo", 1) == "default.a"
        manager.registry.register_impl(impl("vendor.late"))
        assert call_op("demo", 1) == "vendor.late"


def test_a_reset_inside_an_open_context_leaves_the_context_in_force() -> None:
    get_default_manager().registry.register_impl(impl("default.old"))
    with with_preference("vendor"):
        assert call_op("demo", 1) == "default.old"
        reset_default_manager()
        get_default_manager().registry.register_many([impl("default.new"), impl("vendor.new")])
        assert call_op("demo", 1) == "vendor.new"
    assert call_op("demo", 1) == "default.new"


def test_two_managers_in_one_context_keep_apart() -> None:
    one = manager_of(impl("default.a"), impl("vendor.b"))
    two = manager_of(impl("default.x"), impl("vendor.y"))
    get_default_manager().registry.register_many([impl("default.d"), impl("vendor.v")])
    with with_preference("vendor"):
        assert [one.call("demo"), two.call("demo"), call_op("demo")] == ["vendor.b", "vendor.y", "vendor.v"]
    assert [one.call("demo"), two.call("demo"), call_op("demo")] == ["default.a", "default.x", "default.d"]


def test_many_policies_in_turn_each_decide() -> None:
    manager = get_default_manager()
    manager.registry.register_many([impl(f"vendor.v{n}") for n in range(100)])
    for n in range(100):
        with with_allowed_vendors(f"v{n}"):
            assert call_op("demo", 1) == f"vendor.v{n}"


def test_policy_context_takes_policies_only() -> None:
    with pytest.raises(TypeError, match="SelectionPolicy"), policy_context("vendor"):  # type: ignore[arg-type]
        pass
    with pytest.raises(TypeError, match="SelectionPolicy"):
        set_global_policy(None)  # type: ignore[arg-type]


def test_a_policy_comes_from_a_config_file(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(
        "prefer: vendor\nstrict: true\nallow_vendors: [CUDA]\ndeny_vendors: [AMD]\n"
        "op_backends:\n  silu: [vendor, flagos]\n"
    )
    policy = policy_from_config(file)
    assert (policy.prefer, policy.strict, policy.allow_vendors) == ("vendor", True, {"CUDA"})
    assert policy.deny_vendors == {"AMD"}
    assert policy.get_per_op_order("silu") == ["vendor", "flagos"]
    assert "line 1" in str(policy.origin("prefer"))


def test_a_missing_config_file_is_a_config_error_and_a_file_not_found_error() -> None:
    with pytest.raises(FileNotFoundError):
        policy_from_config("/no/such/file.yaml")
    with pytest.raises(ConfigError, match="/no/such/file.yaml"):
        policy_from_config("/no/such/file.yaml")

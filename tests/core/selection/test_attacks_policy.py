"""Attacks on policies: where they come from, which layer they name, how they travel, and where they hold."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from builders import impl, manager_of
from fl_dispatch import (
    ConfigError,
    SelectionPolicy,
    bind_op,
    call_op,
    explain,
    get_default_manager,
    get_policy,
    policy_context,
    policy_from_config,
    reset_global_policy,
    set_global_policy,
    with_preference,
    with_strict_mode,
)
from fl_dispatch.settings import TunedRule

pytestmark = pytest.mark.usefixtures("results_are_names")

OP = "silu_and_mul"


@pytest.mark.parametrize("scope", ["layers[0].norm", "layers.*", "[a]*?", "layers.[!0]"])
def test_an_exact_scope_names_its_layer_whatever_characters_it_holds(scope: str) -> None:
    orders = {f"{OP}@{scope}": ["impl:default.a"], f"{OP}@*": ["reference"], OP: ["reference"]}
    policy = SelectionPolicy.from_dict(per_op_order=orders)
    assert policy.get_per_op_order(OP, scope) == ["impl:default.a"]
    get_default_manager().registry.register_impl(impl("default.a", lambda x: "exact", op=OP))
    set_global_policy(policy)
    assert bind_op(OP, scope)(torch.ones(1, 2)) == "exact"
    assert explain(OP, scope=scope).source == f"order of {OP}@{scope}"
    assert get_default_manager().unmatched_scopes() == {}


@pytest.mark.parametrize("travel", [copy.copy, copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))])
def test_a_policy_travels_as_a_value_with_its_origins(travel: Callable[[SelectionPolicy], SelectionPolicy]) -> None:
    rule = TunedRule(order=("vendor",), dtype="bfloat16", tokens=(1, None), phase="decode")
    policy = SelectionPolicy(deny_vendors=frozenset({"y"}), allow_vendors=frozenset(), op_tuned=((OP, (rule,)),))
    for original in (policy, SelectionPolicy(), get_policy()):
        arrived = travel(original)
        assert (arrived, hash(arrived), arrived.origins) == (original, hash(original), original.origins)


def test_an_explanation_names_the_file_that_is_in_force_also_if_another_says_the_same(tmp_path: Path) -> None:
    private = manager_of(impl("default.a"), impl("vendor.b"))
    get_default_manager().registry.register_many([impl("default.a"), impl("vendor.b")])
    for name in ("a.yaml", "b.yaml", "a.yaml"):
        (tmp_path / name).write_text("prefer: vendor\n")
        with policy_context(policy_from_config(tmp_path / name)):
            assert call_op("demo") == private.call("demo") == "vendor.b"
            for origin in (get_policy().origin("prefer"), explain("demo").origin, private.explain("demo").origin):
                assert str(origin) == f"{tmp_path / name}, line 1"
    with policy_context(SelectionPolicy(prefer="vendor")):
        assert str(explain("demo").origin) == str(private.explain("demo").origin) == "code"


def test_a_task_keeps_the_policy_that_it_inherited_whoever_ends_the_context() -> None:
    async def main() -> list[str]:
        ended = asyncio.Event()

        async def task() -> list[str]:
            seen = [get_policy().prefer]
            await ended.wait()
            seen.append(get_policy().prefer)
            with with_strict_mode(), with_preference("reference"):
                seen.append(get_policy().prefer)
            return [*seen, get_policy().prefer]

        with with_preference("vendor"):
            started = asyncio.create_task(task())
            await asyncio.sleep(0)
        ended.set()
        return [*await started, get_policy().prefer]

    assert asyncio.run(main()) == ["vendor", "vendor", "reference", "vendor", "flagos"]


def test_a_thread_keeps_the_policy_of_the_context_that_it_runs_in() -> None:
    def work() -> list[str]:
        with with_strict_mode():
            pass
        return [get_policy().prefer]

    with with_preference("vendor"):
        here = contextvars.copy_context()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(here.run, work).result(30) == ["vendor"]


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_contexts_that_end_in_any_order_leave_the_last_one_that_is_open(order: tuple[int, ...]) -> None:
    def generator(prefer: str) -> Iterator[None]:
        with with_preference(prefer):
            yield

    names = ["vendor", "reference", "vendor"]
    open_ones = {index: generator(name) for index, name in enumerate(names)}
    for one in open_ones.values():
        next(one)
    for index in order:
        assert get_policy().prefer == names[max(open_ones)]
        open_ones.pop(index).close()
    assert get_policy().prefer == "flagos"


@pytest.mark.parametrize(
    "name", ["VLLM_FLSTRICT", "VLLMFL_STRICT", "VLLM__FL_STRICT", "VLMM_FL_STRICT", "VLLM_FI_STRICT", "vllm_flstrict"]
)
def test_a_near_miss_of_the_prefix_of_a_variable_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"{name}: has no effect; did you mean VLLM_FL_STRICT?"):
        reset_global_policy()


@pytest.mark.parametrize("name", ["VLLM_STRICT", "VLLM_FP8_CONFIG", "MY_STRICT", "STRICT", "SGLANG_FLSTRICT"])
def test_a_variable_with_another_prefix_is_somebody_elses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    reset_global_policy()
    assert get_policy() == SelectionPolicy()

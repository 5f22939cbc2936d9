"""Our Triton kernels of layers with a state, in Triton's interpreter: long and many sequences, chunks of every size.

A batch's requests share chunks, so it is tested that they have nothing to do with each other.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from interpreting import run

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"
NAMES = ("causal_conv1d", "causal_conv1d_update", "gated_delta_rule", "gated_delta_rule_update")
FORMS = ("HALF", "WIDE")
PROGRAM = """
import json, math, sys
import torch
from fl_dispatch import get_default_manager
from fl_dispatch.backends.reference.impl import recurrent as reference
from fl_dispatch.backends.triton.impl.states import convolution, delta_rule
from fl_dispatch.errors import NotSupported
from fl_dispatch.evidence.verify import implementations, verify
from fl_dispatch.ops import OPERATORS
from fl_dispatch.ops.inputs.recurrent import Convolutions, DeltaRules

manager, device, found = get_default_manager(), torch.device("cpu"), {}


def probed(name, dtype):
    (impl,) = implementations(manager, [name], ["default.triton"])
    probes = list(OPERATORS[name].probes(dtype, device, torch.Generator().manual_seed(0)))
    made = verify(manager, impl, dtype, device, samples=probes, repeats=1, race_calls=3)
    return made.samples == len(probes), made.problems


for name in NAMES:
    found[name] = [probed(name, dtype) for dtype in (torch.float16, torch.float32)]
given = {form: getattr(delta_rule, form) for form in FORMS}
for form in FORMS:  # as large as bfloat16's, whose products the interpreter has wrong
    setattr(delta_rule, form, given[form]._replace(chunk=delta_rule.LARGE.chunk, columns=delta_rule.LARGE.columns))
found["large chunks"] = [probed("gated_delta_rule", dtype) for dtype in (torch.float16, torch.float32)]
for form in FORMS:
    setattr(delta_rule, form, given[form])


def beside(spoilt):
    \"\"\"Whether the second of three prompts and its state are the same beside others with NaN.\"\"\"
    results = []
    for bad in (False, True):
        make = DeltaRules(torch.float32, device, torch.Generator().manual_seed(0))
        args = list(make.sequences("", (5, 7, 9), (1, 2), (16, 16), new=(0,)).args)
        if bad:
            args[spoilt][:5] = args[spoilt][12:] = math.nan
        out = delta_rule.gated_delta_rule(*args)
        results.append((out, args[7][args[8][1]]))
    (out, state), (other, same) = results
    others_are_spoilt = other[:5].isnan().any() and other[12:].isnan().any()
    return torch.equal(out[5:12], other[5:12]), torch.equal(state, same), bool(others_are_spoilt)


found["NaN"] = {name: beside(place) for place, name in enumerate(("query", "key", "value", "a", "b"))}


def like_each_other():
    \"\"\"The largest difference from the reference where all keys of a prompt are the same, and nothing decays.\"\"\"
    make = DeltaRules(torch.float32, device, torch.Generator().manual_seed(0))
    (query, key, value, a, b, a_log, *rest) = make.sequences("", (150,), (1, 2), (16, 16)).args
    key, a, b = key[:1].expand_as(key), torch.full_like(a, -60.0), torch.full_like(b, 60.0)
    again = [rest[0], rest[1].clone(), *rest[2:]]
    pairs = delta_rule.gated_delta_rule(query, key, value, a, b, a_log, *rest), reference.gated_delta_rule(
        query, key, value, a, b, a_log, *again
    )
    return float((pairs[0] - pairs[1]).abs().max() / pairs[1].abs().max())


found["alike"] = like_each_other()


def shared(fn, wanted, args, place):
    \"\"\"Whether the third request is right, and its state, where the first two have one slot.\"\"\"
    args = list(args)
    args[place + 1][1] = args[place + 1][0]
    states, slots = args[place], args[place + 1]
    own = [arg[2:] if at in rows_of[fn] or at == place + 1 else arg for at, arg in enumerate(args)]
    own[place] = states.clone()
    third_out, third = wanted(*own)[0], own[place][slots[2]]
    out = fn(*args)
    close = lambda x, y: torch.isclose(x, y, rtol=1e-4, atol=1e-4)
    return bool(close(out[2], third_out).all()), bool(close(states[slots[2]], third).all())


rows_of = {convolution.causal_conv1d_update: (0,), delta_rule.gated_delta_rule_update: (0, 1, 2, 3, 4)}
make = Convolutions(torch.float32, device, torch.Generator().manual_seed(0)).tokens("", 3, 64)
found["shared"] = [shared(convolution.causal_conv1d_update, reference.causal_conv1d_update, make.args, 3)]
make = DeltaRules(torch.float32, device, torch.Generator().manual_seed(0)).tokens("", 3, (1, 2), (16, 16))
found["shared"] += [shared(delta_rule.gated_delta_rule_update, reference.gated_delta_rule_update, make.args, 7)]

make = DeltaRules(torch.float64, device, torch.Generator().manual_seed(0))
found["declined"] = []
for fn, sample in (
    (delta_rule.gated_delta_rule, make.sequences("", (3,), (1, 1), (16, 16))),
    (delta_rule.gated_delta_rule_update, make.tokens("", 1, (1, 1), (16, 16))),
):
    try:
        fn(*sample.args)
    except NotSupported as error:
        found["declined"].append(str(error))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    pytest.importorskip("triton")
    program = f"NAMES, FORMS = {NAMES!r}, {FORMS!r}\n{PROGRAM}"
    made: dict[str, Any] = json.loads(run(program, OMP_NUM_THREADS="1"))
    return made


@pytest.mark.parametrize("name", [*NAMES, "large chunks"])
def test_long_many_and_new_sequences_are_right(name: str, found: dict[str, Any]) -> None:
    assert found[name] == [[True, []]] * 2


@pytest.mark.parametrize("operand", ["query", "key", "value", "a", "b"])
def test_nan_in_a_prompt_stays_in_it(operand: str, found: dict[str, Any]) -> None:
    assert found["NaN"][operand] == [True, True, True]


def test_keys_that_are_alike_lose_no_digits(found: dict[str, Any]) -> None:
    """Powers of their triangle would: the largest of 64 keys has nineteen digits."""
    assert found["alike"] < 1e-5


def test_requests_that_share_a_slot_leave_the_others_alone(found: dict[str, Any]) -> None:
    assert found["shared"] == [[True, True]] * 2


def test_float64_is_declined(found: dict[str, Any]) -> None:
    assert found["declined"] == ["float64"] * 2


@pytest.mark.parametrize("case", ["delta rule, 4 prompts, states by value", "delta rule, 32", "convolution, "])
def test_kernels_for_bfloat16_spill_no_registers_on_hopper(case: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    spec = importlib.util.spec_from_file_location("kernel_code", BENCHMARKS / "kernel_code.py")
    assert spec
    assert spec.loader
    tool = sys.modules["kernel_code"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    made = tool.compiled(BENCHMARKS.parent, tmp_path / "code", case, None)
    codes = tool.read(tmp_path / "code", made, Path(made["tools"]))
    assert codes
    assert {str(code) if isinstance(code, str) else code.counts["spills"] for code in codes} == {0}

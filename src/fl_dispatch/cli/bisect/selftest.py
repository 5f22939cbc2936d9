"""``fl bisect --self-test``: plant faults in a small model's engine, and check that each is found."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DispatchError
from ...evidence.bisect import planted, planted_aten
from ...evidence.bisect.findings import Blamed, Result
from ...evidence.bisect.journal import Journal
from ..engines import Start
from ..hosts import Host
from ..output import print_json, print_table
from . import Case, investigate
from .report import Report, sentence

DENSE = ("rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "paged_attention")
LATENT = ("rms_norm", "silu_and_mul", "rotary_embedding", "kv_cache_write", "mla_decode", "mla_prefill", "fused_moe")
PLUGIN = planted.__name__


@dataclass(frozen=True)
class Planted:
    """One fault, and the expected finding.

    Args:
        what: description of the fault.
        op: our operator; empty if none may be blamed.
        sites: judges whether the right layers were found.
        family, dtype, ranks, compiled: settings of the engine.
        at: the ranks with the fault.
        aten: PyTorch operators that must be found: one culprit, and all others as its partners.
        slower_than: judge times instead of logits, with this factor.
    """

    what: str
    op: str = ""
    sites: Callable[[Blamed], bool] = lambda one: len(one.sites) == one.of
    family: str = "qwen3"
    dtype: str = "float32"
    ranks: int = 1
    compiled: bool = False
    at: tuple[int, ...] = ()
    fault: str = ""
    aten: tuple[str, ...] = ()
    slower_than: float = 0.0


TESTS: dict[str, Planted] = {
    "one_shape": Planted(
        "wrong for one layer's shape",
        "silu_and_mul",
        lambda one: [str(site) for site in one.sites] == ["model.layers.0.mlp.act_fn"],
        family="deepseek_v2",
    ),
    "bfloat16_only": Planted("wrong in bfloat16 only", "rms_norm", dtype="bfloat16"),
    "bfloat16_only-float32": Planted("the same, in float32", fault="bfloat16_only"),
    "beyond_256": Planted("wrong for batches of more than 256 tokens", "silu_and_mul"),
    "leftover": Planted("wrong only after another request", "rotary_embedding"),
    "one_rank": Planted("wrong at one rank", "silu_and_mul", ranks=2, at=(1,)),
    "dies": Planted("ends the process in batches of more than 256 tokens", "silu_and_mul"),
    "not_exact": Planted("right, not bit-exact", fault="not_exact"),
    "not_exact-bfloat16": Planted("the same, in bfloat16", fault="not_exact", dtype="bfloat16"),
    "beyond_256-compiled": Planted(
        "wrong for batches of more than 256 tokens, compiled", "silu_and_mul", compiled=True, fault="beyond_256"
    ),
    "three_times": Planted("right, and three times slower", "paged_attention", slower_than=1.2),
    "ten_times": Planted("right, and ten times slower", "rms_norm", slower_than=1.2),
    "aten_comparison": Planted("integers compared by eight bits", family="deepseek_v2", aten=("aten::ge.Tensor",)),
    "aten_cumsum_out": Planted("cumulative sum with an output argument, anew after 128", aten=("aten::cumsum.out",)),
    "aten_log_": Planted("in-place logarithm, last block unwritten", family="deepseek_v2", aten=("aten::log_",)),
    "aten_uniform_": Planted("random fill without its bounds", aten=("aten::uniform_",)),
    "aten_rsqrt": Planted("reciprocal root of small values", aten=("aten::rsqrt",)),
    "aten_rsqrt-compiled": Planted("the same, compiled", compiled=True, fault="aten_rsqrt", aten=("aten::rsqrt",)),
    "aten_rsqrt-two_ranks": Planted("the same, in two ranks", fault="aten_rsqrt", aten=("aten::rsqrt",), ranks=2),
    "aten_together": Planted("three that are wrong only together", aten=("aten::rsqrt", "aten::log_", "aten::exp_")),
    "aten_slow": Planted("right, after five milliseconds of work", aten=("aten::cumsum.out",), slower_than=1.5),
}


def self_test(
    names: Sequence[str],
    host: Host,
    report: Report,
    folder: Path | None,
    patience: float,
    verbose: bool,
    arguments: Mapping[str, Any],
) -> int:
    """Plant faults one after the other in engines with these arguments; return the exit status.

    Raises:
        DispatchError: a name is unknown.
    """
    wanted = [name for name in TESTS if host is Host.VLLM or not TESTS[name].compiled] if "all" in names else names
    for name in wanted:
        if name not in TESTS:
            raise DispatchError(f"no fault is called '{name}'; there are {', '.join(TESTS)}, and 'all'")
    place = folder or Path(tempfile.mkdtemp(prefix="fl-bisect-"))
    bases = Journal(place / "bases", {})  # one base for each kind of engine, shared by all faults
    models: dict[str, Path] = {}
    rows, found = [], []
    for name in wanted:
        test = TESTS[name]
        if test.family not in models:
            from ..checkpoints import build_checkpoint

            models[test.family] = build_checkpoint(test.family, place / test.family)
        report.say(f"\n{name}: {test.what}")
        result = _plant(
            name, test, host, models[test.family], place / name, report, bases, (patience, verbose), arguments
        )
        right = _right(name, test, result)
        said = "; ".join(map(sentence, result.blamed)) or "nothing is blamed"
        searched = f"{report.runs} runs, {report.starts} starts, {report.seconds:.0f} s"
        rows.append((name, test.what, said, f"{result.share:.2f}", searched, "right" if right else "wrong"))
        found.append({"name": name, "right": right, **report.as_data(result)})
    if report.quiet:
        print_json(found)
    else:
        columns = ("fault", "what is planted", "found", "yardsticks", "cost", "status")
        print_table("Planted faults", columns, rows)
    if folder is None:
        shutil.rmtree(place, ignore_errors=True)
    return int(any(row[-1] != "right" for row in rows))


def _plant(
    name: str,
    test: Planted,
    host: Host,
    model: Path,
    folder: Path,
    report: Report,
    bases: Journal,
    how: tuple[float, bool],
    arguments: Mapping[str, Any],
) -> Result:
    operators = LATENT if test.family == "deepseek_v2" else DENSE
    start = Start(host, str(model), not test.compiled, test.ranks, test.dtype, 0, dict(arguments))
    variables = {"VLLM_FL_PLUGIN_MODULES": PLUGIN, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if test.ranks == 1:
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # halves the time of a start
    fault = test.fault or name
    good, bad = {"prefer": "reference"}, planted.policy(fault, operators) if not test.aten else {}
    if test.aten:
        variables |= {"VLLM_FL_PLUGIN_MODULES": planted_aten.__name__, planted_aten.FAULT: fault}
        good, bad = planted_aten.policy(False), planted_aten.policy(True)
    case = Case(start, good, bad, variables=variables, slower_than=test.slower_than)
    journal = Journal(folder, case.header())
    engine = f"{host} {test.family} {test.dtype} {test.ranks} {test.compiled} {bool(test.aten)} {test.slower_than}"
    if journal.get("base") is None and (known := bases.get(engine)) is not None:
        journal.put("base", known)
    result = investigate(case, folder, report, patience=how[0], verbose=how[1], journal=journal)
    bases.put(engine, journal.get("base"))
    return result


def _right(name: str, test: Planted, result: Result) -> bool:
    """Whether the search found the planted fault."""
    if not test.op and not test.aten:
        return not result.differs
    if len(result.blamed) != 1 or not result.agrees:
        return False
    one = result.blamed[0]
    if test.aten:
        return {one.op, *one.partners} == {*test.aten}
    implementation = f"vendor.{planted.VENDOR}.{test.fault or name}"
    return one.op == test.op and one.implementations == (implementation,) and test.sites(one) and one.ranks == test.at

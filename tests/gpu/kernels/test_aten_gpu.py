"""ATen replacement by FlagGems on a GPU: right values, in graphs too; in an engine nothing is tuned after the start.

FlagGems runs the GPU's own kernels, but tries two configurations of each (``few_configurations``): of a product of
matrices on Hopper it would try 162 for each size, and compile them first. With ``ARCH=sm_80`` in the environment it
takes the kernels that are not Hopper's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import cache
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from few_configurations import few

from fl_dispatch.backends.flaggems import library
from fl_dispatch.backends.flaggems.aten import replacement
from fl_dispatch.devices import detect_device
from fl_dispatch.settings import Settings

if library.why_missing():
    pytest.skip(library.why_missing(), allow_module_level=True)

pytestmark = pytest.mark.gpu

CALLS: Mapping[str, Callable[..., Any]] = {
    "linear": lambda x, w, b, i: torch.nn.functional.linear(x, w),
    "linear with a bias": lambda x, w, b, i: torch.nn.functional.linear(x, w, b),
    "bmm": lambda x, w, b, i: torch.bmm(x.expand(3, -1, -1).contiguous(), w.T.expand(3, -1, -1)),
    "softmax": lambda x, w, b, i: torch.softmax(x, -1),
    "log_softmax": lambda x, w, b, i: torch.log_softmax(x, -1),
    "argmax": lambda x, w, b, i: torch.argmax(x.float(), -1),
    "embedding": lambda x, w, b, i: torch.nn.functional.embedding(i, w),
    "index": lambda x, w, b, i: w[i],
    "index_select": lambda x, w, b, i: w.index_select(0, i),
    "gather": lambda x, w, b, i: x.gather(1, i[:8, None]),
    "add": lambda x, w, b, i: x + 0.5,
    "mul": lambda x, w, b, i: x * x,
    "in place": lambda x, w, b, i: x.clone().mul_(2).add_(x),
    "silu": lambda x, w, b, i: torch.nn.functional.silu(x),
    "cat": lambda x, w, b, i: torch.cat([x, x], -1),
    "cumsum": lambda x, w, b, i: i.cumsum(0),
    "sort": lambda x, w, b, i: x.float().sort(-1)[0],
    "topk": lambda x, w, b, i: x.float().topk(4, -1)[0],
    "where": lambda x, w, b, i: torch.where(x > 0, x, -x),
    "masked_fill": lambda x, w, b, i: x.masked_fill(x > 0, float("-inf")),
    "mean": lambda x, w, b, i: x.float().pow(2).mean(-1, keepdim=True),
    "sum": lambda x, w, b, i: x.float().sum(),
    "layer_norm": lambda x, w, b, i: torch.nn.functional.layer_norm(x, (x.shape[1],)),
    "to": lambda x, w, b, i: x.to(torch.float32),
    "arange": lambda x, w, b, i: torch.arange(3, 99, 2, device=x.device),
    "zeros and fill": lambda x, w, b, i: torch.zeros_like(x).fill_(3),
    "copy": lambda x, w, b, i: torch.empty_like(x).copy_(x.T.contiguous().T),
    "cos": lambda x, w, b, i: x.cos(),
    "maximum": lambda x, w, b, i: torch.maximum(x, -x),
    "eq": lambda x, w, b, i: (i == 3) & (i >= 0),
    "index_put": lambda x, w, b, i: x.clone().index_put_((i[:4] % 8,), torch.ones_like(x[:4])),
}


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x, w, b = torch.randn(8, 64), torch.randn(96, 64), torch.randn(96)
    return *(t.to("cuda", dtype) for t in (x, w, b)), torch.arange(16, device="cuda") * 3 % 16


def close(found: Any, expected: Any) -> None:
    tolerance = 2e-2 if expected.dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def tuned_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """FlagGems keeps what it tunes in an empty folder; it reads the variable when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLAGGEMS_CACHE_DIR", str(tmp_path_factory.mktemp("flaggems")))
        patch.setattr(replacement, "gems", lambda: few(library.gems()))
        library.gems()
        yield


@pytest.fixture
def replaced(tuned_here: None) -> Iterator[Callable[..., None]]:
    def start(**settings: Any) -> None:
        assert replacement.replace(Settings.of(**settings), detect_device()) == ""

    with torch.inference_mode():
        yield start
    replacement.remove()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_with_everything_replaced_every_value_is_right(replaced: Callable[..., None], dtype: torch.dtype) -> None:
    arguments = inputs(dtype)
    expected = {name: call(*arguments) for name, call in CALLS.items()}
    replaced(aten_replacement=True)
    for name, call in CALLS.items():
        try:
            close(call(*arguments), expected[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    found = replacement.report()
    print(*(f"{key}: {found[key]}" for key in ("calls", "native", "declined", "wrong", "waits")), sep="\n")
    met = found["calls"].keys() | found["wrong"].keys() | found["declined"].keys()
    assert {"mm", "addmm", "_softmax", "embedding"} <= met
    assert found["calls"]["mm"] == 1
    assert len(found["calls"]) > len(found["wrong"]) + len(found["declined"])
    replacement.remove()
    close(CALLS["linear"](*arguments), expected["linear"])
    assert replacement.report()["calls"] == {}


def test_a_graph_holds_what_was_met_before_and_pytorchs_kernels_otherwise(replaced: Callable[..., None]) -> None:
    x, w, *_ = inputs(torch.bfloat16)
    expected = [x @ w.T, (2 * x) @ w.T, x[:4] @ w.T]
    replaced(flagos_whitelist=frozenset({"mm"}))
    torch.mm(x, w.T)
    before = replacement.report()["calls"]["mm"]
    graph, given = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        met, new = torch.mm(given, w.T), torch.mm(given[:4], w.T)
    assert (replacement.report()["calls"]["mm"], replacement.report()["native"]["mm"]) == (before + 1, 1)
    for factor in (1, 2):
        given.copy_(factor * x)
        graph.replay()
        close(met, expected[factor - 1])
    given.copy_(x)
    graph.replay()
    close(new, expected[2])


def test_once_sealed_no_new_kernel_is_compiled(replaced: Callable[..., None]) -> None:
    from triton import knobs

    x, w, *_ = inputs(torch.bfloat16)
    replaced(flagos_whitelist=frozenset({"mm", "softmax"}))
    torch.softmax(torch.mm(x, w.T), -1)
    replacement.seal()
    compiled: list[str] = []
    old = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **details: compiled.append(str(details.get("repr")))
    try:
        for rows in (8, 1, 3, 7, 100):
            torch.softmax(torch.mm(torch.ones(rows, 64, device="cuda", dtype=torch.bfloat16), w.T), -1)
    finally:
        knobs.runtime.jit_post_compile_hook = old
    assert compiled == []
    assert replacement.report()["native"] == {"_softmax": 4, "mm": 4}


# -- in an engine -----------------------------------------------------------------------------------------------------

GRAPHS = {"enforce_eager": False, "gpu_memory_utilization": 0.1}
EAGER = {"enforce_eager": True, "gpu_memory_utilization": 0.1}
OURS = {
    "VLLM_FL_DENY_VENDORS": "cuda",
    "VLLM_FL_PER_OP": "rms_norm=impl:default.triton;silu_and_mul=impl:default.triton",
}
ENGINES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, str], set[str]]] = {
    "products, graphs": (GRAPHS, {"VLLM_FL_FLAGOS_WHITELIST": "mm,bmm"}, {"mm", "mm.out"}),
    "all, graphs": (GRAPHS, {**OURS, "VLLM_FL_ATEN_REPLACEMENT": "1"}, {"mm", "embedding", "argmax"}),
    "all, eager": (EAGER, {**OURS, "VLLM_FL_ATEN_REPLACEMENT": "1"}, {"mm", "embedding", "argmax"}),
}
"""Name → arguments of ``LLM``, variables, and operators of which at least one must have run."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Callable[[], tuple[dict[str, Any], list[Any]]]]:
    """Every engine, started at once."""
    pytest.importorskip("vllm")
    from engines import STEP, expected_tokens, start

    from fl_dispatch.cli.checkpoints import build_checkpoint

    folder = tmp_path_factory.mktemp("aten")
    model = build_checkpoint("llama", folder / "llama")
    expected = cache(lambda: expected_tokens(model))

    def result(future: Future[dict[str, Any]]) -> Callable[[], tuple[dict[str, Any], list[Any]]]:
        return lambda: (future.result(), expected())

    started = {}
    for name, (engine, variables, _) in ENGINES.items():
        fixed = {
            "VLLM_FL_PLUGIN_MODULES": "few_configurations",
            "VLLM_FL_DENY_VENDORS": "cuda",
            "FLAGGEMS_CACHE_DIR": str(folder / name.replace(", ", "-")),
            "FLAGGEMS_ENABLE_OPLIST_PATH": str(folder / f"{name}.txt"),
        }
        future = start(model, STEP, STEP, engine=engine, variables={**fixed, **variables})
        started[name] = result(future)
    return started


@pytest.mark.parametrize("name", ENGINES)
def test_an_engines_tokens_equal_hugging_faces(
    name: str, runs: Mapping[str, Callable[[], tuple[dict[str, Any], list[Any]]]]
) -> None:
    result, expected = runs[name]()
    aten = result["report"]["aten"]["FlagGems"]
    print(name, {key: aten[key] for key in ("calls", "native", "declined", "wrong", "waits")}, len(aten["replaced"]))
    assert [step["tokens"] for step in result["steps"]] == [expected, expected]
    assert aten["calls"].keys() & ENGINES[name][2]
    assert aten["sealed"]
    assert "during inference: " not in result["log"]  # vLLM's monitor of late compilations
    manifest = result["report"]["manifest"]
    if manifest is not None:
        assert {f"aten::{key}" for key in aten["replaced"]} <= manifest["aten"].keys()

"""Rotations and the write of keys and values: compiled graphs call one operator for both.

No CPU has an implementation of that operator but the reference, so a plugin brings one.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import Runs, ran, start_compiled
from torch.fx import Graph, Node

from fl_dispatch import get_default_manager
from sampling import drawn

JOINED, ROTATION, WRITE = "rotary_embedding_kv_cache_write", "rotary_embedding", "kv_cache_write"
RIGHT = {"deny_vendors": ["wrong", "cpu"]}
"""One vendor has the rotation, the write, and both in one."""
ASKED = {"VLLM_FL_FUSE_ROPE_KVCACHE": "1"}
DENSE = "qwen3"
FAMILIES = (DENSE, *drawn(("llama_yarn", "phi3", "gemma3", "glm4_moe"), 1, "families whose rotations are joined"))
"""The others rotate part of a head, or have windows, or experts."""
LAYERS = 3
DISTINCT = 3
"""Compiled pieces: the first, the last, and those between two layers, which are equal."""
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "nobody asked": RIGHT,
    "pieces of the user's": RIGHT,
    "a rule for the write": {**RIGHT, "per_op_order": {WRITE: ["vendor", "reference"]}},
    "a rule for the rotation": {**RIGHT, "per_op_order": {ROTATION: ["reference"]}},
    "nothing but references": {"deny_vendors": ["wrong", "cpu", "joined"]},
}
APART = ("nobody asked", *drawn(tuple(POLICIES)[1:], 2, "rotations that stay apart"))
SWITCHED: Mapping[str, Mapping[str, Any]] = {
    "pieces of the user's": {"splitting_ops": ["vllm::unified_attention_with_output", "vllm::unified_kv_cache_update"]},
}


@pytest.fixture(scope="module")
def results(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    def engine(family: str, policy: Mapping[str, Any] = RIGHT, cache: str = "auto", **more: Any) -> dict[str, Any]:
        config = {"mode": "VLLM_COMPILE", "backend": "inductor", **more}
        arguments = {"enforce_eager": False, "compilation_config": config, "kv_cache_dtype": cache}
        return {"model": checkpoint(family), "engine": arguments, "policy": policy}

    engines = {
        **{family: engine(family) for family in FAMILIES},
        **{name: engine(DENSE, POLICIES[name], **SWITCHED.get(name, {})) for name in APART if name != "nobody asked"},
        "wrong": engine(DENSE, {"per_op_order": {JOINED: ["impl:vendor.wrong"]}}),
        "fp8": engine(DENSE, cache="fp8"),
    }
    plain = {"nobody asked": engine(DENSE), "fp8, apart": engine(DENSE, cache="fp8")}

    def start(engines: Mapping[str, Any], **variables: str) -> dict[str, Any]:
        variables = {"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("cache")), **variables}
        return start_compiled(engines, VLLM_FL_PLUGIN_MODULES="joined_plugin,wrong_plugin", **variables)

    return Runs({**start(engines, **ASKED), **start(plain)})


def calls(result: Mapping[str, Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for key, count in result["report"]["counts"].items():
        found[key.split(" ")[0]] += count
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_call_the_joined_operator_and_the_tokens_are_hugging_faces(
    family: str, results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    result = results[family]
    assert result["tokens"] == expected(family)
    assert ran(result, JOINED) == {"vendor.joined"}
    found = calls(result)
    assert found[JOINED] == found["paged_attention"] > 0
    assert not found[ROTATION]
    assert not found[WRITE]
    assert result["report"]["failed"] == {}
    assert result["report"]["compiled"]["rotations"] > 0


def test_equal_layers_are_compiled_once(results: Mapping[str, Any]) -> None:
    compiled = results[DENSE]["report"]["compiled"]
    assert (compiled["pieces"], compiled["distinct"]) == (LAYERS + 1, DISTINCT)


def test_a_wrong_joined_operator_is_in_the_graph(
    results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert ran(results["wrong"], JOINED) == {"vendor.wrong"}
    assert results["wrong"]["tokens"] != expected(DENSE)


def test_a_cache_in_fp8_gets_the_same_keys_and_values(results: Mapping[str, Any]) -> None:
    assert ran(results["fp8"], JOINED) == {"vendor.joined"}
    assert not ran(results["fp8, apart"], JOINED)
    assert results["fp8"]["tokens"] == results["fp8, apart"]["tokens"]


@pytest.mark.parametrize("name", APART)
def test_they_stay_apart_if_the_user_says_so_or_nothing_is_faster(
    name: str, results: Mapping[str, Any], expected: Callable[[str], list[list[int]]]
) -> None:
    assert not ran(results[name], JOINED)
    assert ran(results[name], WRITE)
    assert results[name]["tokens"] == expected(DENSE)


# -- configuration, without an engine ---------------------------------------------------------------------------------

MODEL = {"use_mla": False, "is_encoder_decoder": False, "hf_text_config": SimpleNamespace()}
REFUSALS: Mapping[str, Mapping[str, Any]] = {
    "nothing": {},
    "drafts": {"speculative_config": object()},
    "batches in two": {"parallel_config": SimpleNamespace(use_ubatching=True)},
    "latent attention": {"model_config": SimpleNamespace(**{**MODEL, "use_mla": True})},
    "an encoder": {"model_config": SimpleNamespace(**{**MODEL, "is_encoder_decoder": True})},
    "a shared cache": {
        "model_config": SimpleNamespace(**{**MODEL, "hf_text_config": SimpleNamespace(num_kv_shared_layers=2)})
    },
    "no model": {"model_config": None},
    "a cache in int8": {"cache_config": SimpleNamespace(cache_dtype="int8_per_token_head")},
}


@pytest.mark.parametrize(
    "refused",
    [
        *REFUSALS,
        "Inductor divides",
        "names are constants",
        "no graph holds the write",
        "another attention",
        "another backend",
    ],
)
def test_graphs_are_cut_at_the_write_unless_it_can_be_joined(
    refused: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.config import CompilationConfig
    from vllm.utils import torch_utils

    from vllm_fl.compilation import compile

    compilation = CompilationConfig(mode="VLLM_COMPILE", backend="inductor", cudagraph_mode="FULL")
    compilation.use_inductor_graph_partition = refused == "Inductor divides"
    config = SimpleNamespace(
        **{
            "compilation_config": compilation,
            "model_config": SimpleNamespace(**MODEL),
            "cache_config": SimpleNamespace(cache_dtype="auto"),
            "scheduler_config": SimpleNamespace(max_num_batched_tokens=8192),
            "parallel_config": SimpleNamespace(use_ubatching=False),
            "speculative_config": None,
            **REFUSALS.get(refused, {}),
        }
    )
    monkeypatch.setattr(compile, "joins", lambda joined, parts: True)
    monkeypatch.setattr(compile, "of_one_backend", lambda joined, parts: refused != "another backend")
    monkeypatch.setattr(
        compile, "without_graphs", lambda *_: [refused] if refused == "no graph holds the write" else []
    )
    monkeypatch.setattr(torch_utils, "_USE_LAYERNAME", refused != "names are constants")
    compile.join_rotations(config, own_attention=refused != "another attention")
    joined = refused == "nothing"
    assert bool(compilation.pass_config.fuse_rope_kvcache) == joined
    assert ("stay apart" in caplog.text) != joined
    assert (compilation.splitting_ops is None) != joined
    compilation.set_splitting_ops_for_v1("naive")
    assert (compile.WRITE in compilation.splitting_ops) == (not joined and refused != "Inductor divides")
    assert compile.LATENT_WRITE in compilation.splitting_ops or refused == "Inductor divides"
    assert set(compilation._attention_ops) <= set(compilation.splitting_ops)


# -- layers, without an engine ----------------------------------------------------------------------------------------


def layer(**options: Any) -> Any:
    from vllm_fl.attention.dense import AttentionFLImpl

    return AttentionFLImpl(4, 8, 0.5, 2, **options)


def test_a_layer_that_writes_no_keys_of_its_own_tokens_rotates_by_itself() -> None:
    from vllm.v1.attention.backend import AttentionType

    assert layer().fl_join()
    assert not layer(kv_sharing_target_layer_name="model.layers.0.self_attn.attn").fl_join()
    assert not layer(attn_type=AttentionType.ENCODER_ONLY).fl_join()
    assert not layer(attn_type=AttentionType.ENCODER_DECODER).fl_join()


def test_the_start_calls_the_operator_as_a_step_will() -> None:
    """A kernel is compiled for strides and places by their factors, so that these have to be alike."""
    impl, calls = layer(), []
    impl.fl_join()
    impl.fl_rotate_and_write = lambda *args, **_: calls.append(args) or (args[0], args[1])
    cache = torch.randn(4, 2, 16, 16)
    before = cache.clone()
    impl.fl_try(cache, [3], 16)
    assert calls == [], "no step has been rotated"

    parts = torch.randn(3, 64).split([32, 16, 16], -1)
    table = torch.randn(64, 6)
    given = [part.view(3, -1, 8) for part in parts]
    given += [*table.chunk(2, -1), torch.arange(3, dtype=torch.int32)]
    turned, _ = impl.rotate_and_cache(None, *given, False, cache, None)
    assert turned.shape == (3, 4, 8)
    impl.fl_try(cache, [3], 16)
    assert torch.equal(cache, before)
    (found,) = calls
    for one, other in zip(found, given, strict=False):
        assert (one.dtype, one.stride(), one.storage_offset()) == (other.dtype, other.stride(), other.storage_offset())
    assert found[8].tolist() == [-1, -1, -1]
    assert found[9:] == (False, None, None)


# -- graphs, without an engine ----------------------------------------------------------------------------------------

TOKENS, HEADS, KV_HEADS, SIZE = 5, 4, 2, 8


@pytest.fixture
def pieces() -> Iterator[Callable[..., tuple[Graph, bool]]]:
    """Makes a piece in which keys are rotated and written; the second result is whether both were joined."""
    import vllm.model_executor.layers.attention.attention  # noqa: F401  (defines the write)

    from fl_dispatch.compiled.views import view
    from fl_dispatch.ops import OPERATORS
    from vllm_fl.compilation import rotary_cache

    manager = get_default_manager()
    manager.ensure_initialized()
    before = manager.state.whole
    manager.keep_whole({ROTATION})
    view(manager.table_keeper.root, OPERATORS[ROTATION])
    rotary_cache._define()

    def joined(change: Callable[[Graph, Node, Node], tuple[Node, Node]]) -> tuple[Graph, bool]:
        graph = piece(change)
        found = rotary_cache.join(graph)
        graph.lint()
        return graph, bool(found)

    yield joined
    manager.keep_whole(before)


def piece(change: Callable[[Graph, Node, Node], tuple[Node, Node]]) -> Graph:
    """A graph; ``change`` has it, the rotated keys and the values, and returns what is written."""
    graph, width = Graph(), (HEADS + 2 * KV_HEADS) * SIZE
    names = {
        "projection": torch.empty(TOKENS, width, device="meta"),
        "cos": torch.empty(16, SIZE // 2, device="meta"),
        "sin": torch.empty(16, SIZE // 2, device="meta"),
        "positions": torch.empty(TOKENS, dtype=torch.int64, device="meta"),
        "layer": None,
    }
    given = {name: graph.placeholder(name) for name in names}
    for name, value in names.items():
        given[name].meta["val"] = value

    aten = torch.ops.aten
    query = call(graph, aten.slice.Tensor, given["projection"], 1, 0, HEADS * SIZE)
    key = call(graph, aten.slice.Tensor, given["projection"], 1, HEADS * SIZE, (HEADS + KV_HEADS) * SIZE)
    query, key = (call(graph, aten.view.default, one, [TOKENS, -1, SIZE]) for one in (query, key))
    tables = (given["cos"], given["sin"], given["positions"])
    rotation = graph.call_function(torch.ops.fl_dispatch.rotary_embedding.default, (query, key, *tables, False, ""))
    rotation.meta["val"] = (query.meta["val"], key.meta["val"])
    turned, turned_key = (call(graph, operator.getitem, rotation, place) for place in (0, 1))
    value = call(graph, aten.slice.Tensor, given["projection"], 1, (HEADS + KV_HEADS) * SIZE, width)
    written = change(graph, turned_key, call(graph, aten.view.default, value, [TOKENS, -1, SIZE]))
    write = graph.call_function(torch.ops.vllm.unified_kv_cache_update.default, (*written, given["layer"]))
    write.meta["val"] = torch.empty(0, device="meta")
    graph.output((turned, turned_key, write))
    return graph


def call(graph: Graph, target: Any, *args: Any) -> Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*(one.meta["val"] if isinstance(one, Node) else one for one in args))
    return node


def targets(graph: Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes}


def test_values_that_are_cut_out_behind_the_rotation_come_before_it(pieces: Callable[..., tuple[Graph, bool]]) -> None:
    graph, joined = pieces(lambda graph, key, value: (key, value))
    assert joined
    assert "vllm_fl.rotate_and_cache.default" in targets(graph)
    assert not {"fl_dispatch.rotary_embedding.default", "vllm.unified_kv_cache_update.default"} & targets(graph)


def test_keys_may_be_reshaped_in_between(pieces: Callable[..., tuple[Graph, bool]]) -> None:
    def there_and_back(graph: Graph, key: Node, value: Node) -> tuple[Node, Node]:
        flat = call(graph, torch.ops.aten.reshape.default, key, [TOKENS, KV_HEADS * SIZE])
        return call(graph, torch.ops.aten.view.default, flat, [TOKENS, KV_HEADS, SIZE]), value

    _, joined = pieces(there_and_back)
    assert joined


@pytest.mark.parametrize("other", ["other heads", "changed keys", "values made of keys", "other keys"])
def test_what_is_written_must_be_the_rotated_keys_and_values_that_do_not_need_them(
    other: str, pieces: Callable[..., tuple[Graph, bool]]
) -> None:
    def change(graph: Graph, key: Node, value: Node) -> tuple[Node, Node]:
        if other == "other heads":
            views = (call(graph, torch.ops.aten.view.default, one, [TOKENS, -1, 2 * SIZE]) for one in (key, value))
            return next(views), next(views)
        if other == "changed keys":
            return call(graph, torch.ops.aten.neg.default, key), value
        return (key, call(graph, torch.ops.aten.neg.default, key)) if other == "values made of keys" else (value, value)

    graph, joined = pieces(change)
    assert not joined
    assert "fl_dispatch.rotary_embedding.default" in targets(graph)

"""Every kind of rotation turns queries as Hugging Face does; a request has one table of LongRoPE for all its steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.rotary_embedding.factory import _ROPE_DICT, get_rope
from sglang.srt.model_executor.forward_batch_info import ForwardMode

import rope_kinds
from fl_dispatch.devices import CPU
from fl_dispatch.hosting.positions import configurations, rotary_tables
from positions import ROOM, Case, TextsAroundLimits
from rope_kinds import LONG, LONGEST, SIZE, TRAINED, Rotations, difference
from sampling import drawn
from sglang_fl.layers import classes, rotations
from sglang_fl.platform import refusals


def _runner(kind: str, length: int = LONGEST) -> Any:
    """The parts of a model runner with SGLang's layer for a kind, corrected as in a loaded model."""
    _ROPE_DICT.clear()  # SGLang's layers of this process, by their arguments
    text = rope_kinds.config(kind)
    stated = dict(text.rope_parameters)
    turned = int(SIZE * stated.get("partial_rotary_factor", 1.0))
    layer = get_rope(SIZE, turned, LONGEST, stated["rope_theta"], rope_scaling=stated, dtype=torch.float32)
    model = rope_kinds.placed(layer)
    classes.prepare(model)
    read = SimpleNamespace(hf_text_config=text, context_len=length, model_path="", revision=None)
    args = SimpleNamespace(json_model_override_args="{}")
    runner = SimpleNamespace(model=model, model_config=read, server_args=args)
    rotations.prepare(runner)
    return SimpleNamespace(layer=layer, **vars(runner))


class TestRotations(Rotations):
    def rotary(self, kind: str) -> Any:
        return _runner(kind).layer


@pytest.mark.parametrize("kind", LONG)
def test_rows_behind_the_first_table_are_those_of_long_texts(kind: str) -> None:
    runner = _runner(kind)
    assert rotations.SPLIT.of(runner) == TRAINED
    assert difference(runner.layer, kind, TRAINED) < 1e-4
    assert difference(runner.layer, kind, TRAINED + 1, TRAINED) < 1e-4
    assert difference(runner.layer, kind, LONGEST, TRAINED) < 1e-4


@pytest.mark.parametrize("kind", LONG)
def test_where_no_text_is_long_only_the_first_table_is_used(kind: str) -> None:
    runner = _runner(kind, TRAINED)
    assert rotations.SPLIT.find(runner) is None
    assert difference(runner.layer, kind, TRAINED) < 1e-4


def _request(name: str, tokens: int, new: int) -> Any:
    class Req(SimpleNamespace):
        __hash__ = object.__hash__

    sampling = SimpleNamespace(max_new_tokens=new)
    return Req(rid=name, origin_input_ids=[1] * tokens, sampling_params=sampling, extra_key=None)


@pytest.mark.parametrize(
    ("tokens", "new", "second"),
    [(TRAINED, 1, False), (TRAINED, 0, False), (TRAINED, 2, True), (TRAINED + 1, 1, True), (5, TRAINED, True)],
)
def test_a_request_that_may_grow_beyond_the_trained_length_has_the_second_table(
    tokens: int, new: int, second: bool
) -> None:
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=_runner("longrope")))
    request = _request("one", tokens, new)
    for _ in range(2):
        rotations.choose(lambda *_: None, scheduler, request)
    assert request.extra_key == ("longrope" if second else None)


@pytest.mark.parametrize(
    ("mode", "counts", "rows"),
    [
        (ForwardMode.EXTEND, [2, 3], [0, 1, TRAINED, TRAINED + 1, TRAINED + 2]),
        (ForwardMode.DECODE, None, [0, TRAINED + 1]),
    ],
)
def test_positions_of_its_tokens_are_moved_once(mode: ForwardMode, counts: list[int] | None, rows: list[int]) -> None:
    runner, long = _runner("longrope"), _request("long", LONGEST, 1)
    rotations.choose(lambda *_: None, SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner)), long)
    positions_of = torch.tensor([0, 1, 0, 1, 2] if counts else [0, 1])
    batch = SimpleNamespace(
        rids=["short", "long"], positions=positions_of, forward_mode=mode, extend_seq_lens_cpu=counts
    )
    for _ in range(2):
        rotations.shift(runner, batch)
    assert batch.positions.tolist() == rows


def test_dynamic_texts_beyond_the_trained_length_are_refused_before_weights_load() -> None:
    text = rope_kinds.config("dynamic")
    text.architectures = ["LlamaForCausalLM"]
    assert rotary_tables.limit(text) == LONGEST
    model = SimpleNamespace(
        hf_config=text,
        hf_text_config=text,
        context_len=2 * LONGEST,
        quantization=None,
        linear_attn_registry_result=None,
        head_dim=SIZE,
        model_path="model",
    )
    args = SimpleNamespace(json_model_override_args='{"rope_scaling": "given"}')
    runner = SimpleNamespace(model_config=model, server_args=args, is_draft_worker=False, use_mla_backend=False)
    with pytest.raises(ValueError, match=r"rope_type 'dynamic' .*give --context-length 128"):
        refusals.check_model(runner, CPU)


def test_fields_that_sglangs_own_configuration_drops_are_read_from_the_file(tmp_path: Path) -> None:
    """OLMo 3 of Transformers 5: SGLang's class finds no rotation below the names that it knows."""
    import transformers
    from sglang.srt.configs.olmo3 import Olmo3Config

    kinds = {"full_attention": {"rope_type": "default", "rope_theta": 7e5}}
    kinds["sliding_attention"] = dict(kinds["full_attention"])
    transformers.Olmo3Config(rope_parameters=kinds, num_hidden_layers=2).save_pretrained(tmp_path)
    host = Olmo3Config.from_pretrained(tmp_path)
    assert rotary_tables.rotation(host, 0) is None
    read = configurations.as_transformers_reads(host, str(tmp_path))
    rotation = rotary_tables.rotation(read, 0)
    assert rotation is not None
    assert float(rotation.inverse[1]) == pytest.approx(7e5 ** (-1 / rotation.inverse.shape[0]))


def test_layers_that_share_a_table_of_two_rotations_are_refused() -> None:
    from transformers import Gemma3TextConfig

    kinds = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
    types = ["sliding_attention", "full_attention"]
    text = Gemma3TextConfig(num_hidden_layers=2, head_dim=SIZE, layer_types=types, rope_parameters=kinds)
    layer = get_rope(SIZE, SIZE, LONGEST, 10000, dtype=torch.float32)
    shared = [(f"model.layers.{number}.self_attn.rotary_emb", layer) for number in range(2)]
    with pytest.raises(ValueError, match=r"layers.0.self_attn.rotary_emb and .* share one rotary table"):
        rotary_tables.correct(shared, text, LONGEST)


NAMES = drawn(
    ("longrope, phi3", "dynamic", "yarn, attention_factor", "yarn, factor below the length"),
    1,
    "rotations that SGLang misreads",
)


@pytest.mark.engine
class TestTexts(TextsAroundLimits):
    NAMES = NAMES

    def options(self, case: Case) -> Mapping[str, Any]:
        return {"context_length": max(case.lengths) + ROOM}

"""Several steps per scheduler call give the tokens of one step for each, whatever requests ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import Runs, start_features, unpacked
from several import ASKED, MOST, NEW, VARIABLES, Compared, alike, engines, whole

import variants
from fl_dispatch.hosting.pace import Pace
from fl_dispatch.settings import Settings
from sampling import drawn
from vllm_fl.compat import arrivals, versions
from vllm_fl.several_steps import choice

WAYS = {"StepsScheduler": {}, "AsyncStepsScheduler": {"VLLM_FL_PLUGIN_MODULES": "asynchronous_plugin"}}
"""Scheduler → the variables of engines that have it."""


@pytest.fixture(scope="module", params=drawn(tuple(WAYS), 1, "scheduler of several steps"))
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def compared(way: str, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """The same engines and requests, the last engine divided between two ranks."""
    folder = tmp_path_factory.mktemp("several")
    model = variants.with_characters(checkpoint("qwen3"), folder / "qwen3")
    runs = engines(model, variants.adapter(model, folder / "adapter", 1))
    runs.append((model, [ASKED["seeds"], {"do": "scheduler"}], {"tensor_parallel_size": 2}))
    variables = {**VARIABLES, **unpacked("0.33"), **WAYS[way]}
    steps = {"one": 1, "several": MOST}
    return Compared(
        Runs({name: start_features(*runs, VLLM_FL_STEPS=str(most), **variables) for name, most in steps.items()})
    )


@pytest.mark.parametrize("subject", ASKED)
def test_requests_get_what_single_steps_give_them(subject: str, compared: Compared) -> None:
    assert alike(*compared.named(subject))


def test_schedulings_made_several_steps_in_every_engine_and_rank(compared: Compared) -> None:
    for run, ranks in enumerate((1, 1, 2)):
        made = compared.made(run)
        assert len(made) == ranks
        assert all(each == made[0] for each in made)
        assert made[0][str(MOST)] > 0
    one, several = (compared.runs[name]["runs"][0]["report"] for name in ("one", "several"))
    assert (one["steps"], one["single_steps"]) == (None, "VLLM_FL_STEPS is 1")
    assert several["single_steps"] == ""


def test_the_host_warns_of_no_scheduler_that_its_user_did_not_name(compared: Compared) -> None:
    assert "a scheduler call makes up to 8 steps while all requests decode" in compared.runs["several"]["log"]
    assert "custom scheduler class" not in compared.runs["several"]["log"]


def test_a_scheduler_of_ours_gives_room_for_several_steps(way: str, compared: Compared) -> None:
    one, several = compared.steps(2, 1)
    assert (one, several) == (way.replace("Steps", ""), way)


def test_a_request_that_ends_early_has_no_token_behind_its_end(compared: Compared) -> None:
    _, several = compared.named("end tokens")
    lengths = [len(output["tokens"][0]) for output in several]
    assert min(lengths) < NEW
    assert [len(output["logprobs"][0]) for output in several] == lengths
    _, least = compared.named("a least length")
    assert all(len(output["tokens"][0]) >= 17 for output in least)


def test_requests_that_need_the_host_for_each_token_stop_where_single_steps_stop(compared: Compared) -> None:
    _, several = compared.named("stop strings")
    assert min(len(output["tokens"][0]) for output in several) < NEW
    assert all(len(output["texts"][0]) == 6 for output in compared.named("a grammar")[1])


def test_requests_arrive_and_are_aborted_between_schedulings(compared: Compared) -> None:
    one, several = (each["tokens"] for each in compared.steps(0, len(ASKED)))
    assert {name: tokens for name, tokens in several.items() if name != "request-1"} == {
        name: tokens for name, tokens in one.items() if name != "request-1"
    }
    longer, shorter = sorted((one["request-1"], several["request-1"]), key=len, reverse=True)
    assert longer[: len(shorter)] == shorter
    assert len(several["request-1"]) < NEW


def test_a_stream_has_the_same_tokens_in_fewer_pieces(compared: Compared) -> None:
    one, several = compared.steps(0, len(ASKED) + 1)
    assert whole(several) == whole(one)
    assert sum(map(len, several)) < sum(map(len, one))
    assert max(len(piece) for pieces in several for piece in pieces) == MOST


def test_a_stream_of_tool_calls_has_one_token_a_piece(compared: Compared) -> None:
    one, several = compared.steps(0, len(ASKED) + 5)
    assert several == one
    assert all(len(piece) == 1 for pieces in several for piece in pieces)


def test_metrics_count_tokens_and_no_drafts(compared: Compared) -> None:
    one, several = compared.steps(0, len(ASKED) + 2)
    assert abs(several["vllm:generation_tokens"] - one["vllm:generation_tokens"]) < NEW  # of the aborted request
    assert compared.steps(0, len(ASKED) + 3)[1] == {}


def test_requests_with_adapters_get_the_tokens_of_single_steps(compared: Compared) -> None:
    one, several = compared.steps(0, len(ASKED) + 4)
    assert alike(one, several)
    assert several[0]["tokens"] != compared.named("greedy")[1][0]["tokens"]


def test_preempted_requests_get_the_tokens_of_single_steps(compared: Compared) -> None:
    one, several = compared.steps(1, 0)
    assert [output["tokens"] for output in several] == [output["tokens"] for output in one]
    preempted = compared.steps(1, 1)
    assert all(counted["vllm:num_preemptions"] > 0 for counted in preempted)


def test_ranks_get_the_tokens_of_single_steps(compared: Compared) -> None:
    one, several = compared.steps(2, 0)
    assert [output["tokens"] for output in several] == [output["tokens"] for output in one]


# -- the choice -------------------------------------------------------------------------------------------------------


def _config(**given: Any) -> SimpleNamespace:
    """A configuration that can make several steps, but for what is given."""
    parts: dict[str, dict[str, Any]] = {
        "model_config": {
            "runner_type": "generate",
            "is_encoder_decoder": False,
            "is_hybrid": False,
            "is_attention_free": False,
            "hf_text_config": SimpleNamespace(),
            "uses_mrope": False,
            "supports_multimodal_inputs": False,
            "enable_prompt_embeds": False,
            "logits_processors": None,
        },
        "parallel_config": {
            "worker_cls": "vllm_fl.worker.cpu.CPUWorkerFL",
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "use_ubatching": False,
            "enable_eplb": False,
        },
        "structured_outputs_config": {"reasoning_parser": "qwen3"},
        "cache_config": {"kv_sharing_fast_prefill": False},
        "scheduler_config": {"scheduler_cls": None, "async_scheduling": True},
    }
    whole = {"speculative_config": None, "kv_transfer_config": None, "use_v2_model_runner": True}
    for name, value in given.items():
        part = next((part for part in parts.values() if name in part), whole)
        part[name] = value
    return SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in parts.items()}, **whole)


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "host_version", lambda: "0.33")
    monkeypatch.setattr(choice, "get_settings", Settings)
    monkeypatch.setattr(choice.model_runner, "choice", lambda config: SimpleNamespace(runner="V2", why=""))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, ""),
        ({"speculative_config": SimpleNamespace()}, "a draft already makes several tokens"),
        ({"scheduler_cls": "a.b"}, "scheduler_cls names another scheduler"),
        ({"worker_cls": "a.b"}, "worker_cls names another worker"),
        ({"runner_type": "pooling"}, "the model generates nothing"),
        ({"is_encoder_decoder": True}, "the model has an encoder and a decoder"),
        ({"is_hybrid": True}, "the model has layers that keep a state"),
        ({"hf_text_config": SimpleNamespace(index_topk=20)}, "the model has sparse latent attention"),
        ({"uses_mrope": True}, "positions have several axes"),
        ({"logits_processors": ["a"]}, "processors of logits may need the host for each token"),
        ({"pipeline_parallel_size": 2}, "pipeline stages hand over each step"),
        ({"data_parallel_size": 2}, "data-parallel ranks run each step together"),
        ({"reasoning_parser": "ernie45"}, "vLLM's parser 'ernie45' of reasoning reads a stream token by token"),
        ({"kv_transfer_config": SimpleNamespace()}, "a connector sees each step"),
    ],
)
def test_an_engine_that_cannot_make_several_steps_says_why(given: dict[str, Any], why: str, newest: None) -> None:
    assert choice.why_single(_config(**given)) == why  # type: ignore[arg-type]


def test_an_engine_that_vllm_does_not_tell_of_data_parallel_ranks_says_that_they_were_not_tried(newest: None) -> None:
    """vLLM makes dense engines of several ranks independent after the choice."""
    said = choice.describe(_config())  # type: ignore[arg-type]
    assert said == "a scheduler call makes one step, because data-parallel ranks were not tried"


def test_a_device_without_the_v2_runner_makes_single_steps(newest: None, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = SimpleNamespace(runner="V1", why="V2 does not run on Ascend NPU yet")
    monkeypatch.setattr(choice.model_runner, "choice", lambda config: chosen)
    why = choice.why_single(_config())  # type: ignore[arg-type]
    assert why == "the V1 model runner is taken (V2 does not run on Ascend NPU yet)"


def test_a_package_with_processors_of_logits_makes_single_steps(newest: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "entry_points", lambda group: [group])
    why = choice.why_single(_config())  # type: ignore[arg-type]
    assert why == "processors of logits may need the host for each token"


def test_a_plugin_that_is_switched_off_makes_single_steps(newest: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "get_settings", lambda: Settings.of(enabled=False))
    assert choice.why_single(_config()) == "VLLM_FL_PREFER_ENABLED is false"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "why"),
    [("0.32", "vLLM 0.32 is older than 0.33"), ("0.99", "vLLM 0.99 is not a tested version")],
)
def test_another_host_makes_single_steps(version: str, why: str, newest: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "host_version", lambda: version)
    assert choice.why_single(_config()) == why  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "given", "described", "said"),
    [
        (None, {}, "up to 8 steps", "INFO"),
        (4, {}, "up to 4 steps", "INFO"),
        (1, {}, "one step", ""),
        (None, {"data_parallel_size": 2}, "one step", ""),
        (4, {"data_parallel_size": 2}, "one step", "WARNING"),
    ],
)
def test_an_engine_makes_eight_steps_unless_its_user_says_otherwise_and_a_number_in_vain_is_a_warning(
    steps: int | None,
    given: dict[str, Any],
    described: str,
    said: str,
    newest: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(choice, "get_settings", lambda: Settings(steps=steps))
    monkeypatch.setattr(choice, "take_schedulers", lambda: None)
    monkeypatch.setattr(choice.arrivals, "mark_tools", lambda: None)
    config: Any = _config(**given)
    with caplog.at_level("INFO"):
        choice.adapt(config)
    assert described in choice.describe(config)
    assert [record.levelname for record in caplog.records] == [said] * bool(said)


@pytest.mark.parametrize(
    ("asked", "single"),
    [
        ({}, False),
        ({"logprobs": 20}, False),
        ({"logprobs": 128}, True),
        ({"logprobs": -1}, True),
        ({"stop": "a"}, True),
    ],
)
def test_a_request_with_stop_strings_or_scores_of_many_tokens_keeps_single_steps(
    asked: dict[str, Any], single: bool
) -> None:
    from vllm.sampling_params import SamplingParams

    from vllm_fl.several_steps.scheduler import _is_single

    sampling = SamplingParams(**asked)
    request: Any = SimpleNamespace(use_structured_output=False, resumable=False, sampling_params=sampling)
    assert _is_single(request) is single


@pytest.mark.parametrize(("waiting", "steps"), [(0, 8), (3, 2)])
def test_a_full_queue_limits_the_steps_to_the_request_that_ends_first(waiting: int, steps: int) -> None:
    """The next request takes its place at once; without a queue the request that ends last decides."""
    from vllm.sampling_params import SamplingParams

    from vllm_fl.several_steps.scheduler import StepsScheduler

    def running(left: int) -> SimpleNamespace:
        return SimpleNamespace(
            is_prefill_chunk=False, num_output_tokens=5, num_output_placeholders=0, num_computed_tokens=20,
            max_tokens=5 + left, use_structured_output=False, resumable=False, sampling_params=SamplingParams(),
        )  # fmt: skip

    limits = SimpleNamespace(max_num_batched_tokens=64, long_prefill_token_threshold=0)
    scheduler: Any = SimpleNamespace(
        running=[running(30), running(2)], max_num_running_reqs=2, get_request_counts=lambda: (2, waiting),
        scheduler_config=limits, max_num_scheduled_tokens=64, max_model_len=100, fl_most_steps=8,
        _has_blocks=lambda steps: True,
    )  # fmt: skip
    assert StepsScheduler._most_steps(scheduler) == steps


@pytest.mark.parametrize(("state", "steps"), [("DefaultModelState", MOST), ("another", 1)])
def test_a_model_class_with_a_state_of_its_own_makes_the_first_step_alone(state: str, steps: int) -> None:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    from vllm_fl.several_steps.runner import StepsRunner

    given = SchedulerOutput.make_empty()
    given.num_scheduled_tokens = {"a": MOST}
    given.scheduled_spec_decode_tokens = {"a": [-1] * (MOST - 1)}
    known = object.__new__(DefaultModelState)
    runner: Any = object.__new__(StepsRunner)
    runner.model_state = known if state == "DefaultModelState" else object()
    taken = runner.fl_take(given)
    assert (taken.num_scheduled_tokens, taken.scheduled_spec_decode_tokens) == ({"a": 1}, {})
    assert runner.fl_steps == steps


def test_the_steps_of_a_scheduling_fit_the_time_that_a_step_was_seen_to_take() -> None:
    times = iter((0.0, 0.010, 0.030, 0.110))
    pace = Pace(0.050, lambda: next(times))
    assert pace.fitting(8) == 1
    pace.begin(1)
    pace.begin(2)
    assert pace.fitting(8) == 5  # steps of 10 ms
    pace.begin(0)
    pace.begin(4)  # behind a scheduler call that is no measure
    assert pace.fitting(8) == 5
    assert pace.fitting(3) == 3


def test_a_scheduling_that_must_not_depend_on_time_makes_all_steps() -> None:
    pace = Pace(None, lambda: 0.0)
    assert pace.fitting(8) == 8
    pace.begin(8)
    pace.begin(8)
    assert pace.fitting(8) == 8


def test_an_arrival_is_noted_until_the_next_scheduling() -> None:
    arrivals.forget(has_room=True)
    assert not arrivals.has_come()
    arrivals.note()
    assert arrivals.has_come()
    arrivals.forget(has_room=True)
    assert not arrivals.has_come()


def test_an_arrival_that_could_not_begin_ends_no_steps() -> None:
    arrivals.forget(has_room=False)
    arrivals.note()
    assert not arrivals.has_come()


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("given", "marked"),
    [
        ({"stream": True, "tools": [TOOL]}, True),
        ({"stream": True, "tools": [TOOL], "tool_choice": "none"}, False),
        ({"stream": False, "tools": [TOOL]}, False),
        ({"stream": True}, False),
    ],
)
def test_a_server_marks_a_chat_that_streams_tool_calls(given: dict[str, Any], marked: bool) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    arrivals.mark_tools()
    request = ChatCompletionRequest.model_validate({**CHAT, **given, "vllm_xargs": {"of a user": 1}})
    sampling = request.to_sampling_params(8, {})
    assert arrivals.streams_tools(sampling) is marked
    assert request.vllm_xargs == {"of a user": 1}
    assert sampling.extra_args is not None
    assert sampling.extra_args["of a user"] == 1


def test_a_server_marks_a_response_that_streams_tool_calls() -> None:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    arrivals.mark_tools()
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}
    request = ResponsesRequest.model_validate({"input": "a", "stream": True, "tools": [tool]})
    assert arrivals.streams_tools(request.to_sampling_params(8, {}))


@pytest.mark.parametrize(
    ("stream", "context", "marked"),
    [
        (True, {"tools": [TOOL], "tool_choice": "auto"}, True),
        (True, {"tools": [TOOL], "tool_choice": "none"}, False),
        (False, {"tools": [TOOL], "tool_choice": "auto"}, False),
        (True, {"tools": None, "tool_choice": "none"}, False),
        (True, None, False),  # its user renders and parses
    ],
)
def test_a_server_of_tokens_marks_a_stream_whose_tool_calls_a_render_server_parses(
    stream: bool, context: dict[str, Any] | None, marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    server = pytest.importorskip(arrivals.TOKENS).ServingTokens
    monkeypatch.setattr(server, "serve_tokens", lambda self, request, raw_request: (request, raw_request))
    arrivals.mark_tools()
    sampling = SamplingParams(extra_args={"of a user": 1})
    parsed = context and SimpleNamespace(**context)
    request = SimpleNamespace(sampling_params=sampling, stream=stream, parse_context=parsed)
    assert server.serve_tokens(None, request, "raw") == (request, "raw")
    assert arrivals.streams_tools(sampling) is marked
    assert sampling.extra_args["of a user"] == 1


def test_a_server_in_rust_that_marks_no_stream_makes_single_steps(
    newest: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    why = choice.why_single(_config())  # type: ignore[arg-type]
    assert why == "vLLM's server in Rust does not say which streams call tools"

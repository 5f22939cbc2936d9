"""The demonstration: its first line, what it refuses, and an engine's error in one message."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import typer

from command import fl
from fl_dispatch.cli import small_model
from fl_dispatch.cli.demo import EMULATED_ENV, describe_device, judge, show_what_ran
from fl_dispatch.cli.demo.comparison import compare
from fl_dispatch.cli.demo.engines import Generated, Request
from fl_dispatch.cli.demo.progress import steps
from fl_dispatch.errors import DispatchError


def test_the_first_line_names_the_device_and_whether_it_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EMULATED_ENV, raising=False)
    assert describe_device().startswith("device: cpu (")
    assert "EMULATED" not in describe_device()
    monkeypatch.setenv(EMULATED_ENV, "an NPU, on the CPU")
    assert describe_device().endswith(", EMULATED: an NPU, on the CPU")


def test_an_engines_error_is_one_message_with_its_cause_and_the_end_of_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DispatchError) as caught, steps(tmp_path / "log", True, False) as step, step("starting"):
        lines = ["first line", *(f"line {number}" for number in range(40)), "(EngineCore) ValueError: wrong kernel"]
        os.write(1, "\n".join(lines).encode())
        raise RuntimeError("Engine core initialization failed")
    message = str(caught.value)
    assert message.startswith("starting failed: RuntimeError: Engine core initialization failed")
    assert "the last error in its log: ValueError: wrong kernel" in message
    assert "\n" not in message
    shown = capfd.readouterr().err
    assert "line 39" in shown
    assert "first line" not in shown


def test_an_error_of_ours_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(DispatchError) as caught, steps(tmp_path / "log", True, False) as step, step("starting"):
        raise DispatchError("take another family")
    assert str(caught.value) == "take another family"


@pytest.mark.parametrize(
    ("problems", "report", "problem"),
    [
        (["it differs"], {"failed": {}, "counts": {"rms_norm vendor.acme": 1}}, "it differs"),
        ([], {"failed": {"rms_norm": ["vendor.acme"]}, "counts": {"rms_norm vendor.acme": 1}}, "is banned"),
        ([], {"failed": {}, "counts": {}}, "no operator ran"),
    ],
)
def test_what_is_not_as_it_should_be_is_exit_code_1(
    problems: list[str], report: dict[str, dict[str, object]], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught:
        judge(problems, report)
    assert caught.value.exit_code == 1
    assert problem in capsys.readouterr().err


def test_a_good_result_ends_without_an_error() -> None:
    judge([], {"failed": {}, "counts": {"rms_norm vendor.acme": 1}})


@pytest.fixture(scope="module")
def greedy() -> tuple[Request, list[int], list[int]]:
    """The small model's request, the tokens of a prompt, and what Hugging Face's model goes on with."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_model.CHECKPOINT)
    network = AutoModelForCausalLM.from_pretrained(small_model.CHECKPOINT, dtype=torch.float32)
    prompt = tokenizer(small_model.PROMPTS[0]).input_ids
    output = network.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    return Request(small_model.CHECKPOINT, [small_model.PROMPTS[0]], 8), prompt, output[0, len(prompt) :].tolist()


def test_tokens_that_are_hugging_faces_are_right(greedy: tuple[Request, list[int], list[int]]) -> None:
    request, prompt, tokens = greedy
    right, said = compare("small", request, Generated([prompt], [tokens], [""], 1.0))
    assert right
    assert said == "tokens equal to Hugging Face's: yes"


@pytest.mark.parametrize("place", [0, 7])
def test_one_other_token_is_wrong(place: int, greedy: tuple[Request, list[int], list[int]]) -> None:
    request, prompt, tokens = greedy
    other = [token if index != place else 5 for index, token in enumerate(tokens)]
    right, said = compare("small", request, Generated([prompt], [other], [""], 1.0))
    assert not right
    assert said.endswith("NO")


def test_the_trained_model_has_one_head_size() -> None:
    done = fl("demo", "--family", "small", "--head-size", "64")
    assert done.returncode == 2
    assert "--head-size is for a model with random weights" in done.stderr


def test_sglang_cannot_be_asked_for_a_compiled_model() -> None:
    done = fl("demo", "--host", "sglang", "--compiled")
    assert done.returncode == 2
    assert "--compiled is for vLLM" in done.stderr


def test_doc_prints_a_declaration() -> None:
    done = fl("doc", "paged_attention")
    for line in (
        "out: is overwritten without being read",
        "Tolerance in float16: 0.0005 + 0.002 * |expected|.",
        "block_table",
    ):
        assert line in done.stdout
    assert "key_cache: is written in part" in fl("doc", "kv_cache_write").stdout


def test_doc_of_an_unknown_operator_is_one_error() -> None:
    done = fl("doc", "rms_nrom")
    assert (done.returncode, done.stderr.count("error:")) == (2, 1)


def test_each_reason_is_said_once_and_the_vendor_that_was_passed_over_has_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def entry(impl_id: str, kind: str, priority: int, status: str, reason: str) -> dict[str, object]:
        vendor = impl_id.split(".")[1] if kind == "vendor" else None
        fields = {"impl_id": impl_id, "kind": kind, "vendor": vendor, "priority": priority}
        return {**fields, "status": status, "reason": reason}

    considered = [
        entry("reference.torch", "reference", 50, "chosen", "first that can run"),
        entry("reference.invariant", "reference", 50, "skipped", "stands in for a faster one"),
        entry("default.triton", "flagos", 140, "skipped", "no Triton"),
        entry("vendor.cpu", "vendor", 100, "skipped", "not the CPU build"),
        entry("vendor.ascend", "vendor", 100, "skipped", "no torch_npu"),
    ]
    decision = {"order": ["flagos", "vendor", "reference"], "considered": considered}
    operators = ("rms_norm", "silu_and_mul", "rotary_embedding")
    counts = {f"{name} reference.torch": 3 for name in operators}
    show_what_ran({"pid": 1, "counts": counts, "decisions": dict.fromkeys(operators, decision)})
    shown = capsys.readouterr().out
    assert [shown.count(reason) for reason in ("first that can run", "no Triton", "not the CPU build")] == [1, 1, 1]
    assert "stands in for a faster one" not in shown
    assert "no torch_npu" not in shown  # another chip's
    (line,) = [line for line in shown.splitlines() if "not the CPU build" in line]
    assert "passed over" in line

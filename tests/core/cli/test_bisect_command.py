"""``fl bisect`` without an engine: one error for what is wrong, and what a person reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from command import fl
from fl_dispatch import DispatchError
from fl_dispatch.cli.bisect import huggingface
from fl_dispatch.cli.bisect.hosts import scores
from fl_dispatch.cli.bisect.report import Report, sentence
from fl_dispatch.cli.bisect.selftest import TESTS
from fl_dispatch.cli.checkpoints import build_checkpoint, build_tokenizer
from fl_dispatch.cli.engines import Answer, Prompt, Start
from fl_dispatch.cli.hosts import Host
from fl_dispatch.evidence.bisect import planted, planted_aten
from fl_dispatch.evidence.bisect.choices import Site
from fl_dispatch.evidence.bisect.findings import Blamed, Result
from fl_dispatch.evidence.bisect.probes import Outcome
from fl_dispatch.evidence.bisect.prompts import generated, rounds
from fl_dispatch.evidence.bisect.yardstick import Verdict, Yardstick


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's folder without weights: no engine starts here."""
    folder = tmp_path_factory.mktemp("model")
    config = {"model_type": "qwen3", "vocab_size": 512, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    build_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "name the checkpoint with --model"),
        (("--self-test", "one_shap"), "no fault is called 'one_shap'; there are one_shape"),
        (("--model", "MODEL", "--engine-arg", "seed"), "--engine-arg 'seed' is not KEY=VALUE"),
        (("--model", "MODEL", "--against", "missing.yaml"), "missing.yaml: config file not found"),
        (("--model", "MODEL", "--policy", "wrong.yaml"), "did you mean vendor?"),
        (("--model", "MODEL", "--prompts", "empty.txt"), "holds no prompt"),
        (("--model", "MODEL", "--prompts", "long.txt"), "prompt 2 has 90 tokens; from 2 to 56 fit"),
        (("--model", "MODEL", "--against", "huggingface", "--slower-than", "1.2"), "compares two policies"),
        (("--model", "nowhere/at-all"), "its configuration cannot be read"),
        (("--model", "MODEL", "--out", "no/folder/policy.yaml"), "there is no directory no/folder"),
    ],
)
def test_what_is_wrong_is_one_error_before_any_engine_starts(
    arguments: tuple[str, ...], problem: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.yaml").write_text("op_backends: {rms_norm: [vendr]}\n")
    Path("empty.txt").write_text("\n")
    Path("long.txt").write_text("one two three\n" + "chip " * 90 + "\n")
    done = fl("bisect", "--host", "vllm", *(str(model) if one == "MODEL" else one for one in arguments))
    assert done.returncode == 2
    assert problem in done.stderr.replace("\n", "")
    assert done.stderr.count("error:") == 1


def test_a_sentence_names_operator_implementation_layers_and_rank() -> None:
    site = Site("silu_and_mul", "model.layers.3.mlp.act_fn")
    one = Blamed("silu_and_mul", (site,), 32, ("vendor.acme",), ranks=(1,))
    assert sentence(one) == "silu_and_mul: vendor.acme in model.layers.3.mlp.act_fn, at rank 1 alone"
    many = tuple(Site("rms_norm", f"layers.{layer}") for layer in range(6))
    assert sentence(Blamed("rms_norm", many, 6, ("vendor.a",))) == "rms_norm: vendor.a in all 6 layers"
    assert sentence(Blamed("rms_norm", many, 9, ("vendor.a",))).endswith("layers.3 and 2 more")
    beside = Blamed("paged_attention", (site,), 2, ("vendor.a",), partners=("kv_cache_write",))
    assert sentence(beside).endswith("only beside the other choice of kv_cache_write")
    aten = Blamed("aten::cumsum.out", implementations=("chip.cumsum_out",), kinds=("int64", "2 of 9 calls"))
    assert sentence(aten) == "aten::cumsum.out: chip.cumsum_out (int64, 2 of 9 calls)"


def test_a_policy_that_is_not_slower_blames_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    Report(quiet=False).show(Result(False, 1.04, Yardstick(1e-6, 1e-7), slower_than=1.1), None)
    assert "The policy is not slower: 1.04 times the trusted policy's time." in capsys.readouterr().out


@pytest.mark.parametrize(("seconds", "judged"), [([0.5, 0.25], [0.75, 1.5, 2.25]), ([], [2.0] * 3)])
def test_seconds_are_the_ranks_processor_time_or_the_wall_clocks_where_that_says_nothing(
    seconds: list[float], judged: list[float]
) -> None:
    """The n-th round takes n times as long."""
    times = ([factor * second for second in seconds] for factor in (0, 1, 1, 3, 3, 6))

    class Engine:
        seconds = 2.0

        def generate(self, prompts: Sequence[Prompt]) -> list[Answer]:
            return [Answer([3], [], [{"3": 0.0}]) for _ in prompts]

        def processor(self) -> list[float]:
            return next(times)

    made = rounds([[1, 2, 3]], forced=1)
    rows, found = scores(Engine(), made)
    assert (rows.keys(), found) == ({"batch 0", "alone 0", "cached 0"}, judged)


def test_the_report_for_programs_is_json_that_every_parser_reads() -> None:
    report = Report(quiet=True)
    report.asked("everywhere", Outcome(Verdict.FAILS, 1e6, "", True, 1.0, "ended with 7"), False)
    data = report.as_data(Result(True, 1e6, Yardstick(0.1, 0.01), [Blamed("rms_norm", (Site("rms_norm", "a"),), 1)]))
    text = json.dumps(data, allow_nan=False)
    assert json.loads(text)["rows"][0]["verdict"] == "fails"
    assert json.loads(text)["blamed"][0]["sites"] == ["a"]


def test_every_planted_fault_is_in_the_self_test() -> None:
    assert {test.fault or name for name, test in TESTS.items()} == {*planted.FAULTS, *planted_aten.FAULTS}
    for name, test in TESTS.items():
        assert not test.op or test.op in planted.FAULTS[test.fault or name]
        assert {key.removeprefix("aten::") for key in test.aten} == {*planted_aten.FAULTS.get(test.fault or name, ())}


def test_an_engine_that_is_not_hugging_faces_model_is_said_before_anything_is_searched(tmp_path: Path) -> None:
    """The other model has the same weights and another epsilon, as a host that reads it wrongly would."""
    model, other = build_checkpoint("qwen3", tmp_path / "model"), build_checkpoint("qwen3", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.01}))
    requests = rounds(generated(400, 64, (7, 33)))
    start = Start(Host.VLLM, str(model), True, 1, "float32", 0, {})
    yardstick = Yardstick(1e-3, 1e-4)
    scores = {folder: huggingface._scores(str(folder), torch.float32, requests) for folder in (model, other)}
    assert huggingface.compare(start, requests, scores[model], yardstick) == 0
    with pytest.raises(DispatchError, match="no choice between implementations explains it"):
        huggingface.compare(start, requests, scores[other], yardstick)

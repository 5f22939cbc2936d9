"""``--json`` means one thing: the command prints one JSON document on standard output, and nothing else there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from command import fl
from fl_dispatch.cli import app

COMMANDS = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
WITHOUT = {"doc", "new-backend", "p2p-proxy"}
"""Commands that have nothing for programs: a page, a package, a server."""
SHORT = ("--op", "silu_and_mul", "--impl", "reference.torch", "--dtype", "float32")
RUNS: dict[str, tuple[str, ...]] = {
    "ops": (),
    "explain": ("silu_and_mul",),
    "doctor": (),
    "verify": (*SHORT, "--quick"),
    "bench": (*SHORT, "--tokens", "2", "--hidden", "64", "--seconds", "0.001"),
    "prove": ("CANDIDATES", "--dtype", "float32", "--against", "reference.torch"),
    "report": ("--no-runs", "--out", "page.html"),
    "tune": ("--model", "MODEL", "--op", "silu_and_mul", "--max-batch", "1", "--prefill", "8", "--repeats", "1"),
}
ENGINES = {"demo", "perplexity", "bisect"}
"""Commands that start an engine; their own tests read what ``--json`` prints."""
ONCE_FILES = ("verify", "bench", "perplexity")


def test_every_command_has_the_same_option_or_nothing_for_programs() -> None:
    found = {name: option for name, command in COMMANDS.items() for option in command.params if "--json" in option.opts}
    assert set(found) == set(COMMANDS) - WITHOUT == set(RUNS) | ENGINES
    assert {option.is_flag for option in found.values()} == {True}
    assert len({option.help for option in found.values()}) == 1


@pytest.mark.parametrize("command", RUNS)
def test_standard_output_is_one_document_and_nothing_else(command: str, tmp_path: Path) -> None:
    model = tmp_path / "config.json"
    model.write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "vocab_size": 128,
            }
        )
    )
    (tmp_path / "one.py").write_text("def silu_and_mul(x):\n    return x.clone()\n")
    places = {"MODEL": str(model), "CANDIDATES": str(tmp_path), "page.html": str(tmp_path / "page.html")}
    arguments = [places.get(one, one) for one in RUNS[command]]
    if command == "tune":
        arguments += ["--out", str(tmp_path / "tuned.yaml"), "--eager"]
    done = fl(command, *arguments, "--json")
    assert json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("command", ONCE_FILES)
def test_a_file_after_the_option_is_refused_with_what_to_write(command: str) -> None:
    for given in (("--json", "x.json"), ("--json=x.json",)):
        done = fl(command, *given)
        assert done.returncode == 2
        assert done.stdout == ""
        said = "--json takes no value, but got 'x.json': it prints the results on standard output; --out x.json writes"
        assert said in " ".join(done.stderr.split())
    assert "it prints the results on standard output\n" in fl(command, "--json", "-").stderr


def test_a_file_and_standard_output_get_the_same_results(tmp_path: Path) -> None:
    file = tmp_path / "verified.json"
    done = fl("verify", *RUNS["verify"], "--json", "--out", str(file))
    assert json.loads(done.stdout) == json.loads(file.read_text())

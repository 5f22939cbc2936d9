"""Small models with each kind of window, rotation and attention field, and texts around each limit.

``python tests/scenarios/positions.py vllm`` (or ``sglang``) prints a table of the largest difference from Hugging Face.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "support"))

from architectures import ARCHITECTURES
from fl_dispatch.cli.checkpoints import VOCABULARY, write_checkpoint
from host_engines import Engine, Host, Pass, Scenario, Served
from running import reference_network

WINDOW = 8
LENGTHS = (5, WINDOW, WINDOW + 1, 30, 100)
"""Lengths around the window; the last one is longer than a step of 64 tokens."""
ORIGINAL, LONGEST = 80, 160
"""Trained length of a scaled rotation, and its extended length."""
ROOM = 10
"""Smallest number of tokens that SGLang reserves after a text within an engine's length."""
ROTATED = (10, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, ORIGINAL + 2, LONGEST - ROOM)
"""Lengths around the trained length; longer texts are read in steps of 64 tokens."""
FACTORS: Mapping[str, Any] = {
    "short_factor": [1.0 + 0.1 * number for number in range(8)],
    "long_factor": [2.0 + 0.3 * number for number in range(8)],
}


@dataclass(frozen=True)
class Case:
    """One model.

    Args:
        kind: a key of ``ARCHITECTURES``, or a class of Transformers' configurations.
        fields: fields of the configuration.
        lengths: lengths of the texts.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    lengths: Sequence[int] = LENGTHS


def _rope(kind: str, **fields: Any) -> Case:
    parameters = {"rope_theta": 10000.0, "rope_type": kind, **fields}
    return Case("LlamaConfig", {"max_position_embeddings": LONGEST, "rope_parameters": parameters}, ROTATED)


def _windowed(kind: str, **fields: Any) -> Case:
    return Case(kind, {"sliding_window": WINDOW, **fields})


_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_TRAINED = {"original_max_position_embeddings": ORIGINAL}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **_TRAINED}
CASES: Mapping[str, Case] = {
    "mistral": _windowed("MistralConfig"),
    "mistral, no window": _windowed("MistralConfig", sliding_window=None),
    "mixtral": _windowed("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "phi3": _windowed("Phi3Config"),
    "starcoder2": _windowed("Starcoder2Config"),
    "llama, field unread": _windowed("LlamaConfig"),
    "qwen2, use_sliding_window": _windowed("Qwen2Config", use_sliding_window=True, max_window_layers=1),
    "qwen2, use_sliding_window false": _windowed("Qwen2Config", use_sliding_window=False, max_window_layers=1),
    "qwen2, layer_types": _windowed("Qwen2Config", use_sliding_window=True, layer_types=_MIXED),
    "qwen3, use_sliding_window": _windowed("Qwen3Config", use_sliding_window=True, max_window_layers=0),
    "qwen3, layer_types": _windowed("Qwen3Config", use_sliding_window=True, layer_types=_MIXED),
    "qwen3_moe, use_sliding_window": _windowed(
        "Qwen3MoeConfig",
        use_sliding_window=True,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
    ),
    "qwen2_moe, layer_types": _windowed(
        "Qwen2MoeConfig",
        use_sliding_window=True,
        layer_types=_MIXED,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=64,
    ),
    "gemma2": _windowed("Gemma2Config", tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh"),
    "gemma2, soft caps": _windowed(
        "Gemma2Config",
        tie_word_embeddings=True,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
        query_pre_attn_scalar=64,
        hidden_act="gelu_pytorch_tanh",
    ),
    "gemma3": _windowed("Gemma3TextConfig", tie_word_embeddings=True, layer_types=_MIXED, query_pre_attn_scalar=64),
    "gemma3, a rotation for each kind of layer": _windowed(
        "Gemma3TextConfig",
        tie_word_embeddings=True,
        layer_types=_MIXED,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
    ),
    "gemma3n": Case("gemma3n", {"sliding_window": WINDOW}),
    "cohere2": _windowed("Cohere2Config", tie_word_embeddings=True, layer_types=_MIXED, logit_scale=4.0),
    "olmo3": _windowed("Olmo3Config", layer_types=_MIXED),
    "exaone4": _windowed("Exaone4Config", layer_types=_MIXED),
    "gpt_oss, sinks": _windowed("GptOssConfig", layer_types=_MIXED, num_local_experts=4, num_experts_per_tok=2),
    "smollm3, no_rope_layers": _windowed("SmolLM3Config", sliding_window=None, no_rope_layers=[1, 0, 1]),
    "granite, attention_multiplier": Case("GraniteConfig", {"attention_multiplier": 0.4}),
    "olmo, clip_qkv": Case("OlmoConfig", {"clip_qkv": 0.5}),
    "llama4, attention_chunk_size": Case(
        "Llama4TextConfig",
        {
            "attention_chunk_size": 32,
            "no_rope_layers": [1, 1, 0],
            "attn_temperature_tuning": True,
            "floor_scale": 16,
            "intermediate_size_mlp": 160,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
        },
    ),
    "llama, attention_bias": Case("LlamaConfig", {"attention_bias": True}),
    "qwen3, attention_bias": Case("Qwen3Config", {"attention_bias": True}),
    "default": _rope("default"),
    "default, partial": Case("stablelm", {"max_position_embeddings": LONGEST}, ROTATED),
    "linear": _rope("linear", factor=2.0),
    "dynamic": Case(
        "LlamaConfig",
        {
            "max_position_embeddings": ORIGINAL,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0},
        },
        (10, 40, ORIGINAL - ROOM),
    ),
    "yarn": _rope("yarn", factor=2.0, **_TRAINED),
    "yarn, attention_factor": _rope("yarn", factor=2.0, attention_factor=1.5, **_TRAINED),
    "yarn, mscale": _rope("yarn", factor=2.0, mscale=1.0, mscale_all_dim=0.5, **_TRAINED),
    "yarn, mscale_all_dim 0": _rope("yarn", factor=2.0, mscale=0.7, mscale_all_dim=0, **_TRAINED),
    "yarn, truncate": _rope("yarn", factor=2.0, truncate=False, **_TRAINED),
    "yarn, factor below the length": _rope("yarn", factor=1.5, **_TRAINED),
    "yarn, mistral's window": Case(
        "MistralConfig",
        {
            "sliding_window": WINDOW,
            "max_position_embeddings": LONGEST,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 2.0, **_TRAINED},
        },
        ROTATED,
    ),
    "yarn, mixtral": Case(
        "MixtralConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": LONGEST,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 2.0, **_TRAINED},
        },
        ROTATED,
    ),
    "llama3": _rope("llama3", factor=8.0, **_LLAMA3),
    "longrope": _rope("longrope", **FACTORS, **_TRAINED),
    "longrope, attention_factor": _rope("longrope", attention_factor=1.5, **FACTORS, **_TRAINED),
    "longrope, factor": _rope("longrope", factor=8.0, **FACTORS, **_TRAINED),
    "longrope, phi3": Case(
        "Phi3Config",
        {
            "max_position_embeddings": LONGEST,
            "original_max_position_embeddings": ORIGINAL,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "longrope", **FACTORS},
        },
        ROTATED,
    ),
}
"""Name → case. "field unread" sets a field that Transformers' class lacks, so its model has no window."""

_SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}


def prompts(case: Case) -> list[list[int]]:
    """Return texts with a case's lengths, as token ids; no two begin alike."""
    return [
        [(31 * row + 7 * place * place + 3 * place) % 400 + 5 for place in range(length)]
        for row, length in enumerate(case.lengths)
    ]


def build(case: Case, path: Path) -> Path:
    """Write the case's checkpoint."""
    import transformers

    kind, shape = ARCHITECTURES.get(case.kind, (case.kind, _SHAPE))
    return write_checkpoint(getattr(transformers, kind)(**{**shape, **case.fields}), path)


def expected(model: Path, texts: Sequence[list[int]], host: str) -> list[Tensor]:
    """Return Hugging Face's log-probabilities of each text's tokens after the first, ``[tokens - 1]``."""
    network = reference_network(model, torch.float32, host)
    found = []
    for text in texts:
        with torch.no_grad():
            scores = network(torch.tensor([text])).logits[0].log_softmax(-1)
        found.append(scores[torch.arange(len(text) - 1), torch.tensor(text[1:])])
    return found


def ask(
    host: Host, cases: Mapping[str, Path], options: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Future[Served]]:
    """Start an engine for each case; return name → future of its answers.

    Args:
        cases: name → the checkpoint.
        options: name → further arguments of the host's engine.
    """
    asked = {name: Pass(prompts(CASES[name]), max_tokens=1, scores=True) for name in cases}
    engines = (Engine(path, [asked[name]], options[name]) for name, path in cases.items())
    return dict(zip(cases, host.serve(*engines), strict=True))


def differences(host: Host, name: str, model: Path, served: Served) -> list[float]:
    """Return the largest difference of a log-probability from Hugging Face's, for each text of a case."""
    rows = [torch.tensor(row[:-1]) for row in served.answers[0].rows]  # without the generated token
    right = expected(model, prompts(CASES[name]), host.name)
    return [float((row - want).abs().max()) for row, want in zip(rows, right, strict=True)]


class TextsAroundLimits(Scenario):
    """Texts around a limit of a model's positions score as in Hugging Face."""

    NAMES: ClassVar[Sequence[str]]

    def cases(self) -> Mapping[str, Sequence[Any]]:
        return {"name": self.NAMES}

    def options(self, case: Case) -> Mapping[str, Any]:
        """Further arguments of the host's engine."""
        return {}

    @pytest.fixture(scope="class")
    def models(self, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
        root = tmp_path_factory.mktemp("positions")
        return {name: build(CASES[name], root / name.replace(" ", "_")) for name in self.NAMES}

    @pytest.fixture(scope="class")
    def served(self, host: Host, models: Mapping[str, Path]) -> Mapping[str, Future[Served]]:
        return ask(host, models, {name: self.options(CASES[name]) for name in self.NAMES})

    def test_texts_around_a_limit_score_as_in_hugging_face(
        self, name: str, host: Host, models: Mapping[str, Path], served: Mapping[str, Future[Served]]
    ) -> None:
        assert max(differences(host, name, models[name], served[name].result())) < 1e-3


OPTIONS: Mapping[str, Callable[[int], Mapping[str, Any]]] = {
    "vllm": lambda longest: {"max_model_len": longest, "max_num_batched_tokens": 64},
    "sglang": lambda longest: {"context_length": longest, "chunked_prefill_size": 64},
}
"""Host → its engine's arguments for the length of the longest text."""


def main(named: str, names: Sequence[str]) -> None:
    sys.path.append(str(Path(__file__).parents[1] / named))
    host: Host = importlib.import_module(f"{named}_host").HOST
    with tempfile.TemporaryDirectory() as folder:
        for name in names or CASES:
            row = _row(host, name, Path(folder) / name.replace(" ", "_"))
            print(f"| {name} |", " | ".join(row), "|", flush=True)


def _row(host: Host, name: str, path: Path) -> list[str]:
    lengths = CASES[name].lengths
    try:
        model = build(CASES[name], path)
        started = ask(host, {name: model}, {name: OPTIONS[host.name](max(lengths) + ROOM)})
        found = differences(host, name, model, started[name].result())
    except Exception as error:
        lines = [line for line in str(error).splitlines() if "Error" in line]
        return [lines[-1] if lines else repr(error)]
    return [f"{length}: {value:.1e}" for length, value in zip(lengths, found, strict=True)]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

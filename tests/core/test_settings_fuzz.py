"""Whatever a file or the environment holds, the answer is ``Settings`` or ``ConfigError``.

``FL_FUZZ_EXAMPLES`` sets the number of examples.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fl_dispatch import config
from fl_dispatch.errors import ConfigError
from fl_dispatch.settings import ITEMS, Settings, load_settings

fuzz = settings(
    max_examples=int(os.environ.get("FL_FUZZ_EXAMPLES", "300")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

KEYS = [item.yaml_key for item in ITEMS if item.yaml_key] + ["prefre", "coffee", "<<", ""]
NAMES = [variable.name for item in ITEMS for variable in item.variables] + ["VLLM_FL_COFFEE", "VLLM_FL_PREFFER"]
WORDS = [
    *(
        "flagos",
        "vendor",
        "reference",
        "vendor:cuda",
        "vendor:",
        "impl:x",
        "impl:",
        "rms_norm",
        "rms_norm@a.*",
        "@",
        "mm",
    ),
    *("silu_and_mull", "RMSNorm", "cuda", "cudaa", "bfloat16", "decode", "when", "order", "tokens", "dtype", "phase"),
    *("rms_norm=vendor|flagos;mul=x", "a=;b", "1", "true", "no", "DEBUG", "cpu", "", " ", ",", "/", "..", "a.b:c"),
]
SYNTAX = [
    *("[]{}:,-?&*!|>'\"%@`#\t~=\x00\ufeff\n"),
    *("\n", "\n  ", ": ", "- ", "---", "...", "&a ", "*a", "!!int ", "!!bool ", "!!python/name:os.system "),
    *("0x", "1_0", "0b", "12:30:45", ".inf", "2020-13-45", "<<"),
]

words = st.sampled_from(WORDS) | st.text(max_size=12)
scalars = words | st.none() | st.booleans() | st.integers() | st.floats() | st.dates() | st.binary(max_size=4)
data = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=8
)
documents = st.dictionaries(st.sampled_from(KEYS) | words, data, max_size=4)
orders = st.dictionaries(words, st.lists(words, max_size=3), max_size=3)
near_documents = st.fixed_dictionaries(
    {},
    optional={
        "prefer": words,
        "strict": st.booleans(),
        "allow_vendors": st.lists(words, max_size=3),
        "op_backends": orders,
        "op_tuned": st.dictionaries(
            words,
            st.lists(
                st.fixed_dictionaries(
                    {"order": st.lists(words, max_size=2)},
                    optional={
                        "when": st.fixed_dictionaries(
                            {},
                            optional={
                                "dtype": words,
                                "tokens": st.lists(st.integers() | st.none(), max_size=3),
                                "phase": words,
                            },
                        )
                    },
                ),
                max_size=3,
            ),
            max_size=2,
        ),
        "flagos_blacklist": st.lists(words, max_size=3),
        "oot_blacklist": st.lists(words, max_size=3),
    },
)


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "detect_platform", lambda: None)


def is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def check(environ: dict[str, str]) -> None:
    try:
        found = load_settings(environ)
    except ConfigError as error:
        problem = str(error)
    else:
        assert isinstance(found, Settings)
        assert Settings.from_json(found.to_json()) == found
        assert hash(found) is not None
        problem = " ".join(str(found.origin(item.field)) for item in ITEMS)
    assert 0 < len(problem) < 2000


def check_file(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    check({"VLLM_FL_CONFIG": str(path)})
    check({"VLLM_FL_OP_CONFIG": str(path)})


@fuzz
@given(environ=st.dictionaries(st.sampled_from(NAMES), words, max_size=4))
def test_any_environment(environ: dict[str, str]) -> None:
    check(environ)


@fuzz
@given(text=st.text(alphabet=st.characters(), max_size=30), name=st.sampled_from(NAMES))
def test_any_text_in_a_variable(text: str, name: str) -> None:
    check({name: text})


@fuzz
@given(document=documents | near_documents)
def test_any_yaml_document(document: dict[str, Any], tmp_path: Path) -> None:
    check_file(tmp_path / "x.yaml", yaml.safe_dump(document, allow_unicode=True).encode(errors="surrogatepass"))


@fuzz
@given(document=orders | data.filter(is_json))
def test_any_json_document(document: Any, tmp_path: Path) -> None:
    check_file(tmp_path / "x.json", json.dumps(document).encode())


@fuzz
@given(text=st.lists(st.sampled_from(WORDS + KEYS + SYNTAX) | st.text(max_size=3), max_size=30).map("".join))
def test_any_yaml_text(text: str, tmp_path: Path) -> None:
    check_file(tmp_path / "x.yaml", text.encode(errors="surrogatepass"))


@fuzz
@given(content=st.binary(max_size=60))
def test_any_bytes_in_a_file(content: bytes, tmp_path: Path) -> None:
    check_file(tmp_path / "x.yaml", content)

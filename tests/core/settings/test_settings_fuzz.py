"""Whatever a file or the environment holds, the answer is ``Settings`` or ``ConfigError``.

``make test`` runs 1,500 examples that the commit draws, ``make test-all`` 12,000 random ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import sampling
from fl_dispatch.errors import ConfigError
from fl_dispatch.ops import OPERATORS
from fl_dispatch.settings import ITEMS, Settings, TunedRule, load_settings, platforms
from fl_dispatch.settings.place import printable

fuzz = sampling.fuzz(150, 1200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

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
    monkeypatch.setattr(platforms, "detect_platform", lambda: None)


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
        check_that_nothing_was_dropped(environ, found)
        problem = " ".join(str(found.origin(item.field)) for item in ITEMS)
    assert 0 < len(problem) < 2000
    assert problem.isprintable()


def check_that_nothing_was_dropped(environ: dict[str, str], found: Settings) -> None:
    """Every variable that is set, and every key of the file, is the origin of its item: no silent default."""
    path = environ.get("VLLM_FL_CONFIG", "").strip()
    keys = set(yaml.safe_load(Path(path).read_bytes().decode("utf-8-sig")) or {}) if path else set()
    assert keys <= {item.yaml_key for item in ITEMS}
    for item in ITEMS:
        source = found.origin(item.field).source
        given = next((variable.name for variable in item.variables if environ.get(variable.name, "").strip()), None)
        if path and item.yaml_key is not None:
            wanted = f"{printable(path)}, line " if item.yaml_key in keys else "default"
        else:
            wanted = "default" if given is None else f"environment variable {given}"
        assert source.startswith(wanted) or (wanted == "default" and "(platform)" in source), item.field


def check_file(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    check({"VLLM_FL_CONFIG": str(path)})
    check({"VLLM_FL_OP_CONFIG": str(path)})


# ---- settings that are right, as text in the environment and in a file, and what they must become

operators = st.sampled_from([*OPERATORS, "zq_custom"])
layers = st.sampled_from(["model.layers.3.*", "model.layers.30.input_layernorm", "*"])
vendors = st.sampled_from(["cuda", "cpu", "ascend", "vendor_zq", "Zq-2"])
tokens = st.sampled_from(["flagos", "vendor", "reference", "impl:default.triton", "vendor:cuda", "vendor:zq"])
right_orders = st.lists(tokens, min_size=1, max_size=4).map(tuple)
op_keys = operators | st.tuples(operators, layers).map("@".join)
aten = st.sampled_from(["mm", "to_copy", "zeros", "mm.out", "rms_norm", "silu_and_mul"])
bounds = st.tuples(st.integers(0, 9), st.none() | st.integers(9, 9999))
conditions = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["bfloat16", "float16", "float32"]),
        "tokens": bounds,
        "phase": st.sampled_from(["prefill", "decode"]),
    },
).filter(bool)
rules = st.builds(
    lambda whens, orders, last: (
        *(TunedRule(order=order, **when) for when, order in zip(whens, orders, strict=False)),
        TunedRule(order=last),
    ),
    st.lists(conditions, max_size=2),
    st.lists(right_orders, min_size=2, max_size=2),
    right_orders,
)
names = st.frozensets
values: dict[str, Any] = {
    "prefer": st.sampled_from(["flagos", "vendor", "reference"]),
    "strict": st.booleans(),
    "per_op_order": st.dictionaries(op_keys, right_orders, min_size=1, max_size=3).map(lambda d: tuple(d.items())),
    "op_tuned": st.dictionaries(op_keys, rules, min_size=1, max_size=2).map(lambda d: tuple(d.items())),
    "allow_vendors": names(vendors, max_size=3),
    "deny_vendors": names(vendors, max_size=3),
    "flagos_blacklist": names(aten, max_size=4),
    "aten_replacement": st.booleans(),
    "aten_blacklist": names(st.sampled_from(["mm", "mm.out", "aten::cumsum.out", "log_", "*"]), max_size=3),
    "chip_features": st.booleans(),
    "oot_blacklist": names(st.sampled_from(["RMSNorm", "rms_norm", "SiluAndMul", "fused_moe"]), max_size=3),
}
others: dict[str, Any] = {
    "enabled": st.booleans(),
    "use_flaggems": st.booleans(),
    "oot_enabled": st.booleans(),
    "native_platform": st.booleans(),
    "fuse_rope_kvcache": st.booleans(),
    "fuse_one_token": st.booleans(),
    "seal_tactics": st.booleans(),
    "mxfp4_as_fp8": st.booleans(),
    "steps": st.integers(1, 64),
    "steps_ms": st.floats(0, 1e4),
    "dispatch_debug": st.booleans(),
    "batch_invariant": st.booleans(),
    "log_level": st.sampled_from(["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]),
    "plugin_modules": st.lists(st.sampled_from(["a", "a.b", "a.b:c"]), min_size=1, max_size=3).map(tuple),
    "page_out": st.sampled_from(["/var/tmp", "relative"]).map(Path),
    "flagcx_path": st.sampled_from(["/opt/x", "relative", "/o p t/ü"]).map(Path),
    "oplist_path": st.sampled_from(["/tmp/list.txt", "list"]).map(Path),
    "platform": st.sampled_from(["cpu", "ascend"]),  # those whose file has no rules
}
BY_FIELD = {item.field: item for item in ITEMS}


def as_text(value: Any) -> str:
    """A value as somebody writes it in a variable."""
    if isinstance(value, bool):
        return "yes" if value else "off"
    if isinstance(value, frozenset) or (isinstance(value, tuple) and isinstance(value[0], str)):
        return " , ".join(value)
    if isinstance(value, tuple):
        return " ; ".join(f"{key} = {'|'.join(order)}" for key, order in value)
    return f" {value} "


def as_yaml(value: Any) -> Any:
    """A value as plain data for a YAML file."""
    if isinstance(value, TunedRule):
        when = {name: getattr(value, name) for name in ("dtype", "tokens", "phase")}
        when = {name: as_yaml(part) for name, part in when.items() if part is not None}
        return {"order": list(value.order), **({"when": when} if when else {})}
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return {key: as_yaml(part) for key, part in value}
    return [as_yaml(part) for part in value] if isinstance(value, tuple | frozenset) else value


@fuzz
@given(wanted=st.fixed_dictionaries({}, optional={k: v for k, v in (values | others).items() if k != "op_tuned"}))
def test_right_variables_become_exactly_what_they_say(wanted: dict[str, Any]) -> None:
    wanted = {field: value for field, value in wanted.items() if value != frozenset()}
    environ = {BY_FIELD[field].variables[0].name: as_text(value) for field, value in wanted.items()}
    found = load_settings(environ)
    assert found == Settings.of(**wanted, platform_file=found.platform_file)
    for field in wanted:
        assert str(found.origin(field)) == f"environment variable {BY_FIELD[field].variables[0].name}"


@fuzz
@given(
    wanted=st.fixed_dictionaries({}, optional=values),
    flow=st.booleans(),
    gaps=st.lists(
        st.sampled_from(["", "\n", "# a comment\n", "\r\n", "   \n"]), min_size=len(values), max_size=len(values)
    ),
    data=st.data(),
)
def test_a_right_file_becomes_exactly_what_it_says_with_its_lines(
    wanted: dict[str, Any], flow: bool, gaps: list[str], data: Any, tmp_path: Path
) -> None:
    text, lines = "", {}
    for field, gap in zip(data.draw(st.permutations(list(wanted))), gaps, strict=False):
        text += gap
        lines[field] = text.count("\n") + 1
        part = yaml.safe_dump({BY_FIELD[field].yaml_key: as_yaml(wanted[field])}, default_flow_style=flow, width=999)
        text += part[1:-2] + "\n" if flow else part
    path = tmp_path / "x.yaml"
    path.write_bytes(text.encode())
    found = load_settings({"VLLM_FL_CONFIG": str(path)})
    assert dict(found.policy.per_op_order) == dict(wanted.get("per_op_order", ()))
    assert dict(found.policy.op_tuned) == dict(wanted.get("op_tuned", ()))
    for field in values:
        if field not in ("per_op_order", "op_tuned"):
            assert found.value(field) == wanted.get(field, Settings().value(field))
        if field in wanted:
            assert str(found.origin(field)) == f"{path}, line {lines[field]}"


mutations = st.tuples(st.integers(0, 40), st.integers(0, 2), st.text(max_size=2))


def mutated(text: str, changes: list[tuple[int, int, str]]) -> str:
    """The text with some characters replaced."""
    for at, length, new in changes:
        text = text[:at] + new + text[at + length :]
    return text


@fuzz
@given(data=st.data(), changes=st.lists(mutations, min_size=1, max_size=3))
def test_a_nearly_right_variable(data: Any, changes: list[tuple[int, int, str]]) -> None:
    field = data.draw(st.sampled_from([field for field in values | others if field != "op_tuned"]))
    text = mutated(as_text(data.draw((values | others)[field])), changes)
    check({BY_FIELD[field].variables[0].name: text})


@fuzz
@given(wanted=st.fixed_dictionaries({}, optional=values), changes=st.lists(mutations, min_size=1, max_size=3))
def test_a_nearly_right_file(wanted: dict[str, Any], changes: list[tuple[int, int, str]], tmp_path: Path) -> None:
    document = {BY_FIELD[field].yaml_key: as_yaml(value) for field, value in wanted.items()}
    text = mutated(yaml.safe_dump(document, width=999), changes)
    check_file(tmp_path / "x.yaml", text.encode(errors="surrogatepass"))


# ---- anything


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

"""Configuration written by somebody who means harm, or by an accident that looks like it: one clear error, in bounded
time and memory, and nothing of it runs."""

from __future__ import annotations

import contextlib
import os
import pwd
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_dispatch.errors import ConfigError
from fl_dispatch.settings import Settings, load_config_file, load_settings, platforms
from fl_dispatch.settings.document import MAX_BYTES
from storm import fork_and_wait

SECONDS, MIB = 10.0, 200  # of this process's own time and memory, for one file of the largest accepted size
NOBODY = 65534


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "detect_platform", lambda: None)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Neither much time nor much memory."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert time.process_time() - started < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MIB << 10


def refused(match: str, /, **environ: str) -> str:
    """The message of the one error; it has no line breaks, and nothing that a terminal would obey."""
    with bounded(), pytest.raises(ConfigError, match=match) as caught:
        load_settings(environ)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def fill(start: str, part: str, end: str = "") -> str:
    """A file of the largest accepted size."""
    return start + part * ((MAX_BYTES - len(start) - len(end)) // len(part)) + end


# ---- what a file may hold

LAUGHS = "b0: &b0 [x]\n" + "".join(f"b{n + 1}: &b{n + 1} [{', '.join([f'*b{n}'] * 9)}]\n" for n in range(9))
YAML = {
    "an alias": ("prefer: &a flagos\nlog: *a\n", r"line 2: is not valid YAML: aliases are not allowed"),
    "aliases that explode": (LAUGHS, "aliases are not allowed"),
    "an alias to itself": ("op_backends: &a {rms_norm: *a}\n", "aliases are not allowed"),
    "a merge key": ("<<: {prefer: vendor}\n", "line 1: "),
    "a merge key further in": ("op_backends: {<<: {rms_norm: [vendor]}}\n", "line 1: op_backends"),
    "two documents": ("prefer: vendor\n---\nprefer: flagos\n", "line 2: is not valid YAML: but found another document"),
    "a key twice": ("prefer: vendor\nprefer: vendor\n", "line 2: prefer: is there twice"),
    "one key twice, written otherwise": ('prefer: vendor\n"prefer": flagos\n', "line 2: prefer: is there twice"),
    "a complex key": ("? [a]\n: vendor\n", "a key must be a string"),
    "lists inside lists": (fill("a: ", "["), "nested too deeply"),
    "mappings inside mappings": (fill("", "{a: "), "nested too deeply"),
    "an indented tower": ("".join(" " * depth + "a:\n" for depth in range(700)), "nested too deeply"),
    "a list of many": (fill("allow_vendors: [", "1,", "]"), "line 1: is not valid YAML: more than 20000 keys"),
    "many lines": (fill("", "prefer: flagos\n"), "line 10000: is not valid YAML: more than 20000 keys"),
    "a list of some": (f"allow_vendors: [{'1,' * 9999}]\n", r"allow_vendors\[0\]: must be a string, not 1"),
    "a long integer": (fill("prefer: ", "9"), "the number is too long"),
    "a long octal": (fill("prefer: 0", "7"), "the number is too long"),
    "a long sexagesimal": (fill("prefer: 1", ":1"), "the number is too long"),
    "a large integer": ("op_tuned: {a: [{order: [vendor], when: {tokens: [1, 99999999999999999999]}}]}\n", "too large"),
    "a long key": (fill('? "', "r", '"\n: [vendor]\n'), "unknown key"),
    "not a number": ("op_tuned: {a: [{order: [vendor], when: {tokens: [.nan, .inf]}}]}\n", "tokens"),
    "a NUL": ("prefer: vendor\0\n", "special characters are not allowed"),
    "a lone surrogate": ('prefer: "\\ud800"\n', "line 1: prefer: Invalid prefer value"),
    "a terminal's escape": ('"\\e[31mred\\n": 1\n', r"line 1: .x1b\[31mred.n: unknown key"),
    "a date": ("prefer: 2020-01-01\n", "quote it"),
    "binary": ("prefer: !!binary aGk=\n", "not allowed|quote it"),
    "a set": ("allow_vendors: !!set {cuda}\n", "not allowed"),
    "an own tag": ("prefer: !vendor vendor\n", "quote it|not allowed"),
    "a list at the top": ("- prefer: vendor\n", "must be a mapping of settings"),
    "a word at the top": ("vendor\n", "must be a mapping of settings"),
    "a directive": ("%YAML 9.9\n---\nprefer: vendor\n", "found incompatible YAML document"),
    "no value": ("prefer:\n", "has no value"),
    "tabs": ("op_backends:\n\trms_norm: [vendor]\n", "cannot start any token"),
    "words of shell": ("prefer: $(touch pwned)\n", "Invalid prefer value"),
}


@pytest.mark.parametrize("what", YAML)
def test_a_hostile_yaml_file_is_one_error_in_bounded_time_and_memory(what: str, tmp_path: Path) -> None:
    text, match = YAML[what]
    (tmp_path / "x.yaml").write_bytes(text.encode())
    refused(match, VLLM_FL_CONFIG=str(tmp_path / "x.yaml"))


CODE = [
    '!!python/object/apply:os.system ["touch {path}"]',
    '!!python/object/new:os.system ["touch {path}"]',
    "!!python/object/apply:builtins.open ['{path}', 'w']",
    "!!python/name:os.system",
    "!!python/module:antigravity",
    "!!python/object:fl_dispatch.settings.Settings {{}}",
    "!!python/tuple [1, 2]",
]


@pytest.mark.parametrize("place", ["prefer: {code}\n", "{code}\n", "op_backends:\n  a: {code}\n", "? {code}\n: a\n"])
@pytest.mark.parametrize("code", CODE)
def test_a_yaml_tag_runs_nothing(code: str, place: str, tmp_path: Path) -> None:
    canary = tmp_path / "pwned"
    (tmp_path / "x.yaml").write_text(place.format(code=code.format(path=canary)))
    refused(r"x\.yaml", VLLM_FL_CONFIG=str(tmp_path / "x.yaml"))
    assert not canary.exists()


def test_the_canary_of_the_test_above_works(tmp_path: Path) -> None:
    yaml.unsafe_load(CODE[0].format(path=tmp_path / "pwned"))
    assert (tmp_path / "pwned").exists()


JSON = {
    "a key twice": ('{"rms_norm": ["vendor"], "rms_norm": ["flagos"]}', "has a key twice"),
    "lists inside lists": (fill("", "["), "recursion"),
    "mappings inside mappings": (fill("", '{"a":'), "recursion"),
    "a list of many": (fill('{"rms_norm": [', '"vendr",', '"vendor"]}'), r"\[0\]: unknown token 'vendr'"),
    "a long integer": (fill('{"rms_norm": ', "9", "}"), "cannot be read"),
    "not a number": ('{"rms_norm": NaN}', "must be a list, not nan"),
    "a comment": ('{"rms_norm": ["vendor"]} // why', "line 1: is not valid JSON"),
    "two values": ("{} {}", "is not valid JSON"),
    "nothing": ("", "is not valid JSON"),
    "a NUL": ('{"rms_norm": ["ven\0dor"]}', "is not valid JSON"),
    "a lone surrogate": (r'{"rms_norm": ["\ud800"]}', "unknown token"),
    "a list at the top": ('["vendor"]', "must be a mapping"),
    "a word at the top": ('"vendor"', "must be a mapping"),
    "null": ("null", "must be a mapping"),
}


@pytest.mark.parametrize("what", JSON)
def test_a_hostile_json_file_is_one_error_in_bounded_time_and_memory(what: str, tmp_path: Path) -> None:
    text, match = JSON[what]
    (tmp_path / "x.json").write_text(text)
    refused(match, VLLM_FL_OP_CONFIG=str(tmp_path / "x.json"))


@pytest.mark.parametrize("key", ["allow_vendors", "flagos_blacklist", "oot_blacklist"])
def test_a_list_of_very_many_unknown_names_takes_bounded_time(key: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(f"{key}: [{','.join(f'zq{n:05d}' for n in range(4000))}]\n")
    with bounded():
        found = load_config_file(tmp_path / "x.yaml")
    assert found != Settings()


@pytest.mark.parametrize("key", ["VLLM_FL_CONFIG", "VLLM_FL_OP_CONFIG"])
@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("prefer: vendor\n".encode("utf-16"), "is not UTF-8"),
        ("prefer: vendor\n".encode("utf-32"), "is not UTF-8"),
        (b"prefer: \xff\xfe\n", "is not UTF-8"),
        (b"prefer: caf\xe9\n", "is not UTF-8"),
        (b"\xed\xa0\x80: 1\n", "is not UTF-8"),
    ],
    ids=["UTF-16", "UTF-32", "no text", "latin-1", "an encoded surrogate"],
)
def test_a_file_in_another_encoding_is_refused(key: str, content: bytes, match: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    refused(match, **{key: str(tmp_path / "x")})


@pytest.mark.parametrize("text", ["\ufeffprefer: vendor\n", "prefer: vendor\r\n", "--- \nprefer: vendor\n...\n"])
def test_what_editors_write_is_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(text.encode())
    assert load_settings({"VLLM_FL_CONFIG": str(tmp_path / "x.yaml")}).policy.prefer == "vendor"


# ---- what a path may name


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def make_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(100 << 20)


def make_ring(path: Path) -> None:
    path.symlink_to(path.with_name("y"))
    path.with_name("y").symlink_to(path)


PATHS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a directory": (Path.mkdir, "is a directory"),
    "a FIFO that nobody writes to": (make_fifo, "is not a regular file"),
    "a socket": (make_socket, "cannot be read|is not a regular file"),
    "100 MB": (make_sparse, f"is larger than {MAX_BYTES} bytes"),
    "a ring of links": (make_ring, "cannot be read: .*Too many levels of symbolic links"),
    "a link to nothing": (lambda path: path.symlink_to("gone"), "config file not found"),
    "a link to a directory": (lambda path: path.symlink_to("."), "is a directory"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
    "nothing": (lambda path: None, "config file not found"),
}


@pytest.mark.parametrize("variable", ["VLLM_FL_CONFIG", "VLLM_FL_OP_CONFIG"])
@pytest.mark.parametrize("what", PATHS)
def test_a_path_that_names_no_ordinary_file_is_refused_and_nothing_hangs(
    what: str, variable: str, tmp_path: Path
) -> None:
    make, match = PATHS[what]
    make(tmp_path / "x")
    refused(match, **{variable: str(tmp_path / "x")})


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/full", "/dev/null", "/dev/random", "/dev/tty", "/proc/self/mem"])
def test_a_device_is_refused(path: str) -> None:
    refused("is not a regular file|cannot be read", VLLM_FL_CONFIG=path)


def test_a_fifo_with_a_writer_is_refused_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")

    def write() -> None:
        with contextlib.suppress(BrokenPipeError):  # the reader may look and leave
            (tmp_path / "x").write_text("prefer: vendor\n")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        refused("is not a regular file", VLLM_FL_CONFIG=str(tmp_path / "x"))
    finally:
        reader = os.open(tmp_path / "x", os.O_RDONLY | os.O_NONBLOCK)  # the writer may still wait for one, or be gone
        thread.join(10)
        os.close(reader)
    assert not thread.is_alive()


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    """As another user, because root may read anything."""
    path = tmp_path / "x.yaml"
    path.write_text("prefer: vendor\n")
    path.chmod(0)

    def child() -> bool:
        if os.getuid() == 0:
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        try:
            load_settings({"VLLM_FL_CONFIG": str(path)})
        except ConfigError as error:
            return "Permission denied" in str(error)
        return False

    assert fork_and_wait(child) == 0


def test_a_file_that_is_replaced_while_it_is_read_is_one_of_the_two(tmp_path: Path) -> None:
    stop = threading.Event()
    path = tmp_path / "x.yaml"
    path.write_text("prefer: vendor\nstrict: true\n")

    def replace() -> None:
        while not stop.is_set():
            for text in ("prefer: reference\nstrict: false\n", "prefer: vendor\nstrict: true\n"):
                (tmp_path / "new").write_text(text)
                os.replace(tmp_path / "new", path)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        seen = {(found.prefer, found.strict) for found in (load_config_file(path).policy for _ in range(300))}
    finally:
        stop.set()
        thread.join(10)
    assert seen <= {("vendor", True), ("reference", False)}


# ---- what a variable may hold


def test_a_home_directory_that_does_not_exist_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    refused("there is no home directory; write the whole path", VLLM_FL_CONFIG="~/x.yaml")


@pytest.mark.parametrize("text", [";", ";;", " ; ;"])
def test_orders_that_name_nothing_are_refused(text: str) -> None:
    refused("names nothing; unset the variable", VLLM_FL_PER_OP=text)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("USE_FLAGEMS", "USE_FLAGGEMS"),
        ("USE_FLAG_GEMS", "USE_FLAGGEMS"),
        ("use_flaggems", "USE_FLAGGEMS"),
        ("FLAGCX_PATHS", "FLAGCX_PATH"),
        ("FLAGGEMS_ENABLE_OPLIST_PAHT", "FLAGGEMS_ENABLE_OPLIST_PATH"),
    ],
)
def test_a_near_miss_of_a_variable_without_our_prefix_is_refused(name: str, meant: str) -> None:
    refused(f"{name}: has no effect; did you mean {meant}", **{name: "0"})


@pytest.mark.parametrize("name", ["USE_FLAGS", "FLAGCX_DEBUG", "FLAGGEMS_CACHE_DIR", "FLAGCX_LIB_PATH", "PATH", "HOME"])
def test_other_programs_variables_are_left_alone(name: str) -> None:
    assert load_settings({name: "x"}) == Settings()


@pytest.mark.parametrize(
    "name", ["VLLM_FL_PER_OP", "VLLM_FL_ALLOW_VENDORS", "VLLM_FL_FLAGOS_BLACKLIST", "VLLM_FL_OOT_WHITELIST"]
)
def test_a_very_long_variable_takes_bounded_time(name: str) -> None:
    names = [f"zq{n:05d}" for n in range(4000)]
    text = ";".join(f"{name}=vendor" for name in names) if name == "VLLM_FL_PER_OP" else ",".join(names)
    with bounded():
        assert load_settings({name: text}) != Settings()


@pytest.mark.parametrize("name", ["VLLM_FL_PREFER", "VLLM_FL_STRICT", "VLLM_FL_PER_OP", "VLLM_FL_CONFIG"])
def test_an_error_is_one_line_whatever_the_value_holds(name: str) -> None:
    refused(
        "config file not found" if name == "VLLM_FL_CONFIG" else name, **{name: "a\nERROR forged\x1b[2J\u202e\udcff=|;"}
    )

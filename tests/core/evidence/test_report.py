"""The report: each section shows its files' figures and where they are from, safely, and loads nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_files import BENCHED, FILES, MACHINE, RECORD, SERVED, TUNED

from command import fl
from fl_dispatch.errors import DispatchError
from fl_dispatch.evidence.report import build, files, render
from fl_dispatch.evidence.report.page import Part
from fl_dispatch.evidence.report.svg import Interval, Line, intervals, lines
from fl_dispatch.hosting.records import runs

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
RESULTS = Path(__file__).parents[3] / "benchmarks/results"
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;{{ 7 * 7 }}"


class Page(HTMLParser):
    """The elements and texts of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def named(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attributes for name, attributes in self.elements if name == tag)


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., list[Path]]:
    def write(**files: Any) -> list[Path]:
        for name, data in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(data))
        return [tmp_path / f"{name}.json" for name in files]

    return write


def page(*paths: Path, **options: Any) -> str:
    return render(build(paths, **options))


def test_every_section_shows_its_files_figures(written: Callable[..., list[Path]]) -> None:
    html = page(*written(**FILES))
    for figure in (
        *("3 elements were not written", "0.25 of the tolerance", "its library is missing"),
        *("12.0 to 13.0", "0.875", "declined", "4,100 GB/s"),
        *("10.00 to 11.00", "compiles after the start"),
        *("231.8", "1.095 to 1.107", "1.049", "1.010 to 1.080"),
        *("47.1250", "47.0000", "2.7e-03", "6,861 tokens of held_out.txt"),
    ):
        assert figure in html, figure


def test_every_section_says_where_its_figures_are_from(written: Callable[..., list[Path]]) -> None:
    text = " ".join(" ".join(Page(page(*written(**FILES))).texts).split())
    assert "From verify.json , 2026-11-23, a chip, torch 2.13.0." in text
    assert "From serve.json , a chip, vllm 0.32.0." in text


def test_a_section_without_data_says_which_command_fills_it() -> None:
    html = page(with_runs=False)
    for command in ("fl verify", "fl bench", "fl tune", "fl perplexity", "VLLM_FL_SHADOW_SHARE", "serve_vllm.py"):
        assert command in html


def test_the_choices_of_this_machine_are_those_of_explain() -> None:
    html = page(with_runs=False)
    assert "reference.torch" in html
    assert "flag_gems is not installed" in html


def test_workers_are_shown_by_their_records_and_what_shadow_mode_found_in_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runs, "user_state_path", lambda name: tmp_path)
    runs.folder().mkdir()
    (runs.folder() / "1.json").write_text(json.dumps(RECORD))
    (runs.folder() / "2.json").write_text("{")
    (runs.folder() / "3.json").write_text(json.dumps({**RECORD, "pid": 3, "layers": "of another version"}))
    html = page()
    for text in (
        "RMSNorm 13 (rms_norm)",
        "Mystery 2",
        "has ended",
        "no kernel",
        "41.5",
        "1.5 instead of 1.0",
        "banned",
    ):
        assert text in html, text
    assert "of another version" not in html
    assert "a-model" not in page(with_runs=False)
    assert "41.5" in page(runs.folder() / "1.json", with_runs=False)


def recorded(folder: Path, **used_by: list[str]) -> list[Part]:
    """The parts of workers, each with the operators that its model calls; all have choices for three."""
    chosen = RECORD["choices"]["decisions"]["rms_norm"]
    decisions = dict.fromkeys(("linear", "rms_norm", "silu_and_mul"), chosen)
    for name, used in used_by.items():
        record = {**RECORD, "pid": int(name[1:]), "choices": {"decisions": decisions, "used": used}}
        (folder / f"{name}.json").write_text(json.dumps(record))
    (section,) = (one for one in build([folder], with_runs=False).sections if one.anchor == "selected")
    return [part for part in section.parts if part.title.startswith("Process")]


def test_a_worker_shows_only_the_operators_that_its_model_calls(tmp_path: Path) -> None:
    (part,) = recorded(tmp_path, w1=["linear", "rms_norm"])
    assert [[cell.text for cell in row] for row in part.tables[0].rows] == [
        ["vendor.acme", "vendor", "first", "linear, rms_norm"]
    ]
    assert {row[0].text for table in part.tables[1:] for row in table.rows} == {"linear", "rms_norm"}


def test_workers_with_the_same_choices_are_shown_once(tmp_path: Path) -> None:
    parts = recorded(tmp_path, w1=["linear"], w2=["linear"], w3=["rms_norm"])
    assert sorted(part.title.count("Process") for part in parts) == [1, 2]


def test_operators_with_the_same_reason_share_a_row() -> None:
    html = page(with_runs=False)
    assert "as above" not in html
    (section,) = (one for one in build([], with_runs=False).sections if one.anchor == "selected")
    choices = section.parts[0].tables[0]
    assert len({tuple(cell.text for cell in row[:3]) for row in choices.rows}) == len(choices.rows)


def test_each_cell_has_its_heading_for_a_screen_that_is_too_narrow_for_columns(
    written: Callable[..., list[Path]],
) -> None:
    html = page(*written(**FILES), with_runs=False)
    narrow = html[html.rindex("@media (max-width: 40rem)") : html.index("</style>")]
    classes = {attributes["class"] for attributes in Page(html).named("table") if attributes.get("class")}
    assert len(classes) > 5
    assert all(f".{name} td:nth-child(2):not(:empty)::before" in narrow for name in classes)
    assert 'content: "implementation: "' in narrow


def test_a_heading_from_a_stranger_is_text_of_the_style_sheet(written: Callable[..., list[Path]]) -> None:
    row = {**FILES["verify"]["results"][0], "dtype": '"}</style><script>\\'}
    html = page(*written(verify={**FILES["verify"], "results": [row]}), with_runs=False)
    assert html.count("</style>") == 1
    assert not list(Page(html).named("script"))
    assert r'content: "\22 \7d \3c \2f style' in html


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_screen_shows_the_page_without_scrolling_sideways(
    width: int, written: Callable[..., list[Path]], tmp_path: Path
) -> None:
    """The page's own policy forbids scripts; a copy that allows one measures itself."""
    html = page(*written(**FILES), with_runs=False).replace("<details", "<details open")
    html = html.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    measured = (
        "<script>let widest = 0; document.querySelectorAll('.scroll').forEach("
        "one => widest = Math.max(widest, one.scrollWidth - one.clientWidth));"
        "document.title = 'over ' + Math.max(widest, document.documentElement.scrollWidth - innerWidth);"
        "document.body.textContent = document.title</script>"
    )
    (tmp_path / "page.html").write_text(html.replace("</body>", f"{measured}</body>"))
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom")
    done = subprocess.run(
        [str(CHROMIUM), *options, f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "page.html").as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert ">over 0<" in done.stdout


def test_an_implementation_that_differed_in_several_layers_and_workers_is_counted_once(tmp_path: Path) -> None:
    shadow = RECORD["choices"]["shadow"]
    findings = [{**shadow["findings"][0], "layer": str(layer), "calls": 2} for layer in range(3)]
    for pid, found in ((1, findings), (2, findings[:1])):
        choices = {**RECORD["choices"], "shadow": {**shadow, "findings": found}}
        (tmp_path / f"{pid}.json").write_text(json.dumps({**RECORD, "pid": pid, "choices": choices}))
    (section,) = (one for one in build([tmp_path], with_runs=False).sections if one.title == "Shadow")
    assert section.summary == ("1", "implementation differed, in 8 of 1,000 compared calls")


@pytest.mark.parametrize("name", ["impl_id", "note", "device", "file name", "candidate", "engine"])
def test_names_from_strangers_are_text_and_never_markup(
    name: str, written: Callable[..., list[Path]], tmp_path: Path
) -> None:
    row, key = BENCHED["results"][0], TUNED["keys"][0]
    cell = SERVED["compared"]["decode, batch 1"]["plugin_shipped"]
    machine = {"device": HOSTILE, "date": HOSTILE, "versions": {HOSTILE: HOSTILE}}
    candidates = {HOSTILE: {"us": 1.0, "low": 1.0, "high": 1.0, "problem": HOSTILE}}
    given: dict[str, Any] = {
        "impl_id": {**BENCHED, "results": [{**row, "impl_id": HOSTILE, "op_name": HOSTILE, "label": HOSTILE}]},
        "note": {**BENCHED, "results": [row, {**row, "device_us": None, "share_of_floor": None, "note": HOSTILE}]},
        "device": {**BENCHED, "how": HOSTILE, "machine": machine},
        "candidate": {**TUNED, "keys": [{**key, "chosen": HOSTILE, "candidates": candidates}]},
        "engine": {**SERVED, "compared": {HOSTILE: {HOSTILE: cell}}},
        "file name": BENCHED,
    }  # fmt: skip
    files = written(page=given[name])
    if name == "file name":
        files = [files[0].rename(tmp_path / "<img src=x onerror=alert(1)>.json")]
    found = Page(page(*files, with_runs=False))
    assert not {"script", "img", "iframe", "object", "link"} & {tag for tag, _ in found.elements}
    assert not any(key.startswith("on") for _, attributes in found.elements for key in attributes)
    assert any("<img src=x onerror=alert(" in text for text in found.texts)
    assert "49" not in "".join(found.texts).split("{{ 7 * 7 }}")


def test_the_page_loads_nothing(written: Callable[..., list[Path]]) -> None:
    html = page(*written(**FILES))
    found = Page(html)
    links = [value for _, attributes in found.elements for key, value in attributes.items() if key in ("src", "href")]
    assert links
    assert all(link is not None and link.startswith("#") for link in links)
    assert "url(" not in html
    assert "@import" not in html
    policy = next(one["content"] for one in found.named("meta") if "content" in one and "http-equiv" in one)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_it_is_dark_where_the_reader_is_and_can_be_printed(written: Callable[..., list[Path]]) -> None:
    html = page(*written(**FILES))
    assert "@media (prefers-color-scheme: dark)" in html
    assert "@media print" in html


def test_tables_have_captions_and_headings_and_charts_say_in_words_what_they_show(
    written: Callable[..., list[Path]],
) -> None:
    found = Page(page(*written(**FILES)))
    tags = [tag for tag, _ in found.elements]
    assert tags.count("table") == tags.count("caption") > 5
    assert {attributes.get("scope") for attributes in found.named("th")} == {"col", "row"}
    words = [attributes["aria-label"] or "" for attributes in found.named("svg")]
    assert any("plugin_shipped 232/s" in said for said in words)
    assert any("at 256 tokens vendor.acme 0.88" in said for said in words)
    anchors = {attributes.get("id") for attributes in found.named("section")}
    assert {(attributes["href"] or "").removeprefix("#") for attributes in found.named("a")} <= anchors


def test_of_two_measurements_of_an_operator_the_later_one_is_open(written: Callable[..., list[Path]]) -> None:
    older = {**BENCHED, "machine": {**MACHINE, "date": "2026-01-01"}}
    html = page(*written(newer=BENCHED, older=older))
    assert "1 earlier measurement of the same operators" in html
    assert html.index("newer.json") < html.index("earlier measurement") < html.index("older.json")


def test_the_results_of_this_project_are_shown() -> None:
    report = build([RESULTS], with_runs=False)
    sections = {section.anchor: section for section in report.sections}
    assert all(sections[anchor].parts for anchor in ("selected", "right", "fast", "engines"))
    compared = [
        path
        for path in (*RESULTS.glob("serve_*.json"), *RESULTS.glob("several_steps_*.json"))
        if {"compared", "formats", "runs"} & set(json.loads(path.read_text()))
    ]
    shown = {Path(name).name for name, where in report.files if "Engines" in where}
    assert shown == {path.name for path in compared}
    html = render(report)
    assert "NVIDIA H200" in html
    assert "Perplexities of quantized checkpoints" in html


WITHOUT_VANILLA = {
    "machine": {"shape": "llama-3.1-8b", "layers": 32, "rounds": 1},
    "formats": {"fp8": {"rates": {"decode": {"shipped": [1.0]}}}},
}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "a JSON object is expected, not list"),
        ('{"some": "thing"}', "is none of the files that a report is made of"),
        (json.dumps({**BENCHED, "dtype": 1, "results": [{"share_of_floor": 1.0}]}), "not as `fl bench --out"),
        (json.dumps({**SERVED, "compared": {"decode": {"plugin": {"ratio": "fast"}}}}), "not as `python benchmarks"),
        (json.dumps(WITHOUT_VANILLA), "not as `python benchmarks"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_error_that_names_it(
    text: str, problem: str, written: Callable[..., list[Path]], tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(DispatchError) as caught:
        page(*written(good=BENCHED, served=SERVED), tmp_path / "bad.json", with_runs=False)
    assert problem in str(caught.value)
    assert "good.json" not in str(caught.value)
    assert "bad.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_an_error_and_leaves_the_old_page(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("old")
    done = fl("report", str(tmp_path / "absent.json"), "--out", str(out))
    assert (done.returncode, done.stderr.count("error:")) == (2, 1)
    assert "there is no file or folder" in done.stderr
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_a_folders_other_files_are_listed_and_not_shown(written: Callable[..., list[Path]], tmp_path: Path) -> None:
    written(bench=BENCHED, notes={"some": "thing"}, numbers=[1, 2])
    shown = {Path(name).name: where for name, where in build([tmp_path], with_runs=False).files}
    assert shown["bench.json"] == "Fast?"
    assert {"not shown" in shown[name] for name in ("notes.json", "numbers.json")} == {True}


def test_the_commands_write_what_the_report_reads(tmp_path: Path) -> None:
    verified, benched, out = tmp_path / "verify.json", tmp_path / "bench.json", tmp_path / "report.html"
    fl("verify", "--quick", "--op", "silu_and_mul", "--dtype", "float32", "--out", str(verified))
    sizes = ("--tokens", "1", "--hidden", "64", "--seconds", "0.001")
    fl("bench", "--op", "silu_and_mul", "--dtype", "float32", *sizes, "--out", str(benched))
    done = fl("report", str(tmp_path), "--no-runs", "--out", str(out))
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert f"{json.loads(benched.read_text())['results'][0]['device_us']['median']:,.1f}" in text
    verifications = len(json.loads(verified.read_text())["results"])
    assert f"{verifications} of {verifications}" in text


def test_values_that_are_no_numbers_are_left_out_of_a_chart() -> None:
    nan = float("nan")
    rows = [Interval("broken", nan, nan, nan, "c0", "none"), Interval("fine", 1.0, 0.9, 1.1, "c1", "1/s")]
    assert "nan" not in intervals("title", rows, "share").markup
    points = {"1": (nan, nan, nan), "16": (0.4, 0.5, 0.6)}
    assert "nan" not in lines("title", [Line("one", "c0", points)], ["1", "16"], "tokens", 1.2, 1.0).markup


def test_figures_without_their_origin_are_marked_and_refused_if_asked(
    written: Callable[..., list[Path]], tmp_path: Path
) -> None:
    whole, bare = written(whole=BENCHED, bare={**BENCHED, "commit": "", "machine": {"device": "a chip"}})
    files = {Path(name).name: where for name, where in build([whole, bare], with_runs=False).files}
    assert files == {"whole.json": "Fast?", "bare.json": "Fast?; lacks date, versions, commit"}
    assert page(bare).count("does not say its date, versions, commit") == 1
    assert "does not say its" not in page(whole)
    assert build([whole], with_runs=False, strict=True).files
    out = tmp_path / "report.html"
    done = fl("report", str(whole), str(bare), "--strict", "--out", str(out))
    assert (done.returncode, out.exists()) == (2, False)
    assert "bare.json does not say its date, versions, commit" in done.stderr
    assert "whole.json" not in done.stderr


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_a_commands_file_says_where_its_figures_come_from(command: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    sizes = ("--quick",) if command == "verify" else ("--tokens", "1", "--hidden", "64", "--seconds", "0.001")
    chosen = ("--op", "silu_and_mul", "--impl", "reference.torch", "--out", str(file))
    assert fl(command, *chosen, *sizes).returncode == 0
    data = json.loads(file.read_text())
    assert build([file], with_runs=False, strict=True).files
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=RESULTS, capture_output=True, text=True, check=True)
    assert data["commit"].removesuffix("+changes") == head.stdout.strip()
    assert f"{command} --op silu_and_mul" in data["command"]


def test_results_that_are_kept_since_then_say_where_they_come_from() -> None:
    """Older files are marked in the report; what they lack can no longer be known."""
    dated = re.compile(r"\d{4}-\d{2}-\d{2}")
    since = [file for file in RESULTS.glob("*.json") if max(dated.findall(file.name), default="") >= "2026-11-29"]
    assert since
    assert {str(source.path): source.origin.lacks for source in files.read(since) if source.origin.lacks} == {}


def test_every_benchmark_writes_its_results_with_their_origin() -> None:
    scripts = [file for file in (RESULTS.parent).glob("*.py") if '"--json"' in file.read_text()]
    assert len(scripts) > 20
    for script in scripts:
        assert "evidence.origin import" in script.read_text(), script.name

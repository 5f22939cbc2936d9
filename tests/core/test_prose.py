"""The linter of prose finds what it should and nothing else, and the project's pages pass it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools/prose.py"
_spec = importlib.util.spec_from_file_location("prose", TOOL)
assert _spec is not None
assert _spec.loader is not None
prose = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(prose)


def found(text: str) -> list[tuple[int, str]]:
    return [(number, problem.split(",")[0].split(";")[0]) for number, problem in prose.problems(text)]


@pytest.mark.parametrize("word", ["Of", "What", "Where", "How many"])
@pytest.mark.parametrize("form", ["{} it is.", "- {} it is.", "> 1. {} it is.", "**{}** it is.", "[^1]: {} it is."])
def test_a_sentence_begins_with_its_subject(word: str, form: str) -> None:
    assert found(form.format(word)) == [(1, f"begins with '{word}'")]


def test_a_cell_begins_with_its_subject() -> None:
    assert found("| a | b |\n|---|---|\n| fine | What it is |") == [(3, "begins with 'What'")]


@pytest.mark.parametrize("text", ["Often it is.", "Whatever it is.", "Whereas it is.", "It is where it is."])
def test_other_words_may_begin_a_sentence(text: str) -> None:
    assert found(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "One. Two.",
        "One! Two.",
        "- (One.) Two.",
        "It ends in `code`. It goes on.",
        "One. `code` is a word.",
        "One. **Two** it is.",
        "One. [Two](three.md) it is.",
    ],
)
def test_a_line_has_one_sentence(text: str) -> None:
    assert found(text) == [(1, "more than one sentence on a line")]


@pytest.mark.parametrize(
    "text", ["vLLM 0.32 runs.", "Names, e.g. Llama, run.", "`One. Two.` is code.", "See [One. two](a.md).", "1. One."]
)
def test_a_point_inside_a_sentence_ends_none(text: str) -> None:
    assert found(text) == []


def test_a_sentence_is_not_broken() -> None:
    assert found("A sentence that\ngoes on.\n\nA list:\n- one\n- two\n") == [(1, "the line ends inside a sentence")]


def test_a_long_line_is_found_and_a_links_target_does_not_count() -> None:
    assert found("x" * 161) == [(1, "161 characters")]
    assert found("x" * 160) == []
    assert found("[x](" + "y" * 200 + ")") == []


def test_a_long_cell_is_found_and_a_long_row_of_short_ones_is_not() -> None:
    assert found(f"| {'x' * 161} | y |") == [(1, "a cell of 161 characters")]
    assert found("| " + " | ".join(["x" * 100] * 3) + " |") == []
    assert found(f"| `{'x' * 78}\\|{'x' * 78}` | y |") == []


def test_code_and_headings_are_not_prose() -> None:
    assert found("# What it is\n\n```\nWhat. Where. " + "x" * 200 + "\n```\n") == []


def test_prose_after_code_is_checked() -> None:
    assert found("```sh\nx\n```\nWhat it is.") == [(4, "begins with 'What'")]


@pytest.mark.parametrize(
    "text", ['"""What it is."""', "# What it is", '"""One. What it is."""', '"""One.\n\nWhat it is."""']
)
def test_a_sentence_of_a_docstring_or_comment_begins_with_its_subject(text: str) -> None:
    assert [problem for _, problem in prose.problems_of_code(text)] == ["begins with 'What'; begin with the subject"]


def test_a_docstring_below_a_field_is_read() -> None:
    source = 'class A:\n    x: int\n    """Where it is."""\n'
    assert [number for number, _ in prose.problems_of_code(source)] == [3]


@pytest.mark.parametrize(
    "text", ['x = "What it is"', "# it says\n# What it is", 'f("""\nWhat it is.\n""")', '"""It.\n    >>> What\n"""']
)
def test_strings_continued_comments_and_examples_begin_no_sentence(text: str) -> None:
    assert list(prose.problems_of_code(text)) == []


def test_the_exit_code_and_the_place_are_those_of_a_linter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("Fine.\n\nWhat it is.\n")
    assert prose.main([str(page)]) == 1
    assert capsys.readouterr().out == f"{page}:3: begins with 'What'; begin with the subject\n"
    page.write_text("Fine.\n")
    assert prose.main([str(page)]) == 0


@pytest.mark.parametrize("page", prose.pages(), ids=lambda page: str(page.relative_to(prose.ROOT)))
def test_the_pages_of_the_project_pass(page: Path) -> None:
    assert list(prose.problems(page.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("page", prose.pages(), ids=lambda page: str(page.relative_to(prose.ROOT)))
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []


def anchors(page: Path) -> set[str]:
    """The names that a page's headings have in links."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    heads = (re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", head) for head in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", head.strip().lower())) for head in heads}


@pytest.mark.parametrize("page", prose.pages(), ids=lambda page: str(page.relative_to(prose.ROOT)))
def test_a_link_to_a_heading_finds_it(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    ours = [(page.parent / target if target else page, head) for target, head in links if "://" not in target]
    assert [(where.name, head) for where, head in ours if where.suffix == ".md" and head not in anchors(where)] == []


@pytest.mark.parametrize("page", prose.pages(), ids=lambda page: str(page.relative_to(prose.ROOT)))
def test_each_footnote_of_a_page_is_there_once_and_used(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    defined = re.findall(r"^(\[\^[\w-]+\]): ", text, re.MULTILINE)
    assert len(set(defined)) == len(defined)
    used = re.findall(r"\[\^[\w-]+\](?!: )", re.sub(r"`[^`]*`", "", text))
    assert set(used) == set(defined)

"""The linter of prose finds what it should and nothing else, and the project's pages pass it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tool_modules import tool

TOOL = Path(__file__).parents[2] / "tools/prose.py"
prose = tool("prose")


def found(text: str) -> list[tuple[int, str]]:
    return [(number, re.split("[,;:]", problem)[0]) for number, problem in prose.page_problems(text)]


def in_code(source: str) -> list[tuple[int, str]]:
    return [(number, re.split("[,:]", problem)[0]) for number, problem in prose.code_problems(source)]


WORDS = ["nobody", "no one", "somebody", "someone", "so many", "told", "whose", "likewise", "of ours"]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(
    "form", ["It is {} there.", "- It is {} there.", "| a | b |\n|---|---|\n| c | It is {} there |"]
)
def test_a_word_that_hides_a_noun_is_found_in_a_page(word: str, form: str) -> None:
    assert found(form.format(word)) == [(form.count("\n") + 1, f"'{word}'")]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(
    "form",
    [
        '"""It, {} here."""',
        "# It is {} here",
        'raise ValueError("It is {} here")',
        'raise ValueError(f"{{x}} is {} here, {{y}}")',
        'x = "one two "\\\n    "it is {} here"',
    ],
)
def test_a_word_that_hides_a_noun_is_found_in_docstrings_comments_and_messages(word: str, form: str) -> None:
    assert (1, f"'{word}'") in in_code(form.format(word))


@pytest.mark.parametrize("text", ["Retold stories.", "The tolerance of hours.", "`nobody` is a user.", "Whosever."])
def test_a_part_of_a_word_and_code_are_not_found(text: str) -> None:
    assert found(text) == []
    assert in_code(f'"""{text}"""') == []


def test_a_sentence_has_at_most_two_relative_clauses() -> None:
    two = "A layer that has weights, which are `that` and `which`."
    assert found(two) == []
    assert found(two[:-1] + ", runs what it runs.") == [(1, "3 of that")]
    assert in_code(f'"""{two} {two}"""') == []
    assert in_code(f'"""{two[:-1]}, runs what\nit runs."""') == [(1, "3 of that")]


def test_each_argument_in_a_docstring_is_a_sentence() -> None:
    items = "".join(f"        {name}: a tensor that holds what is there\n" for name in "abc")
    assert in_code(f'def f(a, b, c):\n    """Run.\n\n    Args:\n{items}    """') == []


@pytest.mark.parametrize(
    "beginning",
    ["Of", "As for", "As many", "It", "That of", "That is", "The same", "The one", "These", "They", "This is", "Those"],
)
def test_a_docstring_begins_with_no_pronoun(beginning: str) -> None:
    assert in_code(f'"""{beginning} tensors."""') == [(1, f"begins with '{beginning}'")]
    assert in_code(f'class A:\n    x: int\n    """{beginning} tensors."""') == [(3, f"begins with '{beginning}'")]


@pytest.mark.parametrize("beginning", ["Makes", "Returns", "Sets", "Does", "Is"])
def test_a_docstring_is_imperative(beginning: str) -> None:
    assert in_code(f'def f():\n    """{beginning} it."""') == [(2, f"begins with '{beginning}'")]


@pytest.mark.parametrize(
    "beginning", ["How many", "Whether", "Where", "Return", "The shape of", "A", "Sets of", "This package's", "Often"]
)
def test_other_docstrings_pass(beginning: str) -> None:
    assert in_code(f'"""{beginning} tensors."""') == []


def test_a_constant_has_a_docstring_of_its_own() -> None:
    assert in_code('A, B = 1, 2\n"""Rows, and columns."""') == [(2, "one docstring for several constants")]
    assert in_code('A = 1\n"""Rows."""\nB = 2\n"""Columns."""\nC, D = 3, 4\n') == []


def test_names_and_keys_are_no_messages() -> None:
    assert in_code('x = {"told": "whose", "a b": "so many"}') == []


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
    assert found("# Nobody\n\n```\nNobody. Whose. " + "x" * 200 + "\n```\n") == []
    assert in_code('"""Add.\n\n    >>> told\n"""') == []


def test_prose_after_code_is_checked() -> None:
    assert found("```sh\nx\n```\nIt is told.") == [(4, "'told'")]


def test_a_fragment_of_the_changelog_may_be_one_long_line(tmp_path: Path) -> None:
    assert list(prose.fragment_problems("x" * 161 + ". Two.\n")) == []
    assert [number for number, _ in prose.fragment_problems("One.\nIt is told.\n")] == [2]


def test_the_exit_code_and_the_place_are_those_of_a_linter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("Fine.\n\nIt is of ours.\n")
    assert prose.main([str(page)]) == 1
    assert capsys.readouterr().out == f"{page}:3: 'of ours': write 'our', or name the package\n"
    page.write_text("Fine.\n")
    assert prose.main([str(page)]) == 0


def test_the_prose_of_the_project_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main([]) == 0, capsys.readouterr().out


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

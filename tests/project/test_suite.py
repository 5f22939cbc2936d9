"""The suite: its folders, and the turns in which long files run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import sampling
from rotations import ROTATIONS, resting
from suite import AT_ONCE, ENVIRONMENTS, ROOT, UNKNOWN, chosen, expected

PAGE = Path(ROOT, "docs/evidence/testing.md").read_text(encoding="utf-8")
MOST = 20
EMULATED = {Path("tests/emulated_npu/kernels")}
FOLDERS = {path.parent.relative_to(ROOT) for path in Path(ROOT, "tests").rglob("*.py")} - EMULATED
MODULES = sorted(Path(ROOT, "tests").rglob("test_*.py"))

ROTATING = {file for rotation in ROTATIONS.values() for file in rotation.files}


@pytest.fixture
def commit(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    sampling.seed.cache_clear()
    yield monkeypatch
    sampling.seed.cache_clear()


def rests(commit: pytest.MonkeyPatch, name: str) -> set[str]:
    commit.setenv("FL_SAMPLE", name)
    sampling.seed.cache_clear()
    return resting()


def test_only_files_of_one_subject_that_an_environment_has_rotate() -> None:
    known = {file for environment in ENVIRONMENTS.values() for file in environment.files()}
    assert known >= ROTATING
    assert len(ROTATING) == sum(len(rotation.files) for rotation in ROTATIONS.values())


def test_every_rotating_file_runs_in_one_of_eighty_commits_and_rests_in_another(commit: pytest.MonkeyPatch) -> None:
    draws = [rests(commit, f"commit {number}") for number in range(80)]
    assert set.union(*draws) == ROTATING
    assert set.intersection(*draws) == set()


def test_a_commit_draws_the_same_files_each_time(commit: pytest.MonkeyPatch) -> None:
    assert rests(commit, "a commit") == rests(commit, "a commit")


def test_a_run_of_everything_has_all_files_but_those_that_rest(commit: pytest.MonkeyPatch) -> None:
    left_out = rests(commit, "a commit")
    queued = {file for files in chosen([]).values() for file in files}
    known = {file for environment in ENVIRONMENTS.values() for file in environment.files()}
    assert known - queued == left_out


def test_a_file_or_an_environment_that_is_named_does_not_rest(commit: pytest.MonkeyPatch) -> None:
    left_out = rests(commit, "a commit")
    assert {file for files in chosen(sorted(left_out)).values() for file in files} == left_out
    assert chosen(["sglang"]) == {"sglang": ENVIRONMENTS["sglang"].files()}


def test_nothing_rests_in_the_exhaustive_run(commit: pytest.MonkeyPatch) -> None:
    assert rests(commit, sampling.ALL) == set()
    assert set(chosen([])) == set(ENVIRONMENTS)


def test_an_exhaustive_environment_runs_only_there_or_by_its_name(commit: pytest.MonkeyPatch) -> None:
    rests(commit, "a commit")
    exhaustive = {name for name, environment in ENVIRONMENTS.items() if environment.exhaustive}
    assert exhaustive == {"vllm-newest"}
    assert not exhaustive & set(chosen([]))
    assert not exhaustive & set(chosen(["tests/vllm/layers/test_moe.py"]))
    assert chosen(["vllm-newest"]) == {"vllm-newest": ENVIRONMENTS["vllm-newest"].files()}


def test_what_a_run_takes_is_known_from_the_record(commit: pytest.MonkeyPatch) -> None:
    commit.setenv("FL_SAMPLE", "")  # so that it comes back
    everything = sum(len(environment.files()) for environment in ENVIRONMENTS.values())
    assert all(0 < seconds < everything * UNKNOWN / AT_ONCE for seconds in expected({}, 3))


def test_the_page_has_the_numbers() -> None:
    for subject, rotation in ROTATIONS.items():
        assert f"| {subject} | {rotation.draws} of {len(rotation.files)}" in PAGE


@pytest.mark.parametrize("folder", sorted(FOLDERS), ids=str)
def test_a_folder_has_at_most_twenty_modules_and_a_line_on_the_page(folder: Path) -> None:
    assert len(list(Path(ROOT, folder).glob("*.py"))) <= MOST
    assert f"| `{folder.relative_to('tests')}`" in PAGE


def test_no_two_test_modules_have_one_name() -> None:
    """Pages name a module without its folder, and pytest imports it by that name alone."""
    assert [name for name, count in Counter(path.name for path in MODULES).items() if count > 1] == []


def test_every_test_module_is_in_an_environment() -> None:
    known = {file for environment in ENVIRONMENTS.values() for file in environment.files()}
    assert {str(path.relative_to(ROOT)) for path in MODULES} == known

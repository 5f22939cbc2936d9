"""The suite in turns: a run of everything leaves some long files to another commit's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import sampling
from rotations import ROTATIONS, resting
from suite import ENVIRONMENTS, ROOT, chosen

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
    assert not exhaustive & set(chosen(["tests/vllm/test_moe.py"]))
    assert chosen(["vllm-newest"]) == {"vllm-newest": ENVIRONMENTS["vllm-newest"].files()}


def test_the_page_has_the_numbers() -> None:
    page = Path(ROOT, "docs/evidence/testing.md").read_text()
    for subject, rotation in ROTATIONS.items():
        assert f"| {subject} | {rotation.draws} of {len(rotation.files)}" in page

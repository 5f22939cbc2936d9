"""Perplexity by hand, and the bad input of the command."""

from __future__ import annotations

import math

import pytest

from command import fl
from fl_dispatch.errors import DispatchError
from fl_dispatch.evidence.perplexity import perplexity, relative_difference, rows_of


def test_a_text_is_cut_into_rows_that_each_begin_as_a_text_does() -> None:
    assert rows_of([5, 6, 7, 8, 9], 1, 2) == [[1, 5, 6], [1, 7, 8], [1, 9]]
    assert rows_of([5, 6, 7, 8, 9], None, 2) == [[5, 6], [7, 8]]


def test_it_is_the_number_of_equally_likely_tokens() -> None:
    found = perplexity([[math.log(1 / 8)] * 3, [math.log(1 / 8)]], size=3)
    assert found.value == pytest.approx(8)
    assert found.bits_per_byte == pytest.approx(4 * 3 / 3)
    assert relative_difference(8.4, 8.0) == pytest.approx(0.05)


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_numbers_that_overflow_are_an_error_and_no_perplexity(wrong: float) -> None:
    with pytest.raises(DispatchError, match="overflow"):
        perplexity([[-1.0, wrong]], 1)


def test_a_text_without_tokens_is_an_error() -> None:
    with pytest.raises(DispatchError, match="nothing to score"):
        rows_of([], 1, 256)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--window", "511"], "the model has 512 positions"),
        (["--text", "absent.txt"], "cannot be read as a text"),
        (["no-model"], "no checkpoint with a tokenizer"),
        (["--host", "sglang", "--compiled"], "--compiled is for vLLM"),
    ],
)
def test_bad_input_is_one_error_before_an_engine_starts(arguments: list[str], problem: str) -> None:
    done = fl("perplexity", *arguments)
    assert (done.returncode, done.stderr.count("error:")) == (2, 1)
    assert problem in " ".join(done.stderr.split())

"""Drafts that are looked up in SGLang on a GPU; it compiles a search tree at its first start by a C++ compiler."""

from __future__ import annotations

import pytest
import sglang_drafts
from sglang_drafts import models  # noqa: F401  a fixture

METHODS = ("ngram",)
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def result(models: sglang_drafts.Models) -> sglang_drafts.Result:  # noqa: F811
    return sglang_drafts.results(METHODS, models)


@pytest.mark.parametrize("method", METHODS)
class TestDrafts(sglang_drafts.Rules):
    """They hold here."""

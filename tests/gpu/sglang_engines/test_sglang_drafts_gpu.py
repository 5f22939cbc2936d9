"""Drafts of a model, of EAGLE heads and of a predictor in SGLang on a GPU, chains and trees.

They change no token, and no distribution.
"""

from __future__ import annotations

import pytest
import sglang_drafts
from sglang_drafts import models  # noqa: F401  a fixture

METHODS = ("draft_model", "eagle", "eagle3", "branches", "mtp", "mtp_tree")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def result(models: sglang_drafts.Models) -> sglang_drafts.Result:  # noqa: F811
    return sglang_drafts.results(METHODS, models)


@pytest.mark.parametrize("method", METHODS)
class TestDrafts(sglang_drafts.Rules):
    """They hold here."""

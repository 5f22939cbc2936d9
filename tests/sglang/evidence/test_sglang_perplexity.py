"""``fl perplexity`` through a real SGLang: the held-out text is as likely as to Hugging Face's model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving import python

from fl_dispatch.cli import small_model


@pytest.mark.engine
def test_the_perplexity_is_hugging_faces(tmp_path: Path) -> None:
    file = tmp_path / "perplexity.json"
    ended = python(
        "-c", "from fl_dispatch.cli import main; main()", "perplexity", "--host", "sglang", "--out", str(file)
    )
    assert ended.returncode == 0, ended.log
    found = json.loads(file.read_text())
    assert found["right"] is True
    assert found["tokens"] == small_model.facts()["tokens"]
    assert {key.split(" ")[0] for key in found["report"]["counts"]} >= {"rms_norm", "paged_attention"}

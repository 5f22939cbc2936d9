"""vLLM serves no weight that a checkpoint did not fill, and drops no tensor of it, without a word."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import environment

import unfitting

CASES = {
    **unfitting.CASES,
    "a tensor": replace(
        unfitting.EXTRA,
        refused=r"'model\.layers\.0\.mlp\.bonus\.weight' of .*model\.safetensors .* cannot be loaded .*no module",
    ),
    "another head": unfitting.HEAD,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Each case's sentence when its checkpoint is loaded, all in one process."""
    folder = tmp_path_factory.mktemp("unfitting")
    folders = unfitting.write_all(folder, CASES)
    jobs, result = folder / "jobs.json", folder / "result.json"
    jobs.write_text(json.dumps([str(path) for path in folders.values()]))
    script = Path(__file__).with_name("load_models.py")
    ran = subprocess.run(
        [sys.executable, script, jobs, result], env=environment(), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return dict(zip(folders, json.loads(result.read_text()), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_that_does_not_fit_is_refused_by_layer_and_tensor(
    name: str, outcomes: dict[str, dict[str, Any]]
) -> None:
    case, outcome = CASES[name], outcomes[name]
    if case.refused is None:
        assert outcome["refused"] is None
    else:
        assert re.search(case.refused, outcome["refused"] or "served")
        assert re.match("CheckpointError|ValueError", outcome["refused"])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.warned])
def test_weights_that_hugging_face_would_load_instead_are_named(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    assert any(re.search(str(CASES[name].warned), message) for message in outcomes[name]["messages"])

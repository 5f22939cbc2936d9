"""``fl verify --json`` keeps its contract: other people's CI reads it by the schema that is shipped."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import jsonschema
import pytest

from command import fl
from fl_dispatch.evidence import verify as module
from fl_dispatch.evidence.comparison import Deviation
from fl_dispatch.evidence.verify import Verification
from fl_dispatch.ops import Tolerance


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json.loads(fl("verify", "--schema").stdout)


@pytest.fixture(scope="module")
def printed() -> dict[str, Any]:
    """A right row, a wrong one that declines, and one that is absent."""
    chosen = ("--quick", "--op", "silu_and_mul", "--op", "paged_attention", "--dtype", "float32")
    return json.loads(fl("verify", *chosen, "--json").stdout)


def test_the_document_is_as_the_schema_says(schema: dict[str, Any], printed: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(printed, schema)
    assert printed["schema"] == schema["$id"] == module.SCHEMA


def test_the_schema_names_every_property_and_no_other(schema: dict[str, Any], printed: dict[str, Any]) -> None:
    assert set(printed) == set(schema["properties"])
    (row, *_) = printed["results"]
    described = schema["properties"]["results"]["items"]["properties"]
    assert set(row) == set(described)
    assert set(row["worst"]) == set(described["worst"]["anyOf"][1]["properties"])
    assert set(printed["machine"]) == set(schema["properties"]["machine"]["properties"])


@pytest.mark.parametrize("change", [("verdict", "maybe"), ("samples", -1), ("problems", "one"), ("worst", {})])
def test_a_document_of_another_form_is_refused(
    change: tuple[str, Any], schema: dict[str, Any], printed: dict[str, Any]
) -> None:
    other = copy.deepcopy(printed)
    other["results"][0][change[0]] = change[1]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(other, schema)


def test_an_error_without_a_number_is_still_json() -> None:
    found = Verification("rms_norm", "default.tried", "float32", Tolerance(0.0, 0.0))
    found.worst = Deviation(math.inf, math.nan, 1.0, "output 0 at [0]", "one")
    data = json.loads(json.dumps(found.as_data(), allow_nan=False))
    assert (data["worst"]["share"], data["worst"]["error"], data["worst"]["expected"]) == (None, None, 1.0)

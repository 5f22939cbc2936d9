"""Write the tables of docs/features.md from docs/features.toml: `python tools/features.py`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
DATA = tomllib.loads((DOCS / "features.toml").read_text(encoding="utf-8"))
COLUMNS: dict[str, str] = DATA["columns"]
WORDS = {"works": "**works**", "part": "partial", "refused": "refused", "none": "–", None: "not run"}
BEGIN, END = "<!-- tables of features.toml -->", "<!-- end -->"


def cell(feature: dict[str, Any], column: str) -> dict[str, Any]:
    """Return the data of one cell; an absent cell has none."""
    return feature.get(column, {})


def tables() -> str:
    """Return the table of words, and the table that says what works where a feature is "partial"."""
    rows = [["", *COLUMNS.values()], ["---"] * (len(COLUMNS) + 1)]
    notes = [["feature", "where", "what works"], ["---"] * 3]
    for feature in DATA["feature"]:
        name = f"[{feature['name']}]({feature['link']})" if "link" in feature else feature["name"]
        rows.append([name, *(WORDS[cell(feature, column).get("state")] for column in COLUMNS)])
        for column, title in COLUMNS.items():
            if note := cell(feature, column).get("note"):
                notes.append([feature["name"], title, note])
    head = "\n\n## Partial support\n\n"
    return head.join("\n".join(f"| {' | '.join(row)} |" for row in table) for table in (rows, notes))


def filled(page: str) -> str:
    """Return the page with the tables filled in."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    path = DOCS / "features.md"
    path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")

"""Counts lines of code by part, without blank lines, comments and docstrings: ``make lines``."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
PARTS = {
    "core proper": (
        *("fl_dispatch/*.py", "fl_dispatch/selection/*.py", "fl_dispatch/knowledge/*.py", "fl_dispatch/run/*.py"),
    ),
    "compiled": ("fl_dispatch/compiled/*.py",),
    "devices": ("fl_dispatch/devices/*.py",),
    "settings": ("fl_dispatch/settings/*.py", "fl_dispatch/config/*.py"),
    "operators": ("fl_dispatch/ops/*.py",),
    "backends": ("fl_dispatch/backends/**/*.py",),
    "hosting": ("fl_dispatch/hosting/*.py",),
    "evidence": ("fl_dispatch/evidence/*.py",),
    "command": ("fl_dispatch/cli/*.py",),
    "vLLM plugin": ("vllm_fl/**/*.py",),
    "SGLang plugin": ("sglang_fl/**/*.py",),
}
"""Part → patterns; every file below ``src`` belongs to one."""
NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def lines_of_code(path: Path) -> int:
    """Lines of one file that hold code."""
    text = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for t in tokens if t.type not in NOT_CODE for line in range(t.start[0], t.end[0] + 1)}
    return len(code - docstrings)


def main() -> None:
    counted: set[Path] = set()
    total = 0
    for part, patterns in PARTS.items():
        files = {file for pattern in patterns for file in SOURCE.glob(pattern)} - counted
        lines = sum(map(lines_of_code, files))
        print(f"{part:13} {lines:6} lines in {len(files):3} files")
        counted, total = counted | files, total + lines
    left_out = set(SOURCE.rglob("*.py")) - counted
    assert not left_out, f"no part counts {sorted(left_out)}"
    print(f"{'all':13} {total:6} lines in {len(counted):3} files")


if __name__ == "__main__":
    main()

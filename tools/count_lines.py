"""Counts lines of code by part, without blank lines, comments and docstrings: ``make lines``."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
PARTS = {
    "core": ("fl_dispatch/*.py",),
    "settings": ("fl_dispatch/settings/*.py",),
    "operators": ("fl_dispatch/ops/*.py",),
    "backends": ("fl_dispatch/backends/**/*.py",),
    "command": ("fl_dispatch/cli/*.py",),
    "vLLM plugin": ("vllm_fl/*.py", "vllm_fl/compat/*.py"),
}
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
    for part, patterns in PARTS.items():
        files = [file for pattern in patterns for file in sorted(SOURCE.glob(pattern))]
        print(f"{part:12} {sum(map(lines_of_code, files)):5} lines in {len(files):2} files")


if __name__ == "__main__":
    main()

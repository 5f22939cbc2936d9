"""Count lines and tokens of code by part, and lines of the core proper by promise: ``make lines``.

The exit status is 1 if a part is above its budget. Blank lines, comments and docstrings do not count. A promise is a
row of docs/guide/contract.md that a user could do without; its lines are the files, classes and functions that serve
only this promise.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"


@dataclass(frozen=True)
class Part:
    """A part of the sources, with its budget.

    Args:
        patterns: of its files; a file belongs to the first part with a matching pattern.
        lines: largest number of lines of code.
        tokens: largest number of tokens, so that code is not squeezed into fewer lines.
    """

    patterns: tuple[str, ...]
    lines: int
    tokens: int


PARTS = {
    "core proper": Part(
        (
            *("fl_dispatch/*.py", "fl_dispatch/selection/*.py", "fl_dispatch/knowledge/*.py", "fl_dispatch/run/*.py"),
            *("fl_dispatch/manager/*.py", "fl_dispatch/aten_replacement/*.py"),
        ),
        lines=4_185,
        tokens=36_625,
    ),
    "shadow mode": Part(("fl_dispatch/shadow/*.py",), lines=490, tokens=4_520),
    "compiled": Part(("fl_dispatch/compiled/*.py",), lines=480, tokens=4_900),
    "devices": Part(("fl_dispatch/devices/*.py",), lines=780, tokens=6_380),
    "settings": Part(("fl_dispatch/settings/*.py", "fl_dispatch/config/*.py"), lines=1_290, tokens=12_300),
    "operators": Part(("fl_dispatch/ops/**/*.py",), lines=5_020, tokens=65_200),
    "backends": Part(("fl_dispatch/backends/**/*.py",), lines=14_100, tokens=132_500),
    "hosting": Part(("fl_dispatch/hosting/**/*.py",), lines=5_075, tokens=52_550),
    "evidence": Part(("fl_dispatch/evidence/**/*.py",), lines=6_175, tokens=65_600),
    "command": Part(("fl_dispatch/cli/**/*.py",), lines=3_685, tokens=33_040),
    "vLLM plugin": Part(("vllm_fl/**/*.py",), lines=9_690, tokens=91_100),
    "transfer": Part(("fl_transfer/**/*.py",), lines=2_645, tokens=23_990),
    "SGLang plugin": Part(("sglang_fl/**/*.py",), lines=5_095, tokens=47_950),
}
"""Every file below ``src`` belongs to one part. A commit that raises a budget says why."""
PROMISES = {
    "implementations are checked against a declaration": ("signatures.py",),
    "a call may pass a layer first": (
        "run/layer_form.py",
        "run/generated.py:_read_attributes",
        "run/keys.py:key_of",
        "manager/calls.py:_entry_for",
    ),
    "an undeclared operator may overwrite its arguments": (
        "run/generated.py:_predicated",
        "run/snapshot.py:mutable_parts _held _slots _members _is_open _is_array _is_scalar",
    ),
    "overwritten arguments are restored": (
        "knowledge/proofs.py",
        "run/snapshot.py",
        "run/arguments.py:Call.updated Call.holds_state Call._reached Call._is_shared Call._others _share_memory",
        "run/recovery.py:_Attempts._needs_copies",
        "state.py:State.prove State.watch",
    ),
    "a call falls back where that is safe": (
        "run/recovery.py",
        "run/plan.py:_careful",
        "knowledge/error_kinds.py",
        "run/arguments.py",
    ),
    "a ban covers one kind of arguments": (
        "knowledge/failures.py:ArgumentKind Failure FailureLog",
        "run/plan.py:_kind_checked",
    ),
    "a choice by dtype, tokens and phase": (
        "run/plan.py:_conditional",
        "selection/decision.py:admits condition_of _is_unconditional Decision.branch_for Decision.conditional",
        "run/arguments.py:Call.branch",
    ),
    "every choice can be explained": (
        "selection/decision.py:Considered Branch.consider Branch._why Decision.for_call Decision.skipped_reasons",
        "selection/decision.py:Decision.reasons Decision.as_data Decision.__str__ Decision.considered",
        "manager/op_manager.py:OpManager.explain",
        "manager/calls.py:explain",
    ),
    "choices can be frozen": (
        "fixed_choices.py",
        "state.py:State.frozen State.choices State._choices_at",
        "manager/op_manager.py:OpManager._fix_new OpManager._fixed OpManager._require_unchanged OpManager.frozen",
        "manager/op_manager.py:OpManager.admit_registration",
        "run/plan.py:frozen_function",
        "manager/process.py:freeze_dispatch thaw_dispatch admit_policy",
    ),
    "compiled code is traced into the choice": (
        *("run/traced.py", "run/trial.py", "knowledge/traces.py", "run/plan.py:_Recipe"),
    ),
    "backends may replace PyTorch's own operators": (
        "aten_replacement/__init__.py",
        "registry.py:OpRegistry.register_replacement",
    ),
    "a policy may apply to one context": (
        "policy.py:_Entered policy_context _changed with_strict_mode with_preference with_allowed_vendors",
        "policy.py:with_denied_vendors",
        "run/keeper.py:TableKeeper.table_for TableKeeper.adopt",
        "manager/process.py:table_for",
    ),
    "several managers in one process": (
        "run/keeper.py:PrivateTable TableKeeper.retire",
        "run/dispatch.py",
        "manager/op_manager.py:OpManager.call",
        "manager/process.py:reset_default_manager",
    ),
    "a child forked at any moment works": (
        "locking.py:ForkableLock._before ForkableLock._in_parent ForkableLock._in_child ForkableLock.mine",
        "manager/op_manager.py:OpManager.after_fork_in_child",
        "manager/start.py:Start.after_fork_in_child",
        "manager/process.py:_after_fork_in_child",
        "knowledge/availability.py:Availability.forget_who_asks",
    ),
    "an interrupted change has no effect": (
        "manager/op_manager.py:OpManager.on_policy_change",
        "manager/process.py:change_policy",
        "global_policy.py:GlobalPolicy.restore",
        "knowledge/failures.py:FailureLog.restore",
    ),
    "an implementation may keep a repacked copy of a weight": ("weight_forms.py",),
    "a product can prefetch the next weight": ("successors.py",),
    "calls are counted": (
        "knowledge/counting.py",
        "manager/op_manager.py:OpManager.set_counting OpManager.reset_counts OpManager.call_counts",
    ),
    "facts of hosts; rules without effect are reported": (
        "manager/checks.py",
        "selection/refusals.py:_holds _in_words",
        "manager/op_manager.py:OpManager.set_facts OpManager.first_choices",
        "manager/op_manager.py:OpManager.unmatched_scopes OpManager.warn_of_unmatched_scopes",
    ),
    "backends and plugins load completely or not at all": (
        "discovery.py",
        "builtin_ops.py",
        "manager/start.py",
        "importing.py",
        "locking.py:ForkableLock.within",
        "registry.py:OpRegistry.commit OpRegistry._replace",
    ),
    "native code gets valid addresses only": ("native.py", "cpp.py"),
    "availability is checked once": ("knowledge/availability.py", "types.py:OpImpl.availability"),
    "errors say what to do; the log can be configured": ("errors.py", "logger_manager.py"),
    "the documented import paths": ("__init__.py", "manager/__init__.py"),
}
"""Promise → its parts of the core proper. A part counts for the first promise that names it; a file counts without its
named parts."""
NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def code_of(path: Path) -> tuple[frozenset[int], int]:
    """Return the lines of one file that hold code, and the number of its tokens."""
    text = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in NOT_CODE]
    code = [token for token in tokens if token.start[0] not in docstrings]
    return frozenset(line for t in code for line in range(t.start[0], t.end[0] + 1)), len(code)


def places(path: Path) -> dict[str, range]:
    """Return every class, function and method of one file, with its lines."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else []
        for part, prefix in ((node, ""), *((each, f"{getattr(node, 'name', '')}.") for each in inner)):
            if isinstance(part, ast.ClassDef | Function):
                first = min([part.lineno, *(decorator.lineno for decorator in part.decorator_list)])
                found[prefix + part.name] = range(first, (part.end_lineno or 0) + 1)
    return found


def by_promise(core: set[Path]) -> dict[str, int]:
    """Return the core proper's lines by promise; the last entry has those that serve all promises."""
    left = {path: set(code_of(path)[0]) for path in core}
    counts = dict.fromkeys(PROMISES, 0)
    parts = [(promise, *part.partition(":")[::2]) for promise, named in PROMISES.items() for part in named]
    for promise, file, names in sorted(parts, key=lambda part: not part[2]):  # a whole file is what its names left
        path = SOURCE / "fl_dispatch" / file
        taken = set(left[path]) if not names else set()
        for name in names.split():
            taken |= set(places(path)[name]) & left[path]
        counts[promise] += len(taken)
        left[path] -= taken
    return {**counts, "a policy chooses, and a call runs the choice": sum(map(len, left.values()))}


def main() -> int:
    counted: set[Path] = set()
    totals = [0, 0]
    above = []
    for name, part in PARTS.items():
        files = {file for pattern in part.patterns for file in SOURCE.glob(pattern)} - counted
        counted |= files
        lines, tokens = sum(len(code_of(file)[0]) for file in files), sum(code_of(file)[1] for file in files)
        print(f"{name:13} {lines:6} lines {tokens:7} tokens in {len(files):3} files")
        totals = [totals[0] + lines, totals[1] + tokens]
        if lines > part.lines or tokens > part.tokens:
            above.append(f"{name}: {lines} lines and {tokens} tokens, at most {part.lines} and {part.tokens}")
    left_out = set(SOURCE.rglob("*.py")) - counted
    assert not left_out, f"no part counts {sorted(left_out)}"
    print(f"{'all':13} {totals[0]:6} lines {totals[1]:7} tokens in {len(counted):3} files")
    print("\nThe core proper by promise")
    core = {file for pattern in PARTS["core proper"].patterns for file in SOURCE.glob(pattern)}
    for promise, lines in sorted(by_promise(core).items(), key=lambda item: item[1]):
        print(f"{lines:6} {promise}")
    for line in above:
        print(f"above its budget: {line}; shorten it, or raise the budget in a commit that says why", file=sys.stderr)
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())

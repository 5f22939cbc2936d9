"""A candidate: a Python file with a function named like the operator, read as text and never imported here.

Code inside an engine can change that engine without any visible call. So a file may contain only functions of tensors:
the text is refused if it reaches beyond them.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DispatchError
from ...ops import OPERATORS, Operator
from ...types import BackendImplKind, OpImpl


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


IMPORTS = _words(
    "__future__ abc collections dataclasses enum fl_dispatch functools itertools math numpy operator torch triton "
    "typing"
)
"""Packages that a candidate may import; ``--allow`` adds one, such as a vendor's library."""
BUILTINS = _words("breakpoint compile delattr dir eval exec getattr globals input locals open setattr vars exit quit")
"""Names of Python that reach beyond a function's arguments."""
REACHING = _words(
    "builtins ctypes ctypeslib distributed f2py fromfile fromregex gc genfromtxt hub importlib inspect io library load "
    "load_library loads loadtxt manual_seed memmap multiprocessing open_memmap os save savetxt savez serialization "
    "socket subprocess sys threading time tofile use_deterministic_algorithms utils"
)
"""Attributes of PyTorch and NumPy that reach files, processes, or process-wide state."""
SPECIAL = frozenset({"__all__", "__name__", "__doc__"})
LARGEST = 1 << 20
"""Bytes of a file."""


@dataclass(frozen=True)
class Candidate:
    """One file.

    Args:
        name: the file's name, without its suffix.
        text: its text, read once, so that the same text runs, is hashed and is packed.
        operator: the operator that it implements.
        signature: the signature of its function.
        problem: why it does not run at all, or empty.
    """

    name: str
    text: str
    operator: Operator
    signature: inspect.Signature
    problem: str = ""

    @property
    def sha256(self) -> str:
        """Return the hash of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def implementation(self, function: Callable[..., Any]) -> OpImpl:
        """Return a function as an implementation with the candidate's signature."""

        def call(*args: Any) -> Any:
            return function(*args)

        call.__signature__ = self.signature  # type: ignore[attr-defined]
        return OpImpl(self.operator.name, "default.candidate", BackendImplKind.DEFAULT, call)


def read(folder: Path, op_name: str | None = None, allowed: Iterable[str] = ()) -> list[Candidate]:
    """Return the candidates of a folder.

    Args:
        folder: the folder of Python files; names with a leading underscore are skipped.
        op_name: the operator, or ``None`` for the only one that the files define.
        allowed: further packages that they may import.

    Raises:
        DispatchError: there is none, or they are for several operators.
    """
    files = sorted(file for file in folder.glob("*.py") if not file.name.startswith("_"))
    if not files:
        raise DispatchError(f"there is no Python file in {folder}")
    texts = {file.stem: _text(file) for file in files}
    found = dict.fromkeys(name for text in texts.values() for name in _functions(text) if name in OPERATORS)
    if op_name is None and len(found) != 1:
        said = f"define {', '.join(found)}" if found else "define no function that is named like an operator"
        raise DispatchError(f"the files of {folder} {said}; --op names one operator")
    operator = OPERATORS[op_name or next(iter(found))]
    return [_candidate(name, text, operator, IMPORTS | {*allowed}) for name, text in texts.items()]


def _text(file: Path) -> str:
    with file.open("rb") as opened:
        data = opened.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise DispatchError(f"{file} has more than {LARGEST} bytes")
    return data.decode(errors="replace")


def _parsed(text: str) -> ast.Module | None:
    """Parse a text as an import reads it, in the encoding that it may name; ``None`` if it is not Python."""
    try:
        compile(text.encode(), "candidate", "exec", dont_inherit=True)
        return ast.parse(text.encode())
    except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError):
        return None


def _functions(text: str) -> dict[str, ast.FunctionDef]:
    body = tree.body if (tree := _parsed(text)) else ()
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def _candidate(name: str, text: str, operator: Operator, allowed: frozenset[str]) -> Candidate:
    tree, function = _parsed(text), _functions(text).get(operator.name)
    if tree is None or function is None:
        said = "it is no Python" if tree is None else f"it defines no function '{operator.name}'"
        return Candidate(name, text, operator, operator.signature, said)
    problems = list(dict.fromkeys(_reaching(tree, allowed)))
    return Candidate(name, text, operator, _signature(function.args), "; ".join(problems[:3]))


def _signature(given: ast.arguments) -> inspect.Signature:
    """Return the parameters of a function, with the defaults that are plain values."""
    given.defaults = [_plain(one) for one in given.defaults]
    given.kw_defaults = [one and _plain(one) for one in given.kw_defaults]
    for one in ast.walk(given):
        if isinstance(one, ast.arg):
            one.annotation = None
    stub = ast.fix_missing_locations(ast.Expression(ast.Lambda(given, ast.Constant(None))))
    return inspect.signature(eval(compile(stub, "candidate", "eval")))  # no code of the text is evaluated


def _plain(default: ast.expr) -> ast.expr:
    try:
        value = ast.literal_eval(default)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        value = None
    return ast.Constant(value if isinstance(value, int | float | str) else None)


def _reaching(tree: ast.Module, allowed: frozenset[str]) -> Iterator[str]:
    """Yield what a text does beyond functions of tensors."""
    triton = {name for node in ast.walk(tree) for name in _names_of(node) if _module(node).startswith("triton")}
    for node in ast.walk(tree):
        where = f"line {getattr(node, 'lineno', 0)}: it"
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (f"{where} {said}" for said in _imported(node, allowed))
        elif isinstance(node, ast.Attribute):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            name = root.id if isinstance(root, ast.Name) else ""
            if isinstance(node.ctx, ast.Store | ast.Del) and name != "self":
                yield f"{where} changes the attribute '{node.attr}' of another object"
            loads = name in triton and node.attr == "load"
            own = name == "self" and node.attr not in REACHING
            if _special(node.attr) or (_reaches(node.attr) and not loads and not own):
                yield f"{where} uses '{node.attr}'"
        elif isinstance(node, ast.Name) and (node.id in BUILTINS or _special(node.id)):
            yield f"{where} uses '{node.id}'"
        elif isinstance(node, ast.Name) and node.id == "self" and isinstance(node.ctx, ast.Store):
            yield f"{where} gives another object the name 'self'"


def _imported(node: ast.Import | ast.ImportFrom, allowed: frozenset[str]) -> Iterator[str]:
    """Yield what is wrong with an import."""
    modules = [one.name for one in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for module in modules:
        if (isinstance(node, ast.ImportFrom) and node.level) or module.partition(".")[0] not in allowed:
            yield f"imports {module or 'a file beside it'}"
            return
    parts = [part for one in node.names for part in one.name.split(".")] + modules[0].split(".")[1:]
    if reaching := [part for part in parts if _reaches(part)]:
        yield f"imports {', '.join(reaching)} of {modules[0]}"
    if modules[0].partition(".")[0] == "fl_dispatch" and parts != ["NotSupported"]:
        yield "imports more of fl_dispatch than NotSupported"
    if "self" in _names_of(node):
        yield "imports something as 'self'"


def _module(node: ast.AST) -> str:
    if isinstance(node, ast.Import):
        return node.names[0].name
    return node.module or "" if isinstance(node, ast.ImportFrom) else ""


def _names_of(node: ast.AST) -> set[str]:
    imports = isinstance(node, ast.Import | ast.ImportFrom)
    return {one.asname or one.name.partition(".")[0] for one in node.names} if imports else set()  # type: ignore[attr-defined]


def _reaches(name: str) -> bool:
    private = name.startswith("_") and not _special(name) and name not in SPECIAL
    return private or name in REACHING or name == "*" or name.startswith(("set_", "register_"))


def _special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and name not in SPECIAL

"""Programs in Triton's interpreter, made faster without any change of a result.

The interpreter spends four fifths of its time on types, shapes and patches of its language, all made again at every
operation of a kernel. Here they are made once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any


def run(program: str, *arguments: str, **environment: str) -> str:
    """Return the output of a Python program; Triton is interpreted unless the environment sets otherwise."""
    done = subprocess.run(
        [sys.executable, __file__, program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def quicken() -> None:
    """Make this process's interpreter compute only once what does not change."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    _patch_once_a_launch(interpreter)
    _know_types(interpreter)
    _know_shapes(core)
    _know_operations(TritonSemantic)


def _replace(owner: Any, name: str, make: Callable[..., Any]) -> None:
    given = getattr(owner, name)
    setattr(owner, name, wraps(given)(make(given)))


def _patch_once_a_launch(interpreter: Any) -> None:
    """Patch the language when a kernel starts, and not again at each call of a function in it."""
    patched: set[frozenset[str]] = set()

    @cache
    def languages(fn: Any) -> frozenset[str]:
        seen = (interpreter.tl, interpreter.tl.core)
        return frozenset(one.__name__ for one in seen if any(one is value for value in fn.__globals__.values()))

    def patching(given: Any) -> Any:
        def patch(fn: Any) -> Any:
            if languages(fn) in patched:
                return interpreter._LangPatchScope()
            patched.add(languages(fn))
            return given(fn)

        return patch

    def launching(given: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            patched.clear()
            given(*args, **options)

        return launch

    _replace(interpreter, "_patch_lang", patching)
    _replace(interpreter.GridExecutor, "__call__", launching)


def _know_types(interpreter: Any) -> None:
    """Look NumPy's type up by name."""
    known: dict[str, Any] = {}

    def looking_up(given: Any) -> Any:
        def look_up(dtype: Any) -> Any:
            name = dtype.scalar.name
            if name not in known:
                known[name] = given(dtype)
            return known[name]

        return look_up

    _replace(interpreter, "_get_np_dtype", looking_up)


def _know_shapes(core: Any) -> None:
    """Share the shape's computed values between equal block types, and between tensors of them."""
    shapes: dict[tuple[int, ...], tuple[Any, int, tuple[Any, Any]]] = {}
    names: dict[tuple[str, tuple[int, ...]], str] = {}

    def making_types(given: Any) -> Any:
        def make(self: Any, element_ty: Any, shape: Any) -> None:
            sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
            name = (element_ty.name, sizes)
            if name not in names or {*map(type, sizes)} != {int}:
                given(self, element_ty, shape)
                names[name] = self.name
                of_tensors = core.constexpr(self.numel), core.tuple([core.constexpr(size) for size in sizes])
                shapes.setdefault(sizes, (self.shape, self.numel, of_tensors))
            self.element_ty, self.name = element_ty, names[name]
            self.shape, self.numel, self.of_tensors = shapes[sizes]

        return make

    def making_tensors(given: Any) -> Any:
        def make(self: Any, handle: Any, type: Any) -> None:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = type.of_tensors

        return make

    core.dtype.of_tensors = core.constexpr(1), core.tuple([])
    _replace(core.dtype, "__eq__", lambda given: lambda self, other: self is other or given(self, other))
    _replace(core.block_type, "__init__", making_types)
    _replace(core.tensor, "__init__", making_tensors)


def _know_operations(semantic: Any) -> None:
    """Leave operands of one shape or type unchanged, and compute nothing for disabled assertions."""
    results: dict[tuple[Any, ...], Any] = {}

    def broadcasting(given: Any) -> Any:
        def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
            one, other = lhs.type, rhs.type
            blocks = one.is_block(), other.is_block()
            alike = one.shape is other.shape if all(blocks) else not any(blocks)
            return (lhs, rhs) if alike else given(self, lhs, rhs)

        return broadcast

    def casting(given: Any) -> Any:
        def cast(self: Any, value: Any, dtype: Any, *rounding: Any, **options: Any) -> Any:
            same = value.type.scalar is dtype.scalar
            return value if same else given(self, value, dtype, *rounding, **options)

        return cast

    def resulting(given: Any) -> Any:
        def result(self: Any, one: Any, one_is_scalar: bool, other: Any, other_is_scalar: bool, division: bool) -> Any:
            key = one.name, one_is_scalar, other.name, other_is_scalar, division
            if key not in results:
                results[key] = given(self, one, one_is_scalar, other, other_is_scalar, division)
            return results[key]

        return result

    def checking(given: Any) -> Any:
        def check(self: Any, *operation: Any) -> None:
            if self.builder.options.debug:
                given(self, *operation)

        return check

    _replace(semantic, "broadcast_impl_value", broadcasting)
    _replace(semantic, "cast", casting)
    _replace(semantic, "computation_type_impl", resulting)
    _replace(semantic, "binary_op_sanitize_overflow_impl", checking)


if __name__ == "__main__":
    sys.path[0] = ""  # a folder with the name of a host would be imported as the host
    if os.environ.get("TRITON_INTERPRET") == "1":
        quicken()
    _, program, *arguments = sys.argv
    sys.argv = ["-c", *arguments]
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})

"""Candidates for ``silu_and_mul``: right ones, and wrong ones with a fault each and the words by which it is found."""

from __future__ import annotations

HEAD = "import torch\nfrom torch.nn.functional import silu\n"
BODY = """
def silu_and_mul(x):
    gate, up = x.float().chunk(2, -1)
    y = (silu(gate) * up).to(x.dtype).contiguous()
{0}
    return y
"""


SHAPES = """
KNOWN = [(0, 128), (1, 8192), (2, 5, 128), (3, 134), (3, 28672), (4, 256), (5, 3, 128), (5, 256), (7, 3072), (32, 4096),
         (128, 2048), (260, 8448), (4100, 32), (8200, 32), (66000, 32)]
"""


def after(lines: str, head: str = "") -> str:
    """A right function with more lines behind the result."""
    body = "\n".join(f"    {line}" for line in lines.splitlines())
    return HEAD + head + BODY.format(body)


def instead(lines: str, head: str = "") -> str:
    """A function of these lines."""
    body = "\n".join(f"    {line}" for line in lines.splitlines())
    return f"{HEAD}{head}\ndef silu_and_mul(x):\n{body}\n"


def by_triton(written: str, passes: int = 1) -> str:
    """A Triton kernel that stores the columns of this mask, and PyTorch's function where there is no accelerator.

    It goes over its rows several times, and writes the same in each pass.
    """
    return f"""
import torch
from torch.nn.functional import silu

try:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x, y, columns, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        for start in range(0, {passes} * columns, BLOCK):
            at = start % columns + tl.arange(0, BLOCK)
            gate = tl.load(x + row * 2 * columns + at, mask=at < columns).to(tl.float32)
            up = tl.load(x + row * 2 * columns + columns + at, mask=at < columns).to(tl.float32)
            tl.store(y + row * columns + at, gate / (1 + tl.exp(-gate)) * up, mask={written})
except ImportError:
    kernel = None


def silu_and_mul(x):
    columns = x.shape[-1] // 2
    if kernel is None or x.is_cpu or x.numel() == 0:
        gate, up = x.float().chunk(2, -1)
        return (silu(gate) * up).to(x.dtype).contiguous()
    y = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    kernel[(y.numel() // columns,)](x.contiguous(), y, columns, BLOCK=256)
    return y
"""


RIGHT: dict[str, str] = {
    "plain": after("pass"),
    "sigmoid": instead("a, b = x.float().chunk(2, -1)\nreturn (a * torch.sigmoid(a) * b).to(x.dtype).contiguous()"),
    "numpy": "import numpy\n" + after("numpy.sqrt(2.0)"),
    "class_with_state": HEAD
    + """
class Kernel:
    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        gate, up = x.float().chunk(2, -1)
        return (silu(gate) * up).to(x.dtype).contiguous()

kernel = Kernel()

def silu_and_mul(x):
    return kernel(x)
""",
    "declines_large": "from fl_dispatch import NotSupported\n"
    + instead(
        "if x.shape[-1] > 8192:\n    raise NotSupported('at most 4096 columns')\n"
        "gate, up = x.float().chunk(2, -1)\nreturn (silu(gate) * up).to(x.dtype).contiguous()"
    ),
    "a_triton_kernel": by_triton("at < columns"),
    "prints": after("print('{\"results\": []}')"),
}

REFUSED: dict[str, tuple[str, str]] = {
    "reads the clock": ("import time\n" + after("y = y + (time.time() > 2e9)"), "imports time"),
    "opens a socket": ("import socket\n" + after("socket.socket()"), "imports socket"),
    "forks": ("import os\n" + after("os.fork()"), "imports os"),
    "ends the process": ("import sys\n" + after("sys.exit(0)"), "imports sys"),
    "takes the system's module from PyTorch": (after("torch.os.remove('x')"), "uses 'os'"),
    "replaces a function of PyTorch": (after("", "torch.nn.functional.gelu = silu\n"), "changes the attribute 'gelu'"),
    "replaces one under another name": (after("", "F = torch.nn.functional\nF.gelu = silu\n"), "changes the attribute"),
    "replaces one as 'self'": ("import torch as self\n" + after("self.add = silu"), "as 'self'"),
    "takes a module under another name": (after("t.os.remove('x')", "t = torch\n"), "uses 'os'"),
    "hooks every module": (
        after("torch.nn.modules.module.register_module_forward_hook(print)"),
        "uses 'register_module_forward_hook'",
    ),
    "replaces one by setattr": (after("setattr(torch, 'add', torch.sub)"), "uses 'setattr'"),
    "replaces the verifier": ("from fl_dispatch.evidence import verify\n" + after("pass"), "more of fl_dispatch"),
    "registers for PyTorch's operator": (after("torch.library.Library('aten', 'IMPL')"), "uses 'library'"),
    "sets the process's threads": (after("torch.set_num_threads(64)"), "uses 'set_num_threads'"),
    "climbs to globals": (after("silu.__globals__"), "uses '__globals__'"),
    "reads a pickle": (after("torch.load('weights')"), "uses 'load'"),
    "writes a file by open": (after("open('x', 'w')"), "uses 'open'"),
    "other parameters": (HEAD + "def silu_and_mul(gate, up):\n    return silu(gate) * up\n", "parameter"),
    "no such function": ("def other(x):\n    return x\n", "defines no function"),
    "no Python": ("def silu_and_mul(x: return", "is no Python"),
    "two parameters of one name": ("def silu_and_mul(x, x): return x", "is no Python"),
    "hides an import behind an encoding": ("# coding: utf-7\n# +AAo-import os+AAo-\n" + after("pass"), "imports os"),
}

WRONG: dict[str, tuple[str, str]] = {
    "keeps answers by address": (
        instead(
            "key = (x.data_ptr(), x.shape, x.stride(), x.dtype)\nif key not in kept:\n"
            "    gate, up = x.float().chunk(2, -1)\n    kept[key] = (silu(gate) * up).to(x.dtype).contiguous()\n"
            "return kept[key].clone()",
            "kept = {}\n",
        ),
        "other numbers",
    ),
    "returns the answer before": (after("last.append(y)\ny = last[-2] if len(last) > 1 else y", "last = []\n"), ""),
    "returns one memory": (
        after("y = kept.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)", "kept = {}\n"),
        "returns memory that the result of a call before lies in",
    ),
    "writes its input": (after("x.zero_()"), "it must only read"),
    "right at the samples' sizes only": (
        after("if x.shape not in KNOWN:\n    y[-1:] = 0", SHAPES),
        "drawn",
    ),
    "ignores strides": (
        instead(
            "if x.dim() == 3:\n    x = x.as_strided(x.shape, (x.shape[1] * x.stride(1), x.stride(1), x.stride(2)))\n"
            "gate, up = x.float().chunk(2, -1)\nreturn (silu(gate) * up).to(x.dtype).contiguous()"
        ),
        "middle of a projection, 3-d",
    ),
    "hides NaN": (after("y = torch.nan_to_num(y)"), "one NaN"),
    "another dtype": (after("y = y.double()"), "has dtype float64"),
    "another shape": (after("y = y[..., :-1].contiguous()"), "has shape"),
    "other strides": (after("y = y.mT.contiguous().mT if y.dim() > 1 else y"), "has strides"),
    "a tensor of its own kind": (
        after("y = y.as_subclass(Own)", "class Own(torch.Tensor):\n    pass\n"),
        "not tensors",
    ),
    "no tensor": (after("y = y.tolist()"), "not tensors"),
    "nothing": (after("y = None"), "returns 0 tensors"),
    "raises": (after("raise ValueError('no')"), "ValueError"),
    "columns beyond 4,096": (after("y[..., 4096:] = 0"), "elements are wrong"),
    "does not write the last column": (
        instead(
            "gate, up = x.float().chunk(2, -1)\ny = torch.empty(gate.shape, dtype=x.dtype)\n"
            "y[..., :-1] = (silu(gate) * up)[..., :-1]\nreturn y"
        ),
        "elements are NaN",
    ),
    "arithmetic in bfloat16": (
        instead("gate, up = x.bfloat16().chunk(2, -1)\nreturn (silu(gate) * up).to(x.dtype).contiguous()"),
        "elements are wrong",
    ),
    "other bits at every call": (after("y = y * (1 + 1e-6 * torch.rand(()))"), "other bits"),
    "wrong in one call of a hundred": (
        after("count.append(0)\nif len(count) % 100 == 99 and y.numel():\n    y.view(-1)[0] += 1", "count = []\n"),
        "",
    ),
    "exhausts memory": (after("while True:\n    kept.append(torch.ones(1 << 24))", "kept = []\n"), "MiB of memory"),
    "loops": (after("while True:\n    pass"), "took longer than"),
    "loops at import": (after("pass", "while True:\n    pass\n"), "took longer"),
    "ends itself": (after("raise SystemExit(0)"), "its process ended"),
    "never returns from its depth": (after("silu_and_mul(x)"), ""),
}

AROUND = """
import os, sys
worker = sys.modules['__main__']
"""

ON_ACCELERATORS = {"keeps answers by address": "elements are wrong"}
"""Wrong candidates with other words on an accelerator, where memory is used again while samples are compared."""

LIKE_A_COMPILER: dict[str, tuple[str, str]] = {
    "forks": ("import os\n" + after("os.fork()"), "PermissionError"),
    "starts a program": ("import os\n" + after("os.execv('/bin/true', ['true'])"), "PermissionError"),
    "writes a file": (after("open('x', 'w')"), "PermissionError"),
    "deletes a file": ("import os\n" + after("os.remove(__file__)"), "PermissionError"),
}
"""What a process may do only beside an accelerator, because compilers do it."""
UNSCREENED: dict[str, tuple[str, str]] = {
    "opens a socket": ("import socket\n" + after("socket.socket()"), "PermissionError"),
    "kills its parent": ("import os\n" + after("os.kill(os.getppid(), 9)"), "PermissionError"),
    "leaves its group": ("import os\n" + after("os.setsid()"), "PermissionError"),
    "ends at once": ("import os\n" + after("os._exit(0)"), "its process ended with status 0"),
    "prints a line of its own to every file": (
        "import os\n" + instead(
            "for one in range(3, 64):\n    try:\n        os.write(one, b'{\"results\": [], \"to\": \"start\"}\\n')\n"
            "    except OSError:\n        pass\nreturn x"
        ),
        "an answer of its own|OS call failed",
    ),
    "writes no end of a line": (
        "import os\n" + instead(
            "while True:\n    for one in range(3, 64):\n        try:\n            os.write(one, b'x' * 4096)\n"
            "        except OSError:\n            pass"
        ),
        "at great length|took longer",
    ),
    "says that wrong results are right": (
        AROUND + instead(
            "def answer(self, asked):\n    return {'verdict': 'right', 'results': [], 'several': True}\n"
            "worker.Calls.answer = answer\nreturn x"
        ),
        "",
    ),
    "says that its results lie elsewhere": (
        AROUND + instead(
            "def answer(self, asked):\n    one = {'dtype': 'float32', 'shape': [1 << 40], 'stride': [1], 'offset': 0}\n"
            "    return {'results': [{**one, 'at': -4096, 'size': 1 << 42, 'address': 0}], 'several': False}\n"
            "worker.Calls.answer = answer\nreturn x"
        ),
        "",
    ),
    "answers with an object": (
        AROUND + instead("worker.Calls.answer = lambda self, asked: {'results': {'__class__': 'os'}}\nreturn x"),
        "",
    ),
}  # fmt: skip

TIMED: dict[str, tuple[str, str]] = {
    "completes its result later": (
        "import threading, time\n"
        + instead(
            "y = torch.full((*x.shape[:-1], x.shape[-1] // 2), 7.0, dtype=x.dtype)\n"
            "gate, up = x.float().chunk(2, -1)\n"
            "def work():\n    time.sleep(0.002)\n    y.copy_((silu(gate) * up).to(x.dtype))\n"
            "threading.Thread(target=work).start()\nreturn y"
        ),
        "a result changed after the clock had stopped|elements are wrong",
    ),
    "computes one call of two": (
        after("count.append(0)\nif len(count) % 2 == 0:\n    y = torch.zeros_like(y)", "count = []\n"),
        "elements are wrong",
    ),
    "keeps the answers by address": (
        instead(
            "key = (x.data_ptr() if len(kept) > 1 else 0, x.shape)\nif key not in kept:\n"
            "    gate, up = x.float().chunk(2, -1)\n    kept[key] = (silu(gate) * up).to(x.dtype).contiguous()\n"
            "return kept[key].clone()",
            "kept = {}\n",
        ),
        "elements are wrong",
    ),
    "returns one memory for all calls": (
        after("y = kept.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)", "kept = {}\n"),
        "elements are wrong",
    ),
}
"""Faults of timed calls alone; each gives right results when it is called once and looked at slowly."""

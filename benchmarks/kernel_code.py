"""Compare the compiled kernels of two trees without a GPU: sm_90 code of attention's and the experts' kernels.

A kernel with the same code needs no measurement. For other kernels the figures show what to measure: registers, spills,
shared memory, instructions by kind, the loops of the tensor cores, and the first different instruction.

    python benchmarks/kernel_code.py --base REV [--case TEXT] [--triton FOLDER] [--json FILE]

``--base`` is a commit; its ``src`` is unpacked into a temporary folder. ``--triton`` is a folder with an unpacked
wheel, for another version than the environment's (``pip download --no-deps triton==3.6.0``). The exit status is 1 if a
kernel differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from fl_dispatch.cli.output import print_table
from fl_dispatch.evidence.origin import write

ROOT = Path(__file__).resolve().parents[1]
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* (0x[0-9a-f]+) \*/$")
CONTROL = re.compile(r"^\s*/\* (0x[0-9a-f]+) \*/$")
KINDS = {
    "tensor cores": ("HGMMA", "QGMMA", "HMMA"),
    "WARPGROUP": ("WARPGROUP",),
    "MUFU": ("MUFU",),
    "FMUL": ("FMUL",),
    "FFMA": ("FFMA",),
    "FADD": ("FADD",),
    "FMNMX": ("FMNMX",),
    "F2FP": ("F2FP",),
    "mbarrier": ("SYNCS",),
    "BAR": ("BAR",),
    "fences": ("FENCE", "MEMBAR"),
    "shared loads": ("LDS", "LDSM"),
    "shared stores": ("STS", "STSM"),
    "cp.async": ("LDGSTS",),
    "TMA": ("UTMALDG", "UTMASTG", "UBLKCP"),
    "global": ("LDG", "STG"),
    "spills": ("LDL", "STL"),
}
"""Counted instructions of SASS, by their first name."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of SASS. Its encoding holds data that the text leaves out: stalls, and barriers waited for."""

    address: int
    text: str
    encoding: str

    @cached_property
    def opcode(self) -> str:
        """Return the name with its modifiers, without a predicate: ``MUFU.EX2``."""
        words = self.text.split()
        return words[1] if words[0].startswith("@") else words[0]

    @property
    def kind(self) -> str:
        """Return the name without modifiers."""
        return self.opcode.split(".")[0]

    @property
    def target(self) -> int:
        """Return the target address of a branch, else -1."""
        found = re.search(r"(0x[0-9a-f]+)$", self.text) if self.kind == "BRA" else None
        return int(found[1], 16) if found else -1


@dataclasses.dataclass(frozen=True)
class Code:
    """A compiled kernel."""

    case: str
    name: str
    registers: int
    shared: int
    instructions: tuple[Instruction, ...]

    @property
    def encodings(self) -> list[str]:
        return [each.encoding for each in self.instructions]

    @cached_property
    def counts(self) -> dict[str, int]:
        """Return the number of instructions by kind, and of all."""
        found = Counter(each.kind for each in self.instructions)
        return {kind: sum(found[name] for name in names) for kind, names in KINDS.items()} | {
            "all": len(self.instructions)
        }

    @cached_property
    def loops(self) -> list[list[Instruction]]:
        """Return the innermost loops with products of the tensor cores."""
        spans = [(each.target, each.address) for each in self.instructions if 0 <= each.target <= each.address]
        bodies = [[each for each in self.instructions if start <= each.address <= end] for start, end in spans]
        bodies = [body for body in bodies if any(each.kind in KINDS["tensor cores"] for each in body)]
        return [
            body
            for body in bodies
            if not any(
                other is not body and body[0].address <= other[0].address and other[-1].address <= body[-1].address
                for other in bodies
            )
        ]

    def figures(self) -> dict[str, Any]:
        """Return the figures of one side, for the results."""
        return {
            "kernel": self.name,
            "registers": self.registers,
            "shared": self.shared,
            "instructions": {kind: number for kind, number in self.counts.items() if number},
            "loops": [len(body) for body in self.loops],
        }


def opcodes(instructions: Sequence[Instruction]) -> list[str]:
    """Return names in order, without registers and addresses."""
    return [each.opcode for each in instructions]


def disassemble(case: str, name: str, cubin: Path, shared: int, tools: Path) -> Code:
    """Read a kernel's code with the disassembler of Triton's wheel."""
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}

    def run(option: str) -> str:
        command = [str(tools / "cuobjdump"), option, str(cubin)]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout

    lines = run("-sass").splitlines()
    instructions = []
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        first, second = INSTRUCTION.match(line), CONTROL.match(after)
        if first and second:
            instructions.append(Instruction(int(first[1], 16), first[2], first[3] + second[1][2:]))
    registers = re.search(r"REG:(\d+)", run("-res-usage"))
    if not instructions or registers is None:
        raise RuntimeError(f"{cubin}: cuobjdump of {tools} printed no code")
    return Code(case, name, int(registers[1]), shared, tuple(instructions))


def compiled(tree: Path, folder: Path, case: str, triton: Path | None) -> dict[str, Any]:
    """Compile the cases with the sources of a tree, in a separate process."""
    folder.mkdir()
    path = [str(tree / "src"), *([str(triton)] if triton else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(ROOT / "benchmarks/kernel_cases.py"), str(folder), "--case", case]
    subprocess.run(command, check=True, env=environment, cwd=tree)
    made: dict[str, Any] = json.loads((folder / "kernels.json").read_text())
    if Path(made["tree"]) != (tree / "src").resolve():
        raise RuntimeError(f"{made['tree']} was compiled instead of {tree / 'src'}")
    return made


def read(folder: Path, made: dict[str, Any], tools: Path) -> list[Code | str]:
    """Return the code of each kernel, or the error of its compiler."""

    def one(row: dict[str, Any]) -> Code | str:
        if "error" in row:
            return str(row["error"])
        return disassemble(row["case"], row["name"], folder / row["file"], row["shared"], tools)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, made["kernels"]))


def _likeness(old: Sequence[Instruction], new: Sequence[Instruction]) -> str:
    """Return the part in which two loops agree: the whole "code", the "opcodes" or "nothing"."""
    if [each.encoding for each in old] == [each.encoding for each in new]:
        return "code"
    return "opcodes" if opcodes(old) == opcodes(new) else "nothing"


def difference(old: Code, new: Code) -> dict[str, Any]:
    """Return how far two kernels agree."""
    if old.encodings == new.encodings:
        return {"same": "code"}
    pairs = zip(old.encodings, new.encodings, strict=False)
    shorter = min(len(old.encodings), len(new.encodings))
    first = next((number for number, (one, other) in enumerate(pairs) if one != other), shorter)
    said: dict[str, Any] = {"same": "nothing"}
    if opcodes(old.instructions) == opcodes(new.instructions):
        said["same"] = "opcodes"
    elif old.loops and [opcodes(body) for body in old.loops] == [opcodes(body) for body in new.loops]:
        said["same"] = "loops"
    elif old.counts == new.counts:
        said["same"] = "counts"
    said["first_difference"] = {
        "instruction": first,
        "base": old.instructions[first].text if first < len(old.instructions) else "",
        "new": new.instructions[first].text if first < len(new.instructions) else "",
    }
    said["counts"] = {
        kind: [old.counts[kind], new.counts[kind]] for kind in new.counts if old.counts[kind] != new.counts[kind]
    }
    said["loops"] = [_likeness(*pair) for pair in zip(old.loops, new.loops, strict=False)]
    return said


def compare(base: Path, triton: Path | None, case: str, scratch: Path) -> dict[str, Any]:
    """Compile both trees and compare kernel by kernel, in the order in which the cases launch them."""
    sides = {}
    for name, tree in (("base", base), ("new", ROOT)):
        made = compiled(tree, scratch / name, case, triton)
        tools = Path(made["tools"])
        sides[name] = (made, read(scratch / name, made, tools))
    (old_made, old_codes), (new_made, new_codes) = sides["base"], sides["new"]
    if [row["case"] for row in old_made["kernels"]] != [row["case"] for row in new_made["kernels"]]:
        raise RuntimeError("the trees launch different numbers of kernels; compare them case by case with --case")
    rows = []
    for made, old, new in zip(new_made["kernels"], old_codes, new_codes, strict=True):
        row: dict[str, Any] = {"case": made["case"]}
        if isinstance(old, Code) and isinstance(new, Code):
            row |= {"kernel": new.name, **difference(old, new)}
            row |= {"both": new.figures()} if row["same"] == "code" else {"base": old.figures(), "new": new.figures()}
        else:
            errors = {side: code for side, code in (("base", old), ("new", new)) if isinstance(code, str)}
            row |= {"kernel": made.get("name", ""), "same": "not compiled", "errors": errors}
        rows.append(row)
    return {
        "versions": {key: new_made[key] for key in ("triton", "torch", "ptxas")},
        "target": "sm_90",
        "kernels": rows,
    }


def printed(rows: list[dict[str, Any]]) -> None:
    """Print a line for each kernel, base → new if they differ, and below it the first difference."""
    table: list[Sequence[object]] = []
    for row in rows:
        if row["same"] == "not compiled":
            table.append([row["case"], row["kernel"], row["same"], "", "", "", "", ""])
            continue
        old, new = (row.get(side, row.get("both")) for side in ("base", "new"))

        def both(of: Any, old: Any = old, new: Any = new) -> str:
            return str(of(new)) if of(old) == of(new) else f"{of(old)} → {of(new)}"

        table.append([
            row["case"], row["kernel"], row["same"], both(lambda side: side["registers"]),
            both(lambda side: side["instructions"].get("spills", 0)), both(lambda side: side["shared"]),
            both(lambda side: side["instructions"]["all"]), both(lambda side: " ".join(map(str, side["loops"]))),
        ])  # fmt: skip
    columns = ("case", "kernel", "same", "registers", "spills", "shared", "instructions", "in loops")
    print_table("Compiled code, base → new", columns, table)
    for row in rows:
        if "first_difference" in row:
            first = row["first_difference"]
            print(f"\n{row['case']}, {row['kernel']}: instruction {first['instruction']}")
            print(f"  base    {first['base']}\n  new     {first['new']}")
            print("  loops   " + (", ".join(row["loops"]) or "none"))
            print(
                "  counts  "
                + (", ".join(f"{kind} {old} → {new}" for kind, (old, new) in row["counts"].items()) or "same")
            )
        for side, error in row.get("errors", {}).items():
            print(f"\n{row['case']}, {side}: {error}")


def main() -> int:
    """Compare, print, and return 1 if some code differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, metavar="REV", help="the commit to compare with")
    parser.add_argument("--case", default="", help="only cases with this text in their name")
    parser.add_argument("--triton", type=Path, metavar="FOLDER", help="another Triton than the environment's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    git = ["git", "-C", str(ROOT)]
    revision = subprocess.run(
        [*git, "rev-parse", "--short", options.base], check=True, capture_output=True, text=True
    ).stdout.strip()
    archive = subprocess.run([*git, "archive", revision, "src"], check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch).resolve() / "tree"
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(base, filter="data")
        triton = options.triton.resolve() if options.triton else None
        found = {"base": revision, **compare(base, triton, options.case, Path(scratch))}
    print(", ".join(f"{key} {value}" for key, value in found["versions"].items()) + f", base {revision}\n")
    if options.json:
        write(options.json, found)
    printed(found["kernels"])
    same = sum(row["same"] == "code" for row in found["kernels"])
    print(f"\n{same} of {len(found['kernels'])} kernels have the same code")
    return int(same < len(found["kernels"]))


if __name__ == "__main__":
    sys.exit(main())

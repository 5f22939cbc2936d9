#!/usr/bin/env bash
# SGLang's scheduler asks every speculative algorithm for methods that a registered one does not have.
#
# Packages: sglang 0.5.23 (its files alone)
# Behaviour: SpeculativeAlgorithm.register adds an algorithm of a plugin, an instance of CustomSpecAlgo. Registration
#  checks that the class has the enumeration's is_*() and supports_*() methods. The scheduler's own code calls others,
#  too, and CustomSpecAlgo has none of these, so an engine with a registered algorithm ends with AttributeError at its
#  start.
# Why it matters: The registry's own example does not start. A plugin passes a spec_class that defines them.
# Seen 2026-11-29:
#   scheduler.py asks self.spec_algorithm for carries_draft_hidden_states: CustomSpecAlgo False, SpeculativeAlgorithm True
#   scheduler.py asks self.spec_algorithm for create_future_map: CustomSpecAlgo False, SpeculativeAlgorithm True
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q --disable-pip-version-check --no-deps sglang==0.5.23
cat > see.py <<'PYTHON'
import ast
import pathlib
import sysconfig

srt = pathlib.Path(sysconfig.get_path("purelib"), "sglang/srt")


def methods(file, name):
    found = [node for node in ast.walk(ast.parse((srt / file).read_text())) if isinstance(node, ast.ClassDef)]
    (body,) = (node.body for node in found if node.name == name)
    return {part.name for part in body if isinstance(part, ast.FunctionDef)}


custom = methods("speculative/spec_registry.py", "CustomSpecAlgo")
built_in = methods("speculative/spec_info.py", "SpeculativeAlgorithm")
asked = {
    node.func.attr
    for node in ast.walk(ast.parse((srt / "managers/scheduler.py").read_text()))
    if isinstance(node, ast.Call)
    and isinstance(node.func, ast.Attribute)
    and ast.unparse(node.func.value) == "self.spec_algorithm"
}
for name in sorted(asked - custom):
    print(
        f"scheduler.py asks self.spec_algorithm for {name}: "
        f"CustomSpecAlgo {name in custom}, SpeculativeAlgorithm {name in built_in}"
    )
PYTHON
venv/bin/python see.py 2> warnings | tee seen || { cat warnings; exit 1; }
diff <(echo "$said") seen

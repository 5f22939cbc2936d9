"""What many layers cost: binding them, and changing the policy while contexts' tables are kept.

    python benchmarks/binding_cost.py [--layers 500] [--policies 64]

Goals, on two cores: 500 layers of 20 operators bound in under 5 s, and a policy change with 64 kept policies in under
2 s.
"""

from __future__ import annotations

import argparse
import time

from fl_dispatch import SelectionPolicy, bind_op, get_default_manager, policy_context, set_global_policy
from fl_dispatch.ops import OPERATORS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=500)
    parser.add_argument("--operators", type=int, default=20)
    parser.add_argument("--policies", type=int, default=64)
    given = parser.parse_args()
    operators = list(OPERATORS)[: given.operators]
    get_default_manager().ensure_initialized()
    began = time.perf_counter()
    for layer in range(given.layers):
        for name in operators:
            bind_op(name, f"model.layers.{layer}.{name}")
    print(f"{given.layers * len(operators)} scopes bound in {time.perf_counter() - began:.2f} s")
    began = time.perf_counter()
    for number in range(given.policies):
        with policy_context(SelectionPolicy(deny_vendors=frozenset({f"nobody{number}"}))):
            pass
    print(f"{given.policies} contexts with policies of their own entered in {time.perf_counter() - began:.2f} s")
    for prefer in ("reference", "vendor"):
        began = time.perf_counter()
        set_global_policy(SelectionPolicy(prefer=prefer))
        print(f"policy changed to prefer={prefer} in {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    main()

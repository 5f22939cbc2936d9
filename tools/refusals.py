"""Quantized checkpoints that were refused at a commit, and those that are now: rows for docs/evidence/quantization.md.

    .venv/bin/python tools/refusals.py [--before 1622accc]

Each kind of checkpoint of ``quantized_served.py`` is passed to the shared decision in both commits
(``fl_dispatch.hosting.quantized.schemes``), for linear layers and for experts, and its method is looked up in each
plugin's list. Each commit's sources run in a separate process. The environment with vLLM is needed for the library of
``compressed-tensors``.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "1622accc"
HOSTS = {"vLLM": "vllm_fl", "SGLang": "sglang_fl"}
KINDS = ("linear", "experts")
Answers = dict[str, dict[str, list[str]]]
"""Checkpoint → kind of layers → the hosts that refuse it."""


class RefusalError(Exception):
    """Raised by the decision in place of the hosts' error."""


def refused(what: str, remedy: str = "") -> RefusalError:
    return RefusalError(what)


def scheme_of(config: Mapping[str, Any]) -> Any:
    """Return a checkpoint's scheme as both hosts read it, by the sources on the path."""
    from fl_dispatch.hosting.quantized import schemes

    def part(name: str) -> Any:
        return importlib.import_module(f"fl_dispatch.hosting.quantized.{name}")

    method = config["quant_method"]
    if method == "quark":
        return scheme_of(part("quark").as_compressed(config, refused))
    if method == "auto-round":
        return scheme_of(part("auto_round").as_packed(config, refused)[1])
    is_apart = (
        importlib.util.find_spec("fl_dispatch.hosting.quantized.configurations") is not None
    )  # not in old commits
    (part("configurations") if is_apart else schemes).check(method, config, refused)
    if method == "compressed-tensors":
        from compressed_tensors.quantization import QuantizationArgs

        group = next(iter(config["config_groups"].values()))
        weights, inputs = (group.get(name) for name in ("weights", "input_activations"))
        numbers = [None if said is None else QuantizationArgs(**said) for said in (weights, inputs)]
        return schemes.compressed(*numbers, group.get("format") or config["format"])
    if method == "fp8":
        return schemes.fp8(config["activation_scheme"], config.get("weight_block_size"))
    if method == "gptq":
        return schemes.gptq({**config, "group_size": config["group_size"]})
    if method == "awq":
        return schemes.awq(config["bits"], config["group_size"], config["zero_point"])
    if method == "modelopt":
        group = next(iter(config.get("config_groups", {}).values()), {})
        stated = group.get("weights", {}).get("group_size", 0)  # if the configuration has none of its own
        return schemes.modelopt(config["quant_algo"], config.get("group_size", stated))
    if method != "mxfp4":
        raise refused(f"quantization {method}")
    return schemes.mxfp4()


def _methods(served: Mapping[str, Any]) -> set[str]:
    """Return the names of methods in a plugin's list that checkpoints use; it also has names of the host.

    A value has the checkpoint's name as its field ``name``; in old commits it is that name, or a class.
    """
    names = (getattr(value, "name", value) for value in served.values())
    return {*served, *names, *(name.partition("_")[0] for name in served)}


def answers(configs: Mapping[str, Any]) -> Answers:
    """Return the refusals by the sources on the path."""
    from fl_dispatch.hosting.quantized import schemes

    lists = {host: _methods(importlib.import_module(f"{plugin}.quantization").SERVED) for host, plugin in HOSTS.items()}
    found: Answers = {}
    for name, config in configs.items():
        hosts = [host for host, names in lists.items() if config["quant_method"] not in names]
        found[name] = {kind: [*hosts] for kind in KINDS}
        for kind in KINDS if len(hosts) < len(lists) else ():
            try:
                schemes.served(scheme_of(config), "", refused, experts=kind == "experts")
            except RefusalError:
                found[name][kind] = [*HOSTS]
        if config["quant_method"] == "mxfp4":
            found[name]["linear"] = []  # gpt-oss has no quantized linear layers
    return found


def at(source: Path, configs: str) -> Answers:
    """Return the refusals by the sources in a folder."""
    command = [sys.executable, __file__, "--answer"]
    variables = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(command, env=variables, input=configs, capture_output=True, text=True, check=True)
    answer: Answers = json.loads(done.stdout)
    return answer


def kinds() -> str:
    """Return the configurations of ``quantized_served.py`` and gpt-oss as JSON."""
    sys.path[:0] = [str(ROOT / "tests" / room) for room in ("support", "scenarios", "scenarios/quantized")]
    from quantized_served import CHECKPOINTS

    return json.dumps({**CHECKPOINTS, "mxfp4 of gpt-oss": {"quant_method": "mxfp4"}})


def table(before: Answers, now: Answers) -> list[str]:
    """Return the lines of the page: counts, and the checkpoints with changed answers."""
    lines = []
    for host in HOSTS:
        for kind in KINDS:
            counts = [sum(host in one[kind] for one in found.values()) for found in (before, now)]
            lines.append(f"| {host} | {kind} | {counts[0]} of {len(now)} | {counts[1]} of {len(now)} |")
    rows = ["", "| checkpoint | linear before | linear now | experts before | experts now |", "|---|---|---|---|---|"]
    for name, kinds in before.items():
        if kinds != now[name]:
            cells = [" and ".join(found[name][kind]) or "-" for kind in KINDS for found in (before, now)]
            rows.append(f"| {name} | {' | '.join(cells)} |")
    return ["| host | layers | refused before | refused now |", "|---|---|---|---|", *lines, *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE, metavar="COMMIT")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        print(json.dumps(answers(json.load(sys.stdin))))
        return
    said = kinds()
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", options.before, "src"], cwd=ROOT, capture_output=True, check=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as sources:
            sources.extractall(folder, filter="data")
        print("\n".join(table(at(Path(folder) / "src", said), at(ROOT / "src", said))))


if __name__ == "__main__":
    main()

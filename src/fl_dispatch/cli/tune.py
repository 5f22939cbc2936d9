"""``fl tune``: find the fastest right implementations on this machine and write them to a platform's file."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..devices import CPP, device_of
from ..errors import DispatchError
from ..evidence.origin import origin
from ..evidence.rates import Yardstick
from ..evidence.threads import free_threads
from ..evidence.timing import Clock
from ..evidence.tune.document import microseconds, platform_file
from ..evidence.tune.model import Dimensions, read_model
from ..evidence.tune.race import LEAST_SECONDS, REPEATS
from ..evidence.tune.record import TOGETHER, Record, read_record, resumed, winners_of
from ..evidence.tune.rules import agreement, merge
from ..evidence.tune.tuning import Plan, seed, steps
from ..hosting.compilation import inductor
from ..hosting.records import runs
from ..hosting.records.runs import Sizes
from ..manager import get_default_manager
from ..ops import OPERATORS, Place
from ..policy import get_policy, policy_context
from ..settings import load_config_file, platforms
from ..settings.document import read_yaml
from ..version import __version__
from .output import INTERRUPTED, AsJson, ResultFile, Rows, about, advancing, check_file, print_json
from .places import device_named, dtype_named
from .tune_engine import confirm

COLUMNS = {"operator": 18, "tokens": 7, "phase": 8, "chosen": 18, "us": 10, "why": 0}
BATCHES = {True: 256, False: 8}
"""The largest decoding step by default, on an accelerator and on a CPU."""
PREFILLS = {True: (2048, 8192), False: (512,)}
CONTEXTS = {True: (1024, 8192), False: (512,)}


def tune(
    model: Annotated[
        Path | None, typer.Option(help="A model's folder, or its config.json; no weights are needed.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(help="Take model and sizes from a serving process: its ID, or a directory of records."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="PyTorch device. Default: this machine's.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32. Default: the model's.")] = "",
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="Requests of the largest decoding step. Default: 256; 8 on a CPU.")
    ] = None,
    prefill: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of a step that reads prompts (repeatable). Default: 2048 and 8192; 512 on a CPU."),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Keys of a decoding request (repeatable). Default: 1024 and 8192; 512 on a CPU."),
    ] = None,
    tensor_parallel: Annotated[int | None, typer.Option(min=1, help="Ranks that share each layer. Default: 1.")] = None,
    op: Annotated[list[str] | None, typer.Option(help="Only this operator (repeatable).")] = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="For engines that run a model eagerly: the host's time counts.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each candidate.")] = REPEATS,
    json: AsJson = False,
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write. Default: named after the device, in your configuration directory."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore the results of an interrupted run.")] = False,
    engine: Annotated[
        bool, typer.Option("--engine", help="Then compare engines: vLLM alone, fixed policies, and the file.")
    ] = False,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of these engines, few enough that all fit at once.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Turns of these engines.")] = 5,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Say on how many keys two tunings agree, and do nothing else.")
    ] = None,
) -> None:
    """Measure the implementations of each operator at a model's shapes, and write the platform's file.

    A candidate wins only if it is correct at the shape, compiles nothing after the start, and is significantly faster
    than the default. NAME.evidence.json next to the file has every measurement.

    Exit status 0: written. 1: an engine is faster with a fixed policy than with the file. 2: nothing to tune, or an
    invalid argument. 130: interrupted; the same command continues.
    """
    if compare is not None:
        _compare(*compare, json)
        return
    captured = not eager
    if run is not None:
        if model is not None:
            raise DispatchError("--model and --run both name a model: give one of them")
        model, sizes = _served(run)
        dtype, max_batch = dtype or sizes.dtype, max_batch or sizes.requests
        tensor_parallel, eager = tensor_parallel or sizes.tensor_parallel, eager or not sizes.compiled
        captured = captured and not sizes.eager
        prefill = prefill or sorted({min(sizes.step_tokens, most) for most in (*PREFILLS[True], sizes.step_tokens)})
    if model is None:
        raise DispatchError("name the folder of the model to tune with --model, or an engine that serves it with --run")
    seed()
    dimensions = read_model(model, tensor_parallel or 1)
    place = Place(dtype_named(dtype or dimensions.dtype), device_named(device))
    file = out or platforms.tuned_path(device_of(place.device.type))
    if out is None:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_file(file)
    evidence = ResultFile(platforms.evidence_path(file), printed=json and not engine)
    plan = _plan(dimensions, place, max_batch, prefill, context, not eager, captured, repeats, op)
    _run(plan, file, evidence, fresh, json)
    if not engine:
        return
    agrees = confirm(plan, model, file, layers, rounds, json)
    if json:
        print_json(read_record(platforms.evidence_path(file)))
    if not agrees:
        raise typer.Exit(1)


def _served(place: str) -> tuple[Path, Sizes]:
    """Return the model of a run and the sizes of its steps.

    Raises:
        DispatchError: the run does not exist, recorded no sizes, or its model is not a folder.
    """
    found = runs.named(place)[0]
    if not found.sizes:
        raise DispatchError(f"--run {place}: its record has no sizes; name the model with --model, and the sizes")
    if not Path(found.model).is_dir():
        raise DispatchError(f"--run {place}: its model '{found.model}' is no folder here; name one with --model")
    return Path(found.model), Sizes(**found.sizes)


def _plan(
    model: Dimensions,
    place: Place,
    max_batch: int | None,
    prefill: list[int] | None,
    context: list[int] | None,
    compiled: bool,
    captured: bool,
    repeats: int,
    op: list[str] | None,
) -> Plan:
    manager = get_default_manager()
    manager.ensure_initialized()
    spec = device_of(place.device.type)
    shipped = platforms.shipped_path(spec)
    base = {} if shipped is None else dict(load_config_file(shipped, source_kind="platform").policy.op_tuned)
    most = max_batch or BATCHES[spec.accelerator]
    policy = replace(get_policy(), op_tuned=tuple(base.items()))
    one_graph = compiled and spec.inductor == CPP and inductor.missing_for_cpp() is None
    with policy_context(policy):
        fused = tuple(inductor.fused(OPERATORS)) if one_graph else ()
    return Plan(
        manager,
        model,
        place,
        policy,
        tuple(sorted({most, *(1 << power for power in range(most.bit_length()))})),
        tuple(sorted(set(prefill or PREFILLS[spec.accelerator]))),
        tuple(sorted(set(context or CONTEXTS[spec.accelerator]))),
        not (captured and spec.graphs),
        repeats,
        tuple(op or ()),
        one_graph,
        fused,
    )


def _run(plan: Plan, file: Path, evidence: ResultFile, fresh: bool, quiet: bool) -> None:
    rows, place = Rows(COLUMNS, quiet), plan.place
    left = [path for path in (evidence.partial, evidence.file) if not fresh and path is not None and path.is_file()]
    threads, busy = free_threads()
    spec = device_of(place.device.type)
    here = origin(place.device)
    facts = {**here, **plan.facts(here["machine"], spec.driver_version())}
    facts |= {"threads": threads, "date": time.strftime("%Y-%m-%d %H:%M:%S%z")}
    record = resumed(left, facts)
    torch.set_num_threads(record.facts["threads"])
    rows.say(f"{facts['machine']['device']}, {facts['dtype']}, threads: {record.facts['threads']}")
    if busy and not plan.accelerator:
        rows.say(f"{busy}: figures of a busy machine tell less", "yellow")
    if spec.inductor == CPP:
        rows.say("for models that are " + ("compiled into one graph" if plan.one_graph else "run eagerly"))
    if fused := plan.left_out():
        rows.say(f"not tuned, because a compiled model fuses the references: {', '.join(fused)}; --eager tunes them")
    if record.cases:
        rows.say(f"going on after {len(record.cases)} shapes, which are in {record.file}; --fresh begins anew")
    yardstick = Yardstick(Clock(place.device, plan.repeats * LEAST_SECONDS), place.dtype)
    try:
        todo = list(steps(plan, record, yardstick))
        total = sum(seconds for _, seconds, _ in todo)
        rows.say(f"{len(plan.cases())} shapes, {about(total)}")
        with advancing(total) as progress, torch.inference_mode():
            for name, seconds, do in todo:
                progress.begin(name)
                do()
                evidence.keep(record.as_data(complete=False))
                progress.end(seconds)
    except KeyboardInterrupt:
        where = evidence.stop(record.as_data(complete=False))
        rows.say(f"interrupted after {len(record.cases)} shapes, which are in {where}; run again to go on")
        raise typer.Exit(INTERRUPTED) from None
    _write(plan, record, file, evidence, rows)


def _write(plan: Plan, record: Record, file: Path, evidence: ResultFile, rows: Rows) -> None:
    figures, choices = record.figures(), record.choices()
    for key, choice in choices.items():
        best = next((figure for figure in figures[key] if figure.impl_id == choice.impl_id), None)
        time_us = microseconds(best.median) if best else ""
        rows.add((key.op_name, key.tokens, key.phase or "", choice.impl_id or "nobody", time_us, choice.why))
    counts = {name: sum(outcome[name] for outcome in record.outcomes()) for name in ("prepared", "plain")}
    rows.say(f"proven with prepared weights: {counts['prepared']}, with plain ones or none: {counts['plain']}")
    for op_name, late in record.late.items():
        for impl_id, why in late.items():
            rows.say(f"{op_name}: {impl_id} cannot win: {why}", "yellow")
    if together := record.facts[TOGETHER]:
        why = "a compiled model takes in what no rule tests"
        rows.say(f"one choice for all sizes, because {why}: {', '.join(together)}")
    winners = {key: choice.impl_id for key, choice in choices.items()}
    shipped = platforms.shipped_path(device_of(plan.place.device.type))
    base = {} if shipped is None else read_yaml(shipped, shipped.name)[0]
    base.pop("op_tuned", None)
    facts = record.facts
    title = [
        f"Tuned for {facts['machine']['device']} by fl-dispatch {__version__} on {facts['date']}, in {facts['dtype']}.",
        f"Every figure is in {platforms.evidence_path(file).name}. The keys are those of docs/guide/settings.md.",
        "A time is that of all calls of a step, with the interval that holds the median with probability 0.95.",
        f"Sizes between and above the measured ones are drawn with the seed {record.seed}.",
    ]
    bounded, without = record.bounded(), dict(plan.policy.op_tuned)
    for (op_name, _, phase), order in bounded.items():
        serves = "the default order serves"
        if op_name in without:
            serves = "the shipped file's rules serve, or the default order where none fits"
        said = "the reference serves, because the winner is wrong" if order else f"{serves}; nothing is proven"
        rows.say(f"{op_name}{f', {phase}' if phase else ''}: above the largest size {said} there")
    rules = merge(winners, without, bounded)
    file.write_text(platform_file(title, base, rules, figures, choices, record.served), encoding="utf-8")
    load_config_file(file)  # an invalid file raises now rather than at the next start
    evidence.finish({**record.as_data(complete=True), "providers": plan.providers(winners, rules)})
    rows.say(f"written: {file} and {platforms.evidence_path(file).name}")


def _compare(one: Path, other: Path, json: bool) -> None:
    """Print the number of keys on which two tunings agree.

    Raises:
        DispatchError: a file has no evidence next to it, or the two have no key in common.
    """
    first, second = (winners_of(read_record(platforms.evidence_path(file))) for file in (one, other))
    share, differ = agreement(first, second)
    common = len(set(first) & set(second))
    if not common:
        raise DispatchError(f"{one} and {other} have no key in common")
    if json:
        pairs = [{"key": str(key), "chosen": list(chosen)} for key, chosen in differ.items()]
        print_json({"agree": share, "keys": common, "differ": pairs})
        return
    rows: Any = Rows(COLUMNS)
    for key, (here, there) in differ.items():
        rows.say(f"{key}: {here or 'nobody'} and {there or 'nobody'}")
    rows.say(f"the tunings agree on {common - len(differ)} of {common} keys: {share:.3f}")

"""``fl tune --engine``: an end-to-end check of a tuning."""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ..devices import DeviceSpec, device_of
from ..errors import DispatchError
from ..evidence.tune.engine import TUNED, cells, compared, disagreements, measure, workloads
from ..evidence.tune.tuning import Plan
from ..settings import platforms
from . import engines as engine_programs
from .output import Rows

COLUMNS = {"workload": 20, "cell": 22, "tokens/s": 10, "tuned over it": 14, "interval": 16}
STEP_TOKENS = 8192
"""Prompt tokens of one step; the cache holds two steps."""
BLOCK = 128
"""Largest number of tokens in a block of a cache."""


def confirm(plan: Plan, model: Path, file: Path, layers: int | None, rounds: int, quiet: bool = False) -> bool:
    """Serve the workloads with each cell in turns, print the rates and add them to the file's evidence.

    Args:
        plan, model, file: the tuning's plan, model and file.
        layers, rounds: layers of the engines' model, and turns of each engine.
        quiet: print nothing.

    Returns:
        Whether no other policy was faster than the file.

    Raises:
        DispatchError: there is no vLLM, or the tuned engine does not start.
    """
    if importlib.util.find_spec("vllm") is None:
        raise DispatchError("--engine needs vLLM, which is not installed; the file was written without it")
    works, rows = workloads(max(plan.batches), plan.accelerator), Rows(COLUMNS, quiet)
    most = max(work.prompt + work.new for work in works)
    dimensions, requests = plan.model, max(work.batch for work in works)
    width = dimensions.latent_rank + dimensions.latent_rope or 2 * dimensions.kv_heads * dimensions.head_dim
    held = max(2 * STEP_TOKENS, *(work.batch * (work.prompt + work.new + BLOCK) for work in works if work.new > 1))
    cached = held * width * (layers or dimensions.layers) * plan.place.dtype.itemsize
    arguments: dict[str, Any] = {
        "model": str(model.absolute()),
        "dtype": str(plan.place.dtype).removeprefix("torch."),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": most,
        "max_num_seqs": requests,
        "max_num_batched_tokens": STEP_TOKENS,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": max(cached, 1 << 26),
    }
    if plan.accelerator:
        arguments["gpu_memory_utilization"] = 0.1  # must be free at the start; the cache has its own size
    arguments["enforce_eager"] = plan.eager and not plan.one_graph
    if layers is not None:
        arguments["hf_overrides"] = {"num_hidden_layers": layers}
    logs = Path(tempfile.mkdtemp(prefix="fl-tune-"))
    spec = device_of(plan.place.device.type)
    engines = cells(
        _tuned(file, spec, logs / "tuned"),
        _home(logs / "untuned"),
        platforms.shipped_path(spec) is not None,
        plan.accelerator,
    )
    rows.say(f"{len(engines)} engines take turns; their logs are in {logs}")
    found = compared(measure(engines, f"{engine_programs.__name__}.timed", arguments, works, rounds, logs, rows.say))
    for row in found:
        bounds = f"{row['low']:.3f} to {row['high']:.3f}" if row["turns"] > 1 else "one short turn"
        rows.add((row["workload"], row["cell"], f"{row['tokens_per_s']:.1f}", f"{row['tuned']:.3f}", bounds))
    told = disagreements(found)
    for line in told:
        rows.say(f"the engine disagrees with the kernels: {line}", "yellow")
    if not told:
        rows.say(f"no other policy was faster than the {TUNED} file")
    evidence = platforms.evidence_path(file)
    data = json.loads(evidence.read_text(encoding="utf-8"))
    data["engines"] = {"rounds": rounds, "layers": layers, "rows": found, "disagreements": told}
    evidence.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return not told


def _home(folder: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(folder)}


def _tuned(file: Path, spec: DeviceSpec, home: Path) -> dict[str, str]:
    """Return variables with which an engine finds a tuned file as deployed: as the user's file for this chip.

    A chip without a platform has no such file, so its engine gets the file by ``VLLM_FL_CONFIG``.
    """
    if spec.platform_config is None:
        return {"VLLM_FL_CONFIG": str(file.absolute())}
    place = home / platforms.tuned_path(spec).relative_to(platforms.user_dir().parents[1])
    place.parent.mkdir(parents=True)
    shutil.copy(file, place)
    shutil.copy(platforms.evidence_path(file), platforms.evidence_path(place))
    return _home(home)

"""Engines in one process, one after the other: ``python run_features.py job.json result.json``.

A job is ``{"runs": [{"engine": arguments of LLM, "steps": [{"do": name, ...arguments}, ...]}, ...]}``; the names are
the functions in :data:`STEPS`. The result's ``runs`` have what each step returned, and the ``reports`` of the engine's
ranks; the first one is the ``report``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def _sampling(options: dict[str, Any]) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    from vllm import SamplingParams

    options = {"temperature": 0.0, "ignore_eos": True, **options}
    if "structured_outputs" in options:
        options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
    return SamplingParams(**options)


def _prompt(ids: list[int], salt: str | None = None) -> dict[str, Any]:
    return {"prompt_token_ids": ids, **({} if salt is None else {"cache_salt": salt})}


GROUP_BYTES = 4
"""vLLM appends so many to a block's hash, to tell groups of layers apart."""
_adapters: dict[str, int] = {}
"""Folder → its number, which stays: vLLM keeps an adapter under it."""


def _values(logprobs: dict[int, Any] | None) -> dict[int, float] | None:
    return None if logprobs is None else {token: value.logprob for token, value in logprobs.items()}


def generate(
    llm: Any, prompts: list[list[int]], sampling: Any, lora: list[str | None] | None = None, salt: str | None = None
) -> list[dict[str, Any]]:
    """``sampling`` is one set of options, or one for each prompt; ``lora`` the adapter's folder for each."""
    from vllm.lora.request import LoRARequest

    options = [_sampling(each) for each in sampling] if isinstance(sampling, list) else _sampling(sampling)
    for path in filter(None, lora or ()):
        _adapters.setdefault(path, len(_adapters) + 1)
    requests = [LoRARequest(path, _adapters[path], path) if path else None for path in lora or ()]
    outputs = llm.generate(
        [_prompt(ids, salt) for ids in prompts], options, lora_request=requests or None, use_tqdm=False
    )
    return [
        {
            "tokens": [list(sample.token_ids) for sample in output.outputs],
            "texts": [sample.text for sample in output.outputs],
            "logprobs": [[_values(step) for step in sample.logprobs or ()] for sample in output.outputs],
            "prompt_logprobs": [_values(step) for step in output.prompt_logprobs or ()],
            "cached": output.num_cached_tokens,
            "why": [sample.stop_reason for sample in output.outputs],
        }
        for output in outputs
    ]


def beam_search(llm: Any, prompts: list[list[int]], width: int, max_tokens: int) -> list[list[dict[str, Any]]]:
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.beam_search([_prompt(ids) for ids in prompts], params)
    return [
        [{"tokens": beam.tokens[len(ids) :], "logprob": beam.cum_logprob} for beam in output.sequences]
        for ids, output in zip(prompts, outputs, strict=True)
    ]


def join_and_leave(
    llm: Any, prompts: list[list[int]], arrive: list[int], leave: dict[str, int], max_tokens: int
) -> dict[str, Any]:
    """Request ``i`` arrives before step ``arrive[i]``; those in ``leave`` are aborted before that step."""
    engine, params = llm.llm_engine, _sampling({"max_tokens": max_tokens})
    tokens: dict[str, list[int]] = {}
    together: list[list[int]] = []
    step, waiting = 0, dict(enumerate(arrive))
    internal: dict[int, str] = {}
    while waiting or engine.has_unfinished_requests():
        for index in [index for index, when in waiting.items() if when <= step]:
            del waiting[index]
            internal[index] = engine.add_request(f"request-{index}", _prompt(prompts[index]), params)
        gone = [internal[int(index)] for index, when in leave.items() if when == step]
        if gone:
            engine.abort_request(gone, internal=True)
        outputs = engine.step()
        for output in outputs:
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        together.append(sorted(int(output.request_id.split("-")[1]) for output in outputs))
        step += 1
    return {"tokens": tokens, "together": together}


def streamed(llm: Any, prompts: list[list[int]], sampling: dict[str, Any]) -> list[list[list[int]]]:
    """The pieces of each answer, as a client that streams gets them."""
    from vllm.sampling_params import RequestOutputKind

    engine, pieces = llm.llm_engine, [[] for _ in prompts]
    params = _sampling({**sampling, "output_kind": RequestOutputKind.DELTA})
    for number, ids in enumerate(prompts):
        engine.add_request(f"request-{number}", _prompt(ids), params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            pieces[int(output.request_id.split("-")[1])].append(list(output.outputs[0].token_ids))
    return pieces


def scheduler(llm: Any) -> str:
    return type(llm.llm_engine.engine_core.engine_core.scheduler).__name__


def embedded(llm: Any, folder: str, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Tokens for prompts of which the engine gets the embeddings only, from the checkpoint in ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM

    table = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).get_input_embeddings()
    with torch.no_grad():
        asked = [{"prompt_embeds": table(torch.tensor(ids))} for ids in prompts]
    outputs = llm.generate(asked, _sampling({"max_tokens": max_tokens}), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def prioritized(llm: Any, prompts: list[list[int]], priorities: list[int], max_tokens: int) -> list[int]:
    """The requests, all there before the first step, in the order in which they end."""
    engine, ended = llm.llm_engine, []
    for number, (ids, priority) in enumerate(zip(prompts, priorities, strict=True)):
        engine.add_request(str(number), _prompt(ids), _sampling({"max_tokens": max_tokens}), priority=priority)
    while engine.has_unfinished_requests():
        ended += [int(output.request_id) for output in engine.step() if output.finished]
    return ended


def embed(llm: Any, prompts: list[list[int]]) -> list[list[float]]:
    outputs = llm.embed([_prompt(ids) for ids in prompts], use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


def encode_plugin(llm: Any, data: Any) -> Any:
    """The IO processor's result for ``data``."""
    (output,) = llm.encode({"data": data}, pooling_task="plugin", use_tqdm=False)
    return output.outputs


def rpc(llm: Any, method: str, args: list[Any]) -> list[Any]:
    return llm.collective_rpc(method, args=tuple(args))


def reset_prefix_cache(llm: Any) -> bool:
    return llm.reset_prefix_cache()


def metrics(llm: Any, contains: str) -> dict[str, float]:
    return {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if contains in metric.name and hasattr(metric, "value")
    }


def default_sampling(llm: Any) -> dict[str, Any]:
    params = llm.get_default_sampling_params()
    return {"temperature": params.temperature, "top_k": params.top_k}


def kv_groups(llm: Any) -> list[list[Any]]:
    """``[kind, layers, block size]`` of each KV-cache group."""
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    return [
        [type(group.kv_cache_spec).__name__, len(group.layer_names), group.kv_cache_spec.block_size]
        for group in config.kv_cache_groups
    ]


def blocks(llm: Any) -> int:
    """The number of blocks of the KV cache."""
    return llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.num_blocks


def hashes(llm: Any) -> dict[str, Any]:
    """The prefix cache's hashes: how many stand for several blocks, and their bytes, without the group's."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    known = pool.cached_block_hash_to_block._cache
    return {
        "several": sum(isinstance(blocks, dict) for blocks in known.values()),
        "bytes": sorted({len(name) - GROUP_BYTES for name in known}),
    }


def weight_bytes(worker: Any) -> int:
    """Bytes that a worker's weights take now."""
    return sum(parameter.untyped_storage().nbytes() for parameter in worker.get_model().parameters())


def forms_of(worker: Any) -> dict[str, Any]:
    """The implementations that keep forms of a worker's weights, how many forms there are, and how many were made."""
    kept = {id(forms): forms for *_, forms in worker.fl_weights.declared}.values()
    names = [name for forms in kept for name in forms.made]
    return {"of": sorted(set(names)), "kept": len(names), "made": sum(forms.times for forms in kept)}


def forms(llm: Any) -> dict[str, Any]:
    (found,) = llm.collective_rpc(forms_of)
    return found


_replayed: list[list[Any]] = []
"""Owner, mode and tokens of each graph that was replayed since somebody asked."""


def watch_graphs(worker: Any) -> None:
    """Note each replay of a graph: who captured it (``model``, ``draft prefill``, ``draft decode``), and its batch."""
    from torch.cuda import CUDAGraph
    from vllm.forward_context import get_forward_context, is_forward_context_available

    runner = worker.model_runner
    drafter = getattr(runner, "speculator", None)
    managers = {
        "model": getattr(runner, "cudagraph_manager", None),
        "draft prefill": getattr(drafter, "prefill_cudagraph_manager", None),
        "draft decode": getattr(drafter, "decode_cudagraph_manager", None),
    }
    whole = {
        id(graph): [owner, "FULL", batch.num_tokens]
        for owner, manager in managers.items()
        for batch, graph in getattr(manager, "graphs", {}).items()
    }

    graphs_own = getattr(CUDAGraph.replay, "__wrapped__", CUDAGraph.replay)

    @wraps(graphs_own)
    def replay(self: Any) -> None:
        if id(self) in whole:
            _replayed.append(whole[id(self)])
        elif is_forward_context_available() and (batch := get_forward_context().batch_descriptor) is not None:
            _replayed.append(["model", get_forward_context().cudagraph_runtime_mode.name, batch.num_tokens])
        graphs_own(self)

    CUDAGraph.replay = replay  # type: ignore[method-assign]


def replays(llm: Any) -> list[list[Any]]:
    """Graphs replayed since the last call, as ``[owner, mode, tokens]``; they are noted from the first call on."""
    llm.collective_rpc(watch_graphs)
    found = list(_replayed)
    _replayed.clear()
    return found


def sleep(llm: Any, level: int) -> dict[str, Any]:
    """Bytes of this process's memory and free ones of the device before and after, and of the weights' storages while
    the engine sleeps; for each tag of vLLM's allocator, whether all of its memory is away, and what is kept of it.
    """
    before, free = _resident(), _free_on_device()
    llm.sleep(level=level)
    return {
        "before": before,
        "after": _resident(),
        "free": [free, _free_on_device()],
        "weights": llm.collective_rpc(weight_bytes)[0],
        "pools": llm.collective_rpc(pools)[0],
    }


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def moved(llm: Any, folder: str) -> dict[str, int]:
    """Bytes of this process that are mapped from files in a folder that have no name, and those of them in memory."""
    found, ours = {"mapped": 0, "resident": 0}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            ours = folder in line and line.endswith("(deleted)")
        elif ours and name in ("Size:", "Rss:"):
            found["mapped" if name == "Size:" else "resident"] += int(values[0]) << 10
    return found


def _free_on_device() -> int:
    import torch

    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def pools(worker: Any) -> dict[str, dict[str, Any]]:
    """Tag of vLLM's allocator → bytes, whether all of them are away, and how many are kept in main memory."""
    if not worker.fl_pools:
        return {}
    from vllm.device_allocator import get_mem_allocator_instance

    found: dict[str, dict[str, Any]] = {}
    for data in get_mem_allocator_instance().pointer_to_data.values():  # type: ignore[attr-defined]
        tag = found.setdefault(data.tag, {"bytes": 0, "away": True, "kept": 0})
        tag["bytes"] += data.handle[1]
        tag["away"] = tag["away"] and data.is_asleep
        tag["kept"] += 0 if data.cpu_backup_tensor is None else data.cpu_backup_tensor.nbytes
    return found


def wake_up(llm: Any, tags: list[str] | None = None) -> bool:
    return bool(llm.wake_up(tags=tags))


class _Client:
    """The trainer's words to the engine, within one process; ``draft``: about the weights of its draft model."""

    def __init__(self, llm: Any, draft: bool) -> None:
        self.llm, self.draft = llm, draft

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        (self.llm.start_draft_weight_update if self.draft else self.llm.start_weight_update)()

    def update_weights(self, update_info: Any) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update(weight_version)


def _trainer(llm: Any, backend: str, network: Any, info: dict[str, Any], draft: bool = False) -> Any:
    """One that sends what a network names."""
    from vllm.distributed.weight_transfer import ModuleSource

    from fl_transfer import weights

    kind = {"fl_shm": weights.SharedMemoryTrainer, "fl_gloo": weights.GlooTrainer}[backend]
    return kind.trainer_init(
        kind.init_info_cls(rank=0, **info), client=_Client(llm, draft), source=ModuleSource(network)
    )


def transfer(llm: Any, backend: str, folders: list[str], info: dict[str, Any], draft: bool = False) -> None:
    """A trainer sends the tensors of the checkpoint in each folder, the last one's to stay, to the model or its draft.

    Hugging Face's network of a mixture of experts has other names for them than checkpoints, which vLLM does not know.
    """
    from safetensors.torch import load_file

    sent: dict[str, Any] = {}
    trainer = _trainer(llm, backend, SimpleNamespace(named_parameters=sent.items), info, draft)
    for folder in folders:
        sent.update(load_file(Path(folder, "model.safetensors")))
        trainer.send_weights()
    trainer.shutdown()
    assert llm.reset_prefix_cache()


def train(
    llm: Any, folder: str, target: str, prompts: list[list[int]], rounds: int, samples: int, max_tokens: int
) -> dict[str, Any]:
    """Policy gradients: the engine writes completions, Hugging Face's network learns from them and sends its weights.

    Args:
        llm: the engine.
        folder: of the checkpoint.
        target: a folder for what was learnt.
        prompts: token ids.
        rounds: of completions.
        samples: completions of each prompt in a round.
        max_tokens: of each completion.

    Returns:
        For each round the mean ``rewards``, a completion's share of small token ids, and the largest difference
        (``apart``) between the engine's log-probabilities and the network's.
    """
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-2)
    trainer = _trainer(llm, "fl_shm", network, {})
    rewards, apart = [], []
    for turn in range(rounds):
        sampling = {"max_tokens": max_tokens, "temperature": 1.0, "n": samples, "seed": turn, "logprobs": 0}
        outputs = llm.generate([_prompt(ids) for ids in prompts], _sampling(sampling), use_tqdm=False)
        losses, earned, off = [], [], []
        for ids, output in zip(prompts, outputs, strict=True):
            written = torch.tensor([sample.token_ids for sample in output.outputs])
            logits = network(torch.cat((torch.tensor([ids] * samples), written), 1)).logits
            scores = logits[:, len(ids) - 1 : -1].log_softmax(-1).gather(2, written[..., None]).squeeze(2)
            told = torch.tensor([[next(iter(_values(step).values())) for step in s.logprobs] for s in output.outputs])
            off.append((scores.detach() - told).abs().max().item())
            reward = (written < network.config.vocab_size // 2).float().mean(1)
            losses.append(-((reward - reward.mean()) * scores.sum(1)).mean())
            earned.append(reward.mean().item())
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        trainer.send_weights()
        assert llm.reset_prefix_cache()
        rewards.append(sum(earned) / len(earned))
        apart.append(max(off))
    trainer.shutdown()
    network.save_pretrained(target)
    return {"rewards": rewards, "apart": apart}


def transcribe(llm: Any, sounds: list[list[float]], rate: int, max_tokens: int) -> list[list[int]]:
    """Tokens for sounds; the decoder's prompt is the token that begins a transcript."""
    import numpy as np

    asked = [
        {"prompt_token_ids": [1], "multi_modal_data": {"audio": (np.array(sound, dtype=np.float32), rate)}}
        for sound in sounds
    ]
    outputs = llm.generate(asked, _sampling({"max_tokens": max_tokens}), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def look(
    llm: Any, prompt: str, pictures: list[Any], text: str, max_tokens: int, anew: bool = False
) -> dict[str, list[Any]]:
    """Tokens for ``prompt`` with each picture and for ``text``, and how many of a prompt's tokens were known before.

    With ``anew`` none are, and no picture is.
    """
    import numpy as np
    from PIL import Image

    if anew:
        llm.llm_engine.reset_encoder_cache()
        llm.llm_engine.reset_mm_cache()
        assert llm.reset_prefix_cache()
    images = [Image.fromarray(np.array(pixels, dtype=np.uint8)) for pixels in pictures]
    asked = [{"prompt": prompt, "multi_modal_data": {"image": image}} for image in images]
    outputs = llm.generate([*asked, text], _sampling({"max_tokens": max_tokens}), use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
    }


def visit(llm: Any, around: list[str], template: str, urls: list[str], max_tokens: int) -> list[Any]:
    """Tokens for a chat with the picture at each address between two words, or what was said instead of them."""
    answers: list[Any] = []
    for url in urls:
        before, after = ({"type": "text", "text": text} for text in around)
        content = [before, {"type": "image_url", "image_url": {"url": url}}, after]
        sampling = _sampling({"max_tokens": max_tokens})
        try:
            (output,) = llm.chat(
                [{"role": "user", "content": content}], sampling, use_tqdm=False, chat_template=template
            )
        except Exception as refusal:
            answers.append(f"{type(refusal).__name__}: {refusal}")
        else:
            answers.append(list(output.outputs[0].token_ids))
    return answers


def read_for(
    llm: Any,
    requests: dict[str, list[int]],
    salt: str,
    ready: str,
    after: str = "",
    until: str = "",
    spoil: bool = False,
) -> None:
    """Read prompts for another engine, under request ids that name it.

    Args:
        llm: the engine.
        requests: id → prompt.
        salt: of the prompts' blocks.
        ready: a file that is made then.
        after, until: files that are waited for before and afterwards.
        spoil: whether what travels is made wrong.
    """
    from fl_transfer.p2p.memory.blocks import Blocks

    read = Blocks.read

    def wrong(self: Any, ids: Any, into: Any) -> None:
        read(self, ids, into)
        into.fill_(0)

    _wait_for(after)
    Blocks.read = wrong if spoil else read
    for name, ids in requests.items():
        llm.llm_engine.add_request(name, _prompt(ids, salt), _sampling({"max_tokens": 1}))
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    Path(ready).touch()
    _wait_for(until)
    Blocks.read = read


def _wait_for(file: str) -> None:
    deadline = time.monotonic() + 200
    while file and not Path(file).exists():
        assert time.monotonic() < deadline, f"{file} did not come"
        time.sleep(0.02)


def classify(llm: Any, prompts: list[list[int]]) -> list[list[float]]:
    outputs = llm.classify([_prompt(ids) for ids in prompts], use_tqdm=False)
    return [output.outputs.probs for output in outputs]


def score(llm: Any, query: str, documents: list[str]) -> list[float]:
    return [output.outputs.score for output in llm.score(query, documents, use_tqdm=False)]


def token_classify(llm: Any, prompts: list[list[int]]) -> list[list[list[float]]]:
    outputs = llm.encode([_prompt(ids) for ids in prompts], pooling_task="token_classify", use_tqdm=False)
    return [output.outputs.data.tolist() for output in outputs]


def policy(llm: Any, **arguments: Any) -> None:
    """A new global policy, for every rank; the next run starts without it."""
    llm.collective_rpc(_take_policy, args=(arguments,))


def _take_policy(worker: Any, arguments: dict[str, Any]) -> None:
    from fl_dispatch import SelectionPolicy, set_global_policy

    set_global_policy(SelectionPolicy.from_dict(**arguments))


STEPS: dict[str, Callable[..., Any]] = {
    step.__name__: step
    for step in (
        generate,
        beam_search,
        join_and_leave,
        streamed,
        scheduler,
        embedded,
        prioritized,
        embed,
        encode_plugin,
        rpc,
        reset_prefix_cache,
        metrics,
        default_sampling,
        kv_groups,
        blocks,
        hashes,
        forms,
        replays,
        sleep,
        moved,
        wake_up,
        transfer,
        train,
        transcribe,
        look,
        visit,
        read_for,
        classify,
        score,
        token_classify,
        policy,
    )
}


def run(engine: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    from fl_dispatch import reset_global_policy
    from vllm import LLM

    reset_global_policy()
    llm = LLM(**engine)
    llm.collective_rpc("fl_set_counting", args=(True,))
    results = [STEPS[do](llm, **arguments) for do, arguments in ((step.pop("do"), step) for step in steps)]
    reports = llm.collective_rpc("fl_report")
    return {"steps": results, "report": reports[0], "reports": reports}


def main(job: dict[str, Any]) -> dict[str, Any]:
    from vllm.distributed import cleanup_dist_env_and_memory

    results = []
    for each in job["runs"]:
        results.append(run(each["engine"], each["steps"]))
        gc.collect()
        cleanup_dist_env_and_memory()
    return {"runs": results}


if __name__ == "__main__":
    answer = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(answer))

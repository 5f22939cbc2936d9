"""One of two ranks, which exchanges through SGLang's own groups, with our hooks or without; see ``two_ranks``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

import two_ranks
from fl_dispatch import reset_global_policy
from fl_dispatch.hosting.ranks.collectives import report
from sglang_fl import hook_table
from sglang_fl.compat import hooks

UNHOOKED = "SGLang"
IN_ONE_ORDER = ("reduce_scatter_tensor", "reduce_scatter_along_dim", "reduce_scatterv", "reduce_scatterv_into")
"""SGLang's form of ``all_reduce`` for sums that must not depend on who gets them."""

RANKS = two_ranks.RANKS
ONE_RANK = ("pp_size", "moe_ep_size", "moe_dp_size", "attn_dp_size", "attn_cp_size", "attn_dcp_size")


def calls(group: GroupCoordinator, rank: int) -> dict[str, Callable[[], Any]]:
    """One call of each kind; every rank's tensors differ, and so do the sizes of its parts."""
    mine = torch.arange(6.0).reshape(2, 3) + 10 * rank
    part = torch.full((1 + 2 * rank, 2), float(rank + 1))
    both = torch.arange(8.0).reshape(4, 2) * (rank + 1)
    ids = torch.tensor([3, 1, 2]) + rank

    def into(call: Callable[..., Any], output: Tensor, *arguments: Any) -> Tensor:
        call(output, *arguments)
        return output

    def listed() -> list[Tensor]:
        outputs = [torch.zeros(2, 3) for _ in range(RANKS)]
        assert group.all_gather(mine, output_tensor_list=outputs) is None
        return outputs

    def in_place(call: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
        assert call(tensor) is tensor
        return tensor

    def exchange() -> Tensor | None:
        if rank == 0:
            return group.send(mine)
        return group.recv(mine.shape, mine.dtype)

    return {
        "all_reduce": lambda: in_place(group.all_reduce, mine.clone()),
        "all_reduce_strided": lambda: in_place(group.all_reduce, mine.clone().t()),
        "all_reduce_integers": lambda: in_place(group.all_reduce, ids.clone()),
        "all_gather_last": lambda: group.all_gather(mine),
        "all_gather_first": lambda: group.all_gather(mine, 0),
        "all_gather_integers": lambda: group.all_gather(ids, dim=0),
        "all_gather_into_a_list": listed,
        "all_gather_into_tensor": lambda: into(group.all_gather_into_tensor, torch.zeros(4, 3), mine),
        "all_gatherv": lambda: group.all_gatherv(part, [1, 3]),
        "all_gatherv_empty": lambda: group.all_gatherv(part[: 2 * rank], [0, 2]),
        "all_gatherv_equal": lambda: group.all_gatherv(mine),
        "all_gatherv_into": lambda: group.all_gatherv(part, [1, 3], output=torch.zeros(4, 2)),
        "all_gatherv_list": lambda: group.all_gatherv([part, 2 * part], [1, 3]),
        "reduce_scatter": lambda: group.reduce_scatter(torch.zeros(2, 2), list(both.split(2))),
        "reduce_scatter_tensor": lambda: into(group.reduce_scatter_tensor, torch.zeros(2, 2), both),
        "reduce_scatter_along_dim": lambda: group.reduce_scatter_along_dim(both, 1),
        "reduce_scatterv": lambda: group.reduce_scatterv(both, sizes=[1, 3]),
        "reduce_scatterv_into": lambda: group.reduce_scatterv(both, torch.zeros(1 + 2 * rank, 2), [1, 3]),
        "broadcast": lambda: in_place(lambda tensor: group.broadcast(tensor, 1), mine.clone()),
        "send_and_recv": exchange,
    }


def results(group: GroupCoordinator, rank: int) -> dict[str, Any]:
    """The result of each call, or the name of the error."""
    got = {}
    for name, call in calls(group, rank).items():
        try:
            got[name] = call()
        except (AssertionError, NotImplementedError, AttributeError, RuntimeError) as error:
            got[name] = type(error).__name__
    return got


def coordinate(name: str, rank: int, meeting_point: str) -> dict[str, Any]:
    """Everything, once, over the tensor-parallel group of SGLang's parallel state."""
    reset_global_policy()  # reads the settings again
    if name != UNHOOKED:
        ours = [hook for hook in hook_table.all_hooks() if ".GroupCoordinator." in hook.target]
        hooks.register(ours)
        HookRegistry.apply_hooks()
        assert hooks.unapplied(ours) == []
    parallel_state.init_distributed_environment(RANKS, rank, meeting_point, rank, "gloo")
    get_parallel().override_permanently(tp_size=RANKS, shared_experts_tp_size=None, **dict.fromkeys(ONE_RANK, 1))
    parallel_state.initialize_model_parallel("gloo")
    group = get_parallel().tp_group
    got = results(group, rank)
    counted = report()
    with envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.override(True):
        chosen = {call: calls(group, rank)[call]() for call in IN_ONE_ORDER}
    alone = torch.ones(2)
    assert get_parallel().pp_group.all_reduce(alone) is alone
    about = {"calls": counted, "one_order": chosen, "calls_after": report()}
    if name != UNHOOKED:
        about["library"] = type(group.fl_communicator.collectives).__name__
        parallel_state.destroy_model_parallel()
    return {"results": got, **about}


if __name__ == "__main__":
    two_ranks.main(coordinate)

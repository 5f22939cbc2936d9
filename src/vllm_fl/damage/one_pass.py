"""Choose a step's tokens and find its damaged rows in the same pass over the logits, for requests without processing.

vLLM's V2 sampler reads the logits in one kernel, and PyTorch finds the best of its results in two more. The kernels
here are two, prepared once (see :meth:`fl_dispatch.devices.launcher.Launcher.first`), so the check adds no launch and
reads nothing a second time. The tokens are vLLM's, because its own function draws them.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor

from fl_dispatch.hosting.damage.rows import ALIGNED, Slot
from fl_dispatch.knowledge.error_kinds import is_out_of_memory
from fl_dispatch.logger_manager import get_logger

from ..compat import versions

logger = get_logger(__name__)


class OnePass:
    """The choice of tokens that marks damaged rows.

    Args:
        sampler: vLLM's.
        most_rows: the largest number of rows of a step.
        width: the vocabulary.
        device: the device of logits.
    """

    def __init__(self, sampler: Any, most_rows: int, width: int, device: torch.device) -> None:
        self.needs_processing, self.states, self.width = sampler.needs_logits_processing, sampler.sampling_states, width
        parts = _kernels().parts_of(width)
        self.values = torch.empty(most_rows, parts, dtype=torch.float32, device=device)
        self.columns = torch.empty(most_rows, parts, dtype=torch.int32, device=device)
        self.fails = False
        """Whether the kernels failed, after which they are launched no more."""
        self._launches: dict[Any, Any] = {}
        """Layout of logits → functions that launch the kernels for them again."""

    def takes(self, requests: Any) -> bool:
        """Whether logits of these requests (places in the sampler's states) are sampled as they are."""
        return not self.fails and not self.needs_processing[requests].any()

    def choose(self, logits: Tensor, requests: Tensor, positions: Tensor, slot: Slot) -> Tensor | None:
        """Return each row's token, and mark and overwrite damaged rows.

        Marks are those of :meth:`fl_dispatch.hosting.damage.rows.HostMarks.mark`.

        Args:
            logits: ``[rows, vocabulary]``; damaged rows are overwritten.
            requests: each row's place in the sampler's states.
            positions: each row's position.
            slot: marks of these rows.

        Returns:
            Tokens of int64, ``[rows]``; ``None`` if the kernels do not take these arguments.
        """
        rows, width = logits.shape
        fits = width == self.width and len(requests) == len(positions) == rows and logits.stride(1) == 1
        if not fits or not requests.is_contiguous() or not positions.is_contiguous():
            return None
        read = (logits, requests, self.states.temperature.gpu, self.states.seeds.gpu, positions)
        addresses = [tensor.data_ptr() for tensor in read]
        if functools.reduce(operator.or_, addresses) % ALIGNED:
            return None
        layout = logits.stride(0), logits.dtype, requests.dtype
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        values, columns, launches = self.values, self.columns, self._launches.get(layout)
        try:
            if launches is None:
                if (launches := _kernels().choose_first(*read, values, columns, tokens, slot)) is not None:
                    self._launches[layout] = launches
            else:
                between = values.data_ptr(), columns.data_ptr()
                launches[0]((rows, values.shape[1], 1), (*addresses, *between, width))
                launches[1]((rows, 1, 1), (*between, tokens.data_ptr(), addresses[0], slot.address, slot.number, width))
        except Exception as error:
            self._launches.clear()
            self.fails = not is_out_of_memory(error)
            logger.info("vLLM's kernels choose tokens, because those that find damage too fail: %s", error)
            return None
        return tokens


def of(runner: Any) -> OnePass | None:
    """Return a V2 runner's choice of tokens that marks damaged rows; ``None`` if vLLM's own must choose."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from fl_dispatch.devices.launcher import prepares

    sampler = runner.sampler
    plain = type(sampler) is Sampler and not (sampler.use_fp64_gumbel or sampler.return_sampling_mask)
    if not plain or not prepares() or not versions.is_tested():
        return None
    return OnePass(sampler, runner.max_num_reqs, runner.vocab_size, runner.device)


@functools.cache
def _kernels() -> Any:
    """Return the module of the kernels, which imports Triton."""
    from . import one_pass_kernel

    return one_pass_kernel

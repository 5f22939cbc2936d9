"""Words of packed numbers, some of which lie in two words."""

from __future__ import annotations

import pytest
import torch

from fl_dispatch.hosting.quantized import orders
from fl_dispatch.ops.quantization import weight_only_linear


def packed_by_autogptq(numbers: list[int]) -> list[int]:
    """32 numbers of 3 bits in three words, as AutoGPTQ's ``pack`` has it (``qlinear_cuda_old.py``)."""
    words = [0, 0, 0]
    for place in range(10):
        words[0] |= numbers[place] << 3 * place
        words[1] |= numbers[11 + place] << 3 * place + 1
        words[2] |= numbers[22 + place] << 3 * place + 2
    words[0] |= numbers[10] << 30 & 0xFFFFFFFF
    words[1] |= numbers[10] >> 2 & 1
    words[1] |= numbers[21] << 31 & 0xFFFFFFFF
    words[2] |= numbers[21] >> 1 & 3
    return words


@pytest.mark.parametrize("dim", [0, 1])
def test_numbers_of_3_bits_are_where_autogptq_puts_them(dim: int) -> None:
    numbers = torch.randint(0, 8, (4, 64), generator=torch.Generator().manual_seed(0))
    rows = [[*packed_by_autogptq(row[:32]), *packed_by_autogptq(row[32:])] for row in numbers.tolist()]
    words = torch.tensor(rows).to(torch.uint32).view(torch.int32)
    found = orders.unpack(words if dim else words.t(), 3, dim)
    assert torch.equal(found if dim else found.t(), numbers.int())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_few_bits_keep_their_distance_from_the_middle(bits: int) -> None:
    numbers = torch.arange(1 << bits).repeat(8)[None]
    weight = orders.packed_weight(numbers, bits)
    found = weight_only_linear.reference(torch.eye(numbers.shape[1]), weight, torch.ones(1, 1))
    assert torch.equal(found.t(), (numbers - (1 << bits - 1)).float())


def test_no_words() -> None:
    assert orders.unpack(torch.zeros(0, 3, 5, dtype=torch.int32), 3, 1).shape == (0, 32, 5)

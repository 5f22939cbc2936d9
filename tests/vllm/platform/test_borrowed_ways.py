"""Ways of vLLM that it keeps for its own platforms or offers to others: taken where they fit, refused where not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fl_dispatch import SelectionPolicy, policy_context
from fl_transfer.weights import _weights
from vllm_fl.compat import determinism


@pytest.mark.parametrize(
    ("invariant", "cuda", "asked"), [(True, "13.0", ["cublaslt"]), (True, None, []), (False, "13.0", [])]
)
def test_batch_invariant_products_are_cublaslts_on_nvidia_gpus(
    monkeypatch: pytest.MonkeyPatch, invariant: bool, cuda: str | None, asked: list[str]
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", cuda)

    def choose(backend: str) -> None:
        chosen.append(backend)

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", choose)
    with policy_context(SelectionPolicy(batch_invariant=invariant)):
        determinism.choose_blas()
    assert chosen == asked


@pytest.mark.parametrize(("owners", "sent"), [(None, True), ((0,), True), ((0, 1), True), ((1,), False)])
def test_a_trainer_sends_what_its_first_rank_owns(owners: tuple[int, ...] | None, sent: bool) -> None:
    weight = torch.zeros(1)
    source = SimpleNamespace(metadata=[SimpleNamespace(owners=owners)], iter_full=lambda: iter([("w", weight)]))
    if sent:
        assert list(_weights(source)) == [("w", weight)]
        return
    with pytest.raises(ValueError, match="some parameters of the source lie on other ranks"):
        _weights(source)

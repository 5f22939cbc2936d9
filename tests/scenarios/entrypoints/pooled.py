"""Vectors and classes of texts equal Hugging Face's: of a decoder's last token, and of an encoder without KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import Tensor

import variants
from host_engines import WRONG, Encode, Engine, Host, Scenario, Served, clean, ran

TEXTS = ["the river", "water and salt of the sea", "hello world", "the " * 90 + "sea"]
LABELS = 3
KINDS = ("embedding", "classes", "encoder")


class Pooling(Scenario):
    """Each model answers all texts twice, each text separately, and all texts with a wrong attention."""

    ENGINE: ClassVar[Mapping[str, Any]]
    """Arguments of each engine."""
    WHOLE: ClassVar[Mapping[str, Any]]
    """Further arguments of an encoder's engine, in which all tokens attend to each other."""
    PROBABILITIES: ClassVar[bool]
    """Whether the host answers with probabilities of classes instead of logits."""
    TOLERANCE: ClassVar[float] = 1e-4

    def cases(self) -> Mapping[str, Sequence[Any]]:
        return {"kind": KINDS}

    def classifier(self, model: Path, target: Path) -> Path:
        """Write a classifier of texts in the host's form."""
        return variants.classifier(model, target, LABELS)

    def encoder(self, target: Path) -> Path:
        """Write an encoder in the host's form."""
        return variants.encoder(target)

    @pytest.fixture(scope="class")
    def models(self, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
        folder = tmp_path_factory.mktemp("pooling")
        return {
            "embedding": checkpoint("qwen3"),
            "classes": self.classifier(checkpoint("qwen3"), folder / "classes"),
            "encoder": self.encoder(folder / "encoder"),
        }

    @pytest.fixture(scope="class")
    def served(self, host: Host, models: Mapping[str, Path]) -> Callable[[str], Served]:
        def engine(kind: str) -> Engine:
            classes, wrong = kind == "classes", {"paged_attention": WRONG}
            asked = [Encode(TEXTS, classes)] * 2 + [Encode([text], classes) for text in TEXTS]
            options = self.WHOLE if kind == "encoder" else {}
            return Engine(models[kind], [*asked, Encode(TEXTS, classes, wrong)], {**self.ENGINE, **options})

        started = dict(zip(KINDS, host.serve(*map(engine, KINDS), plugins=["wrong_plugin"], deny="wrong"), strict=True))
        return lambda kind: started[kind].result()

    @pytest.fixture(scope="class")
    def right(self, models: Mapping[str, Path]) -> Callable[[str], Tensor]:
        return cache(lambda kind: self.expected(kind, models[kind]))

    def expected(self, kind: str, model: Path) -> Tensor:
        """Return Hugging Face's vectors, ``[texts, elements]``."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        name = "AutoModelForSequenceClassification" if kind == "classes" else "AutoModel"
        network = getattr(transformers, name).from_pretrained(model, dtype=torch.float32).eval()
        network.config.pad_token_id = 0
        rows = []
        for text in TEXTS:
            with torch.no_grad():
                found = network(torch.tensor([tokenizer(text).input_ids]))
            if kind == "classes":
                rows.append(found.logits[0].softmax(-1) if self.PROBABILITIES else found.logits[0])
            else:
                hidden = found.last_hidden_state[0, 0 if kind == "encoder" else -1]
                rows.append(torch.nn.functional.normalize(hidden, dim=-1))
        return torch.stack(rows)

    def test_vectors_equal_hugging_face(
        self, kind: str, served: Callable[[str], Served], right: Callable[[str], Tensor]
    ) -> None:
        first, again, *alone, _ = (torch.tensor(answer.returned) for answer in served(kind).answers)
        for got in (first, again, torch.cat(alone)):
            assert (got - right(kind)).abs().max() < self.TOLERANCE
        assert (right(kind)[0] - right(kind)[1]).abs().max() > 0.01  # texts give different results

    def test_a_wrong_attention_changes_them(
        self, kind: str, served: Callable[[str], Served], right: Callable[[str], Tensor]
    ) -> None:
        wrong = torch.tensor(served(kind).answers[-1].returned)
        assert (wrong - right(kind)).abs().max() > 100 * self.TOLERANCE
        assert served(kind).counted("paged_attention") > 0

    def test_our_operators_ran(self, kind: str, host: Host, served: Callable[[str], Served]) -> None:
        (report,) = served(kind).reports
        assert clean(report, host)
        assert ran(report)["paged_attention"]

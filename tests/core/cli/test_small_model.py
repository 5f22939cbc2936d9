"""The small model: its files, the text that it learned and the text that it did not, and a training that was ended."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fl_dispatch.cli import small_model

TOOLS = Path(__file__).parents[3] / "tools"


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module that trains, with rows of few tokens, on one thread."""
    monkeypatch.setattr(sys, "path", [str(TOOLS), *sys.path])
    import train_small_model

    for name, value in {"ROWS": 2, "ROW": 16, "CONTEXT": 32}.items():
        monkeypatch.setattr(train_small_model, name, value)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield train_small_model
    torch.set_num_threads(threads)


def test_its_files_say_what_it_is() -> None:
    assert (small_model.CHECKPOINT / "model.safetensors").stat().st_size < 3_000_000
    config = json.loads((small_model.CHECKPOINT / "config.json").read_text())
    assert (config["model_type"], config["dtype"], config["head_dim"]) == ("llama", "bfloat16", 128)
    assert "Python Software Foundation License" in (small_model.FOLDER / "NOTICE.md").read_text()
    assert small_model.facts()["bytes"] == len(small_model.HELD_OUT.read_bytes())


def test_a_chat_is_a_text_of_its_messages_that_the_model_goes_on_with() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_model.CHECKPOINT)
    said = ["Answer in English.", "The function returns a list of"]
    chat = [{"role": role, "content": text} for role, text in zip(("system", "user"), said, strict=True)]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert tokens == tokenizer("\n\n".join(said))["input_ids"]


def test_no_paragraph_of_the_held_out_text_is_in_what_it_was_trained_on(training: ModuleType) -> None:
    texts, _ = training.split(training.documents())
    learned = set("\n\n".join(texts).split("\n\n"))
    paragraphs = small_model.HELD_OUT.read_text().strip().split("\n\n")
    assert len(paragraphs) > 30
    assert len(learned) > 10_000
    assert not learned & set(paragraphs)


def test_a_training_that_was_ended_goes_on_to_the_same_weights(training: ModuleType, tmp_path: Path) -> None:
    stream = torch.randint(3, 2048, (500,), generator=torch.Generator().manual_seed(0))
    whole, first = training.Training(4), training.Training(4)
    for _ in range(4):
        whole.advance(stream)
    for _ in range(2):
        first.advance(stream)
    first.keep(tmp_path / "state.pt")
    second = training.Training(4)
    second.restore(tmp_path / "state.pt")
    second.run(stream, stream, tmp_path / "state.pt", time.monotonic() + 60)
    assert second.step == 4
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name]), name


def test_only_english_prose_is_learned(training: ModuleType) -> None:
    from small_model_text import is_prose

    assert is_prose("Return the number of items in a container, such as a list or a string.")
    assert not is_prose("Too short to say.")
    assert not is_prose(">>> x = [1, 2, 3]; y = {4: 5}; print(x[0], y[4], sep='|')")

"""A host's own server answers an OpenAI client that has the key with Hugging Face's tokens.

A host's module has the fixtures ``client``, which has the key, and ``log``, the server's log file. The model's name is
"tiny".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest

from host_engines import Scenario
from running import MAX_TOKENS, PROMPTS

KEY = "open-sesame"
ASK: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": MAX_TOKENS,
    "temperature": 0.0,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}


class OverHTTP(Scenario):
    """Completions and chats, whole and streamed, and the log."""

    WARNED: ClassVar[Sequence[str]]
    """Variables of the server that our package warns about."""
    HOST_WARNS_TOO: ClassVar[bool] = False

    def cases(self) -> Mapping[str, Sequence[Any]]:
        return {"row": range(len(PROMPTS)), "variable": self.WARNED}

    def test_a_completion_has_the_tokens_of_hugging_face(
        self, row: int, client: Any, expected: Callable[[str], list[list[int]]]
    ) -> None:
        answer = client.completions.create(prompt=PROMPTS[row], **ASK)
        assert answer.choices[0].token_ids == expected("qwen3")[row]

    def test_a_streamed_completion_has_the_same_tokens(
        self, client: Any, expected: Callable[[str], list[list[int]]]
    ) -> None:
        parts = [
            chunk.choices[0].token_ids for chunk in client.completions.create(prompt=PROMPTS[1], stream=True, **ASK)
        ]
        assert [token for part in parts for token in part or []] == expected("qwen3")[1]
        assert len(parts) > 1

    def test_chat_answers_and_streams_the_same_text(self, client: Any) -> None:
        said = [{"role": "user", "content": "hello world"}]
        ask = {**ASK, "extra_body": {"ignore_eos": True}, "messages": said}
        whole = client.chat.completions.create(**ask).choices[0].message.content
        chunks = client.chat.completions.create(stream=True, **ask)
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert whole
        assert len(parts) > 1
        assert "".join(parts) == whole

    def test_without_the_key_a_request_is_refused(self, client: Any) -> None:
        stranger = openai.OpenAI(base_url=client.base_url, api_key="another", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            stranger.completions.create(prompt=PROMPTS[0], **ASK)
        assert client.models.list().data[0].id == "tiny"

    def test_a_warning_of_a_setting_is_given_once_with_level_date_and_logger(
        self, variable: str, client: Any, log: Path
    ) -> None:
        """Engines are separate processes that also read the settings."""
        lines = [line for line in log.read_text().splitlines() if variable in line]
        ours = [line for line in lines if not self.HOST_WARNS_TOO or "fl" in line.partition("]")[0]]
        assert len(ours) == 1
        assert re.match(rf"WARNING \d\S+ \S+ \[\w*fl\w*\.\S+\] environment variable {variable}: ", ours[0])

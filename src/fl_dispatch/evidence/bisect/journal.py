"""The record of an investigation's questions and answers, so that an interrupted one can continue."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import DispatchError

HEADER = "investigation"


class Journal:
    """Question → answer as plain data, each in a file of a folder; without a folder only in memory.

    Args:
        folder: the folder, made if missing.
        header: everything that the answers depend on. A folder of another investigation is refused.

    Raises:
        DispatchError: the folder belongs to another investigation, or cannot be written.
    """

    def __init__(self, folder: Path | None, header: Mapping[str, Any]) -> None:
        self.folder = folder
        self._kept: dict[str, Any] = {}
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DispatchError(f"{folder} cannot be made for the record of this run: {error}") from error
        before, plain = self.get(HEADER), json.loads(json.dumps(dict(header)))
        if before is not None and before != plain:
            apart = sorted(key for key in before.keys() | plain.keys() if before.get(key) != plain.get(key))
            raise DispatchError(
                f"{folder} holds another investigation: {', '.join(apart)} differ (there {before.get(apart[0])!r}, "
                f"here {plain.get(apart[0])!r}); name another folder, or the same options"
            )
        if before is None:
            self.put(HEADER, plain)

    def get(self, question: str) -> Any:
        """Return the answer, or ``None``, also for an answer that was truncated when it was written."""
        if question not in self._kept and self.folder is not None and (file := self._file(question)).exists():
            try:
                self._kept[question] = json.loads(file.read_text(encoding="utf-8"))["answer"]
            except (ValueError, KeyError):
                return None
        return self._kept.get(question)

    def put(self, question: str, answer: Any) -> None:
        """Store an answer."""
        self._kept[question] = answer
        if self.folder is None:
            return
        file = self._file(question)
        new = file.with_name(f"{file.name}.{os.getpid()}")
        new.write_text(json.dumps({"question": question, "answer": answer}) + "\n", encoding="utf-8")
        new.replace(file)

    def _file(self, question: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{hashlib.sha256(question.encode()).hexdigest()[:20]}.json"

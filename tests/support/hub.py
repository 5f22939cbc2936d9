"""A hub of checkpoints on this machine that answers the requests of Hugging Face's client."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def commit(revision: str) -> str:
    """Return the hash that stands for a revision."""
    return hashlib.sha1(revision.encode()).hexdigest()


@contextmanager
def served(name: str, revisions: Mapping[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Serve one checkpoint from a local hub.

    Args:
        name: of the checkpoint, ``owner/name``.
        revisions: branch → its folder.

    Yields:
        The hub's address, and a list of the files fetched so far, as ``branch/file``.
    """
    folders = {asked: folder for branch, folder in revisions.items() for asked in (branch, commit(branch))}
    branches = {asked: branch for branch in revisions for asked in (branch, commit(branch))}
    fetched: list[str] = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
            begin, _, rest = path.partition(f"/{name}")
            question, _, rest = rest.strip("/").partition("/")
            revision, _, file = rest.partition("/")
            revision = revision or "main"
            if begin not in ("", "/api/models") or revision not in folders:
                self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            elif question == "resolve":
                self._file(folders[revision] / file, branches[revision])
            elif question == "tree":
                self._json(_tree(folders[revision]))
            else:
                self._json(_description(name, branches[revision], folders[revision]))

        def _file(self, file: Path, branch: str) -> None:
            if not file.is_file():
                self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            if self.command == "GET":
                fetched.append(f"{branch}/{file.name}")
            content = file.read_bytes()
            tag = hashlib.sha1(content).hexdigest()
            self._answer(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": commit(branch)})

        def _json(self, value: Any) -> None:
            self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _answer(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", fetched
        server.shutdown()


def _tree(folder: Path) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": commit(file.name)}
        for file in sorted(folder.iterdir())
    ]


def _description(name: str, branch: str, folder: Path) -> dict[str, Any]:
    files = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
    return {"_id": name, "id": name, "modelId": name, "sha": commit(branch), "siblings": files, "tags": []}

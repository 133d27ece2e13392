"""A server that answers huggingface_hub's client as the hub does."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/[^/?]+)?(?:\?.*)?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/[^/]+/([^?]+)(?:\?.*)?")


class FakeHub:
    """Repositories by their ids, and what was asked for.

    gated: ids of repositories whose files are refused
    downloads: paths of the files that were downloaded
    """

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = cache
        self.repositories: dict[str, Mapping[str, bytes]] = {}
        self.gated: set[str] = set()
        self.downloads: list[str] = []
        self.requests = 0
        self._patch = monkeypatch.setattr

    def without_network(self) -> None:
        """Let the client refuse to ask."""
        self._patch("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def answer(self, method: str, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Return the status, the body and the headers of an answer."""
        self.requests += 1
        if (found := _API.fullmatch(path)) is not None:
            name, what = found.groups()
            if name not in self.repositories:
                return 401, b"{}", {"X-Error-Code": "RepoNotFound"}
            files = self.repositories[name]
            described = [
                {"type": "file", "path": file, "size": len(data), "oid": _hash(data)}
                for file, data in files.items()
            ]
            siblings = [{"rfilename": file} for file in files]
            whole = {"id": name, "sha": self._commit(name), "siblings": siblings}
            return 200, json.dumps(described if what == "tree" else whole).encode(), {}
        if (found := _FILE.fullmatch(path)) is None:
            return 404, b"", {}
        name, file = found.groups()
        if name in self.gated:
            return (
                403,
                b"",
                {"X-Error-Code": "GatedRepo", "X-Error-Message": "access is restricted"},
            )
        data = self.repositories.get(name, {}).get(file)
        if data is None:
            return 404, b"", {"X-Error-Code": "EntryNotFound"}
        if method == "GET":
            self.downloads.append(file)
        return 200, data, {"ETag": f'"{_hash(data)}"', "X-Repo-Commit": self._commit(name)}

    def _commit(self, name: str) -> str:
        return _hash("".join(sorted(self.repositories[name])).encode())


def _hash(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def fake_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve a hub for huggingface_hub's client in this process. cache: its cache"""
    hub = FakeHub(cache, monkeypatch)

    class Handler(BaseHTTPRequestHandler):
        # Of HTTP/1.0, so that no thread waits for a further request of a connection.
        protocol_version = "HTTP/1.0"

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            status, body, headers = hub.answer(self.command, self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    constants = "huggingface_hub.constants"
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(f"{constants}.ENDPOINT", url)
    monkeypatch.setattr(
        f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(f"{constants}.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()

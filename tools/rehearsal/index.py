"""A package index on this machine: what is published to it, pip finds there."""

from __future__ import annotations

import http.server
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename


class PublishError(Exception):
    """An index would refuse the files."""


class Index:
    """A folder served as an index: a page for each project that lists its files.

    Attributes:
        folder: what is served.
        address: of the index, for pip.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder / "simple"
        self.address = f"http://127.0.0.1:{port}/simple/"

    def publish(self, files: list[Path]) -> None:
        """Add files; a PublishError where one is no distribution, or is there already: what is published stays as it is."""
        for file in files:
            try:
                parse = parse_wheel_filename if file.suffix == ".whl" else parse_sdist_filename
                name = canonicalize_name(parse(file.name)[0])
            except ValueError as error:
                raise PublishError(f"{file.name} is no distribution: {error}") from error
            target = self.folder / name / file.name
            if target.exists():
                raise PublishError(f"{file.name} has been published.")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)

    def pages(self) -> list[str]:
        """The addresses of the projects' pages."""
        return [f"{self.address}{page.name}/" for page in sorted(self.folder.glob("*"))]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def serve(folder: Path) -> Iterator[Index]:
    """An index in `folder`, served for the block."""
    handler = partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        index = Index(folder, server.server_address[1])
        index.folder.mkdir(parents=True)
        yield index
        server.shutdown()

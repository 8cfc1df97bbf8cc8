"""A build behind a mirror that asks for a password, which then is in no layer and in no history."""

from __future__ import annotations

import base64
import contextlib
import http.server
import re
import tarfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from io import BytesIO
from urllib.parse import urljoin

import pytest
from docker_host import BASE, ROOT, debian_mirror, pip_index

USER, PASSWORD = "builder", "a-password-of-this-test"
BASIC = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


class Mirror(http.server.BaseHTTPRequestHandler):
    """Debian's archive and a package index, for those who have the password."""

    def do_GET(self) -> None:
        kind, _, path = self.path[1:].partition("/")
        if self.headers.get("Authorization") != BASIC:
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Basic realm=mirror")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        url = {"debian": f"{debian_mirror()}/", "simple": pip_index()}[kind] + path
        asked = urllib.request.Request(url, headers={"Accept": "text/html, */*;q=0.1"})
        try:
            with urllib.request.urlopen(asked, timeout=120) as answer:
                code, body, type_ = answer.status, answer.read(), answer.headers["Content-Type"]
        except urllib.error.HTTPError as error:
            code, body, type_ = error.code, b"", "text/plain"
        if kind == "simple":  # its links are relative to itself, not to this mirror
            body = re.sub(
                rb'(?<=href=")[^"]+', lambda m: urljoin(url, m[0].decode()).encode(), body
            )
        self.server.served.add(self.path)  # type: ignore[attr-defined]
        self.send_response(code)
        self.send_header("Content-Type", type_ or "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: the tests' output is theirs."""


@pytest.fixture
def mirror():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        server.served = set()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def files_of(image: str, host, folder) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each file of each layer, also of those that a later one removed."""
    archive = folder / "image.tar"
    host.run("save", "-o", str(archive), image)
    with tarfile.open(archive) as saved:
        for member in filter(tarfile.TarInfo.isfile, saved):
            content = saved.extractfile(member).read()
            yield member.name, content
            with (
                contextlib.suppress(tarfile.ReadError),
                tarfile.open(fileobj=BytesIO(content)) as layer,
            ):
                for file in filter(tarfile.TarInfo.isfile, layer):
                    yield file.name, layer.extractfile(file).read()


def test_a_password_of_a_mirror_is_used_and_stays_outside(host, mirror, tmp_path):
    place = f"http://{USER}:{PASSWORD}@127.0.0.1:{mirror.server_port}"
    secrets = {
        "uv": f'index-url = "{place}/simple/"\n',
        "pip": f"[global]\nindex-url = {place}/simple/\n",
        "apt": f"Types: deb\nURIs: {place}/debian\nSuites: bookworm\nComponents: main\n",
    }
    options = []
    for name, text in secrets.items():
        (tmp_path / name).write_text(text)
        options += ["--secret", f"id={name},src={tmp_path / name}"]
    image = "lmcache-xpu-test/mirror"
    done = host.run(
        *("build", "--network", "host", "--no-cache", "--build-arg", f"BASE_IMAGE={BASE}"),
        *("--target", "wheel-build", "--progress", "plain", *options, "-t", image),
        *("-f", str(ROOT / "docker/Dockerfile"), str(ROOT)),
        timeout=900,
    )
    served = mirror.served
    assert any(path.startswith("/debian/pool/") and "python3" in path for path in served)
    assert {"/simple/uv/", "/simple/hatchling/"} <= served
    assert PASSWORD not in done.stdout
    assert PASSWORD not in host.run("history", "--no-trunc", image).stdout
    words = [PASSWORD.encode(), BASIC.split()[1].encode()]
    names = []
    for name, content in files_of(image, host, tmp_path):
        names.append(name)
        assert not any(word in content for word in words), name
    assert any(name.endswith(".whl") for name in names)  # it was this image that was read

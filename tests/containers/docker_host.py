"""A Docker engine for the tests: the one that runs, else one of their own.

Nothing is pulled: images are built on a base made with debootstrap. What this machine needs to
reach its package indexes (certificates, a folder or an index that pip is configured with) goes into
that base and into a build secret, neither of which outlives the tests.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASE = "lmcache-xpu-test/base"
INDEX = re.compile(r"index-url='(https?://[^']+)'")
DEFAULT_INDEX = re.compile(r"Package Index\s+\(default\s+(https?://[^\s)]+)\)")  # in pip's help
# Compose v2 and buildx are no packages of Debian 12; those of 13 run there.
PLUGINS = {"docker-compose": "compose", "docker-buildx": "buildx"}


class DockerHost:
    """`with DockerHost() as host: host.run("build", ...)`. Stops what it has started."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.env = dict(os.environ)
        self.secret: Path | None = None
        self.folder = Path()

    def __enter__(self) -> DockerHost:
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="containers-"))
            self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._install()
            self._start()
            self.env["DOCKER_BUILDKIT"] = "1"
            self._make_base()
            self._make_secret()
        except BaseException:  # Ctrl-C too: nothing that was started stays
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, *args: str, timeout: float = 300, check: bool = True, **options):
        """Run `docker ARGS`; its output, both streams together unless `options` say otherwise."""
        run_options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
        env = {**self.env, **run_options.pop("env", {})}
        done = subprocess.run(["docker", *args], env=env, text=True, timeout=timeout, **run_options)
        if check and done.returncode:
            pytest.fail(f"docker {' '.join(args)}: exit {done.returncode}\n{done.stdout[-6000:]}")
        return done

    def build(self, tag: str, target: str, *args: str, file: str = "docker/Dockerfile") -> None:
        """Build one target of a Dockerfile."""
        options = ["--network", "host", "--build-arg", f"BASE_IMAGE={BASE}", "--target", target]
        if self.secret is not None:
            options += ["--secret", f"id=uv,src={self.secret}"]
        context = str((ROOT / file).parent) if "standins" in file else str(ROOT)
        self.run(
            *("build", *options, *args, "-t", tag, "-f", str(ROOT / file), context), timeout=1200
        )

    def _install(self) -> None:
        missing = [
            package
            for program, package in (("dockerd", "docker.io"), ("debootstrap", "debootstrap"))
            if shutil.which(program, path=self._path()) is None
        ]
        if missing:
            if os.geteuid():
                pytest.fail(
                    f"no {', '.join(missing)} here, and no rights to install it.\n"
                    "Install it, run as root, or set SKIP_CONTAINERS=1."
                )
            _call("apt-get", "update", "-q")
            _call("apt-get", "install", "-qy", "--no-install-recommends", *missing)
        self.env["PATH"] = self._path()
        version = self.run("compose", "version", "--short", check=False).stdout
        if not re.match(r"v?(2\.(2[4-9]|[3-9]\d)|[3-9])", version):
            self._install_plugins()

    def _install_plugins(self) -> None:
        mirror = debian_mirror()
        url = f"{mirror}/dists/trixie/main/binary-amd64/Packages.xz"
        with urllib.request.urlopen(url, timeout=120) as answer:
            index = lzma.decompress(answer.read()).decode()
        plugins = self.folder / "config/cli-plugins"
        plugins.mkdir(parents=True)
        for package, plugin in PLUGINS.items():
            entry = index.partition(f"\nPackage: {package}\n")[2].partition("\n\n")[0]
            file = re.search(r"^Filename: (.*)$", entry, re.MULTILINE)
            assert file, f"no {package} in {url}"
            archive, unpacked = self.folder / f"{package}.deb", self.folder / package
            urllib.request.urlretrieve(f"{mirror}/{file[1]}", archive)
            _call("dpkg-deb", "-x", str(archive), str(unpacked))
            [program] = unpacked.glob(f"usr/lib*/docker/cli-plugins/docker-{plugin}")
            shutil.copy(program, plugins / f"docker-{plugin}")
        self.env["DOCKER_CONFIG"] = str(self.folder / "config")

    def _start(self) -> None:
        if self.run("info", check=False).returncode == 0:
            return
        if os.geteuid():
            pytest.fail("no Docker runs here. Start it, run as root, or set SKIP_CONTAINERS=1.")
        socket = self.folder / "docker.sock"
        with (self.folder / "dockerd.log").open("wb") as log:
            daemon = subprocess.Popen(
                [
                    *("dockerd", "--host", f"unix://{socket}"),
                    *("--pidfile", str(self.folder / "pid")),
                    *("--data-root", str(self.folder / "data")),
                    *("--exec-root", str(self.folder / "exec")),
                ],
                stdout=log,
                stderr=log,
                env=self.env,
                start_new_session=True,
            )
        self._stack.callback(self._stop, daemon)
        self.env["DOCKER_HOST"] = f"unix://{socket}"
        for _ in range(120):
            if self.run("info", check=False).returncode == 0:
                return
            if daemon.poll() is not None:
                break
            time.sleep(0.5)
        tail = (self.folder / "dockerd.log").read_text()[-3000:]
        pytest.fail(f"no Docker engine could be started; or set SKIP_CONTAINERS=1.\n{tail}")

    def _stop(self, daemon: subprocess.Popen) -> None:
        if left := self.run("ps", "-aq", check=False).stdout.split():
            self.run("rm", "-fv", *left, check=False)
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()
        for line in Path("/proc/mounts").read_text().splitlines()[::-1]:
            if (mounted := line.split()[1]).startswith(str(self.folder)):
                subprocess.run(["umount", "-l", mounted], check=False)

    def _make_base(self) -> None:
        """Debian 12 as debootstrap makes it, with the certificates that this machine trusts."""
        if self.run("image", "inspect", BASE, check=False).returncode == 0:
            return
        tree = self.folder / "base"
        _call("debootstrap", "--variant=minbase", "bookworm", str(tree), debian_mirror())
        changes = []
        own = Path("/usr/local/share/ca-certificates")
        if (bundle := os.environ.get("SSL_CERT_FILE")) and own.is_dir():
            shutil.copytree(own, tree / "usr/local/share/ca-certificates", dirs_exist_ok=True)
            (tree / "etc/ssl/certs").mkdir(parents=True, exist_ok=True)
            shutil.copy(bundle, tree / "etc/ssl/certs/ca-certificates.crt")
            where = "/etc/ssl/certs/ca-certificates.crt"
            changes = ["--change", f"ENV SSL_CERT_FILE={where} PIP_CERT={where}"]
        command = f"tar -C {tree} -c . | docker import {' '.join(map(repr, changes))} - {BASE}"
        subprocess.run(["sh", "-c", command], env=self.env, check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(tree)

    def _make_secret(self) -> None:
        """pip's index and find-links in uv's words; folders are served over loopback."""
        config = _pip("config", "list")
        lines = []
        if index := INDEX.search(config):
            lines.append(f'index-url = "{index[1]}"')
        if links := re.search(r"find-links='([^']+)'", config):
            served = [self._serve(link) for link in links[1].replace("\\n", " ").split()]
            lines.append(f"find-links = {[link for link in served if link]}".replace("'", '"'))
        if lines:
            self.secret = self.folder / "uv.toml"
            self.secret.write_text("\n".join(lines) + "\n")

    def _serve(self, place: str) -> str | None:
        if place.startswith("http"):
            return place
        if not (folder := Path(place.removeprefix("file://"))).is_dir():
            return None
        handler = functools.partial(_Quiet, directory=str(folder))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self._stack.callback(server.server_close)
        self._stack.callback(server.shutdown)
        return f"http://127.0.0.1:{server.server_port}/"

    @property
    def has_torch(self) -> bool:
        """Whether the secret names a place with PyTorch's builds for CPU."""
        return self.secret is not None and "find-links" in self.secret.read_text()

    def _path(self) -> str:
        return f"{os.environ['PATH']}:/usr/sbin:/sbin"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing: the tests' output is theirs."""


def debian_mirror() -> str:
    """The first Debian archive that this machine's apt is configured with."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian"]
    archives = subprocess.run(asked, capture_output=True, text=True, timeout=60).stdout.split()
    if not archives:
        pytest.fail("apt knows no Debian archive here. Configure one, or set SKIP_CONTAINERS=1.")
    return archives[0].rstrip("/")


def pip_index() -> str:
    """The package index that pip asks on this machine, with a slash at its end."""
    index = INDEX.search(_pip("config", "list")) or DEFAULT_INDEX.search(_pip("install", "--help"))
    assert index is not None
    return index[1].rstrip("/") + "/"


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout


def _call(*command: str) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    if done.returncode:
        pytest.fail(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-3000:]}")

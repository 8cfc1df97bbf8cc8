"""Run what a rendered pod's container would run, as a process on this machine.

As near to the pod as it goes without a container: the pod's variables and arguments, its user, no
capabilities, a root file system that is read-only, and its volumes as the only places to write.
Needs root and mount namespaces (`confinable`); without, the same process runs unconfined.

Two things differ, both for the machine's sake: it listens on loopback, on a port that is free;
and the volumes are directories elsewhere, so that their paths in variables are others.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from chart import Objects, container, environment

POLL_S = 0.2


class PodProcess:
    """The engine's container of a workload, as a process: `with pod.running(): ...`."""

    def __init__(
        self, objects: Objects, workload: dict, place: Path, secrets: dict[str, str], port: int
    ) -> None:
        engine = container(workload)
        spec = workload["spec"]["template"]["spec"]
        self.user = spec["securityContext"]["runAsUser"]
        self.log = place / "log"
        self.grace_s = spec["terminationGracePeriodSeconds"]
        # Longest first: one volume is mounted inside of another.
        mounts = sorted(engine["volumeMounts"], key=lambda mount: -len(mount["mountPath"]))
        self.volumes = {
            mount["mountPath"]: place / "volumes" / mount["name"] / mount.get("subPath", "")
            for mount in mounts
            if mount["mountPath"] != "/dev/shm"  # the machine's own
        }
        variables = {
            name: secrets.get(value, self._here(value))
            for name, value in environment(workload).items()
        }
        variables |= {"LMCACHE_XPU_HOST": "127.0.0.1", "LMCACHE_XPU_PORT": str(port)}
        self.env = {**variables, "PATH": os.environ["PATH"], "TMPDIR": str(self.volumes["/tmp"])}
        program = Path(sys.executable).with_name(engine["command"][0])
        self.argv = [str(program), *engine["command"][1:], *engine["args"]]
        for volume in self.volumes.values():
            volume.mkdir(parents=True, exist_ok=True)

    def _here(self, value: str) -> str:
        for path, volume in self.volumes.items():
            if value == path or value.startswith(path + "/"):
                return str(volume) + value.removeprefix(path)
        return value

    def confined(self, argv: list[str]) -> list[str]:
        """The same command with nothing to write on but the volumes, as the pod's user."""
        user = str(self.user)
        steps = ["mount --make-rprivate /"]
        for volume in self.volumes.values():
            steps.append(f"mount -t tmpfs -o mode=0700,uid={user},gid={user} none {volume}")
        steps.append("mount -o remount,bind,ro /")
        alone = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        alone += ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        steps.append("exec " + shlex.join([*alone, *argv]))
        return ["unshare", "--mount", "sh", "-ec", "\n".join(steps)]

    def confinable(self) -> bool:
        """Whether this machine can do that, and the user can run the program."""
        tried = subprocess.run(self.confined([self.argv[0], "--version"]), capture_output=True)
        return tried.returncode == 0

    @contextlib.contextmanager
    def running(self, *, confined: bool) -> Iterator[subprocess.Popen[bytes]]:
        """Started; stopped as kubelet does, with SIGTERM and then, in vain, SIGKILL."""
        argv = self.confined(self.argv) if confined else self.argv
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                argv, env=self.env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                process.wait(self.grace_s)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

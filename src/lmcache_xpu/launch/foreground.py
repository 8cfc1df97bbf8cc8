"""An engine in the foreground of a terminal: Ctrl-C while it starts ends it in one line.

Its processes would print a traceback each. So `serve` becomes this with the signal ignored, and so
they start, until vLLM serves and handles it.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

import psutil

from lmcache_xpu.launch.cache_server import end_with_parent


def main(argv: list[str]) -> int:
    """Run the engine, and return its exit code; 130 where it was interrupted."""
    print("lmcache-xpu: starting vLLM ...", file=sys.stderr)  # which says nothing for a while
    engine = psutil.Popen(argv, preexec_fn=end_with_parent)
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        status = Path(f"/proc/{engine.pid}/status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
        if ignored >> (signal.SIGINT - 1) & 1:
            interrupted = True
            print("lmcache-xpu: interrupted", file=sys.stderr)
            for process in (engine, *engine.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    signal.signal(signal.SIGINT, interrupt)
    code: int = engine.wait()
    return 130 if interrupted else code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Set up `.venv`: the CPU engine, LMCache, this package and its development tools.

Needs Python 3.11 or newer and nothing else. Run again after pyproject.toml or constraints.txt
changes: it does nothing when the environment is up to date. With `--lock` it renews
constraints.txt instead: what pyproject.toml asks for, everything else as it is; with
`--lock --upgrade` everything anew.

Old Pythons, 2.7 among them, have to read this file to its end: they are told what is needed.
"""

import sys

if not (3, 11) <= sys.version_info[:2] < (3, 15):
    message = (
        "bootstrap: Python {} found, 3.11 to 3.14 needed (vLLM's CPU wheels).\n"
        "           Run `make PYTHON=python3.11 ...`, or install one of these versions."
    )
    sys.exit(message.format(sys.version.split()[0]))

from environment import lock, main

try:
    if sys.argv[1:2] == ["--lock"]:
        lock(*sys.argv[2:])
    else:
        main()
except KeyboardInterrupt:
    sys.exit("\nbootstrap: interrupted; run it again to go on.")

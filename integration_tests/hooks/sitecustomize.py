"""Imported by every Python process of an engine under test: plants faults, and looks inside.

A stack starts its engines with this directory on PYTHONPATH and in HOOKS_DIRECTORY the name of
another one: the test writes `fault.json` there, and the next call that fits it raises. It writes a
question, and the worker answers with `answer.json`. HOOKS_BREAK names a part of the product that
is taken away. Without all that everything is as it is.
"""

from __future__ import annotations

import gc
import os

if "HOOKS_DIRECTORY" in os.environ:
    # Three processes of an engine import 5,000 modules each, one process after the other. To look
    # for garbage after every 700 new objects takes a sixth of that time.
    gc.set_threshold(50_000, 20, 20)

    import broken
    import inside
    import planted
    import wrapt

    for name in planted.MODULES:
        wrapt.register_post_import_hook(planted.plant, name)
    for name in broken.MODULES:
        wrapt.register_post_import_hook(broken.take_away, name)
    wrapt.register_post_import_hook(inside.remember, inside.STORAGE)
    broken.take_away_now()
    inside.start()

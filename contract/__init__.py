"""What this package uses of vLLM and LMCache, checked against their sources.

`stubs/` declares it, in the form of Python's type stubs: each module, class, method, parameter and
attribute that is subclassed, called, read or replaced, and nothing else. `differences.toml` names
what some versions lack or have otherwise, and where that is dealt with. `python -m contract`
compares both with sources of any version, which are only read: nothing is installed or imported.
"""

"""The pictures of docs/, drawn from what was measured: `python -m loadtests.pictures`."""

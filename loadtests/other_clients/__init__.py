"""Do other benchmark clients see what ours sees? `python -m loadtests.other_clients`."""

"""One set of settings becomes a running engine."""

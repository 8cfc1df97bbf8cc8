"""The pictures of docs/, drawn from what was measured: `make pictures`."""

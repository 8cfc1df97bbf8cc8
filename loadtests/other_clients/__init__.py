"""Do other benchmark clients see what ours sees? `make other-clients HOST=http://...`."""

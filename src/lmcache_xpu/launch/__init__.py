"""From one set of settings to a running engine."""

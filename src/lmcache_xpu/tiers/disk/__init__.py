"""The disk tier: chunks in plain files that survive a restart, as an LMCache storage plug-in."""

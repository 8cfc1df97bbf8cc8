"""The package of the disk tier in users' settings of LMCache."""

"""The program that runs LMCache's server, and this package's module in it."""

"""LMCache's own in-process engine, as vLLM's connector for it drives it, on this package's devices.

vLLM's and LMCache's classes are used as they are. What is here gives LMCache the GPU connectors of
this package, keeps from it what it would serve wrongly, and turns its errors into recomputations.
"""

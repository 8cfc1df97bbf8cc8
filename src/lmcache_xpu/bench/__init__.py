"""`lmcache-xpu bench engine`: what a hit and a store cost in a real engine on this machine.

shapes    models by the shape of their KV cache, and the requests that are timed
variants  engines to compare, as settings
measure   one engine in a process of its own: exactness, then times
engine    all engines one after another
report    tables, plot, one file to send
"""

"""`lmcache-xpu bench`: what hits, stores and loads cost on this machine, and what tiers gain.

shapes     models by the shape of their KV cache, and the requests that are timed
variants   engines to compare, as settings
engine     one engine, and the process that it runs in
jobs       what an engine is asked for
runner     asks all engines, one after another; report: the figures
trace      what a tier is worth to recorded requests; no engine
machine_report  `lmcache-xpu report`; redaction: what is hidden in it
"""

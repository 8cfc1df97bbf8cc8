"""`lmcache-xpu bench`: what hits, stores and loads cost in real engines on this machine.

shapes       models by the shape of their KV cache, and the requests that are timed
variants     engines to compare, as settings
engine       one engine in a process of its own; jobs: what it is asked for; child: that process
runner       `bench engine`: all engines one after another; report: its figures
load         `bench load`: hits beside what decodes, and conversations at once; load_jobs,
             load_runner, load_report: as above
outputs      the files that figures go to
report_parts the parts of `lmcache-xpu report`; machine_report: runs them; redaction: what is hidden
"""

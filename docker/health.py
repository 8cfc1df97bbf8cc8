"""Exit 0 when the engine in this container answers /health."""

import os
import urllib.request

port = os.environ.get("LMCACHE_XPU_PORT") or "8000"
urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)

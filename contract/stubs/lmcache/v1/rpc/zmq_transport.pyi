from typing import Any

class ZmqReqRepClientTransport:
    sockets: Any

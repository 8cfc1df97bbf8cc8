from lmcache.v1.multiprocess.transport.base import RequestClient

class RequestClientFactory:
    @staticmethod
    def create(server_url, *, context=...) -> RequestClient: ...

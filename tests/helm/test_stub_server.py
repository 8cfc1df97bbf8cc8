"""The server that answers what a test says keeps quiet where it should."""

from __future__ import annotations

import pytest
from stub_server import Stub


@pytest.mark.parametrize("kind", [BrokenPipeError, ConnectionResetError, ValueError])
def test_a_client_that_leaves_early_prints_nothing(kind: type[Exception], capsys):
    stub = Stub(lambda path: "")
    try:
        raise kind("planted")
    except Exception:
        stub.handle_error(None, ("127.0.0.1", 1))
    finally:
        stub.shutdown()
        stub.server_close()
    assert ("planted" in capsys.readouterr().err) is (kind is ValueError)

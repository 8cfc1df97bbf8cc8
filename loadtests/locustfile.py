"""The entry point: `locust -f loadtests/locustfile.py --host http://...`; see loadtest.md."""

from __future__ import annotations

from locust import run_single_user

import loadtests.hooks  # noqa: F401  # its listeners
from loadtests.shapes import SessionShape
from loadtests.users import TaggedUser

__all__ = ["ChatUser", "SessionShape"]


class ChatUser(TaggedUser):
    """What each workload is, workloads.py says; `--tags` chooses one."""


if __name__ == "__main__":
    run_single_user(ChatUser)

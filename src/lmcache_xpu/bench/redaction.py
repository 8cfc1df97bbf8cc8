"""Takes out of a text what tells whose machine it is from."""

from __future__ import annotations

import getpass
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Redactor"]

# Variables that hold something secret, by their names.
_SECRET_NAME = re.compile(r"KEY|TOKEN|PASSW|SECRET|CREDENTIAL|AUTH", re.IGNORECASE)
_SHORTEST = 4  # a shorter value, 1 or on, is no secret and stands in too many words
_USERINFO = re.compile(r"(?<=://)[^/\s@]+@")
_HOST = re.compile(r"(?<=://)(\[[^\]\s]+\]|[^/\s:\"'\\]+)")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)+")
_NAMED_SECRET = re.compile(
    r"((?:api[_-]?key|token|password|passwd|secret|authorization)\"?\s*[=:]\s*\"?(?:bearer\s+)?)"
    r"[^\s\"',;]{4,}",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"\b(hf_|sk-|ghp_|github_pat_|xox[abp]-)[\w-]{8,}")
_ADDRESS = re.compile(
    r"(?<![\w.:])(\d{1,3}(\.\d{1,3}){3}|[0-9a-f]*:[0-9a-f:.]*:[0-9a-f.]*)(?![\w])", re.IGNORECASE
)
_HOME = re.compile(r"/(?:home|Users)/[^/\s:\"'`]+")
_PUBLIC_HOSTS = ("github.com", "localhost")


class Redactor:
    """Replaces keys, passwords, host names, users' names, home directories and addresses.

    Args:
        environ: variables; the values of those with a secret's name are taken out, and the hosts
            of addresses in any.
        hosts: names of this machine.
        users: names of its user.
        homes: the user's home directories.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        hosts: tuple[str, ...] = (),
        users: tuple[str, ...] = (),
        homes: tuple[str, ...] = (),
    ) -> None:
        values = [value for name, value in environ.items() if _SECRET_NAME.search(name)]
        passwords, away = _parts_of_addresses(environ)
        self._exact = [
            *((value, "(secret)") for value in [*values, *passwords] if len(value) >= _SHORTEST),
            *((home, "~") for home in homes if home not in ("", "/")),
        ]
        self._exact.sort(key=lambda pair: -len(pair[0]))  # a value may hold another one
        words = {host: "(host)" for host in (*hosts, *away) if host not in ("", *_PUBLIC_HOSTS)}
        words |= {user: "(user)" for user in users if user not in ("", "root")}
        self._words = [
            (re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w-])", re.IGNORECASE), label)
            for word, label in sorted(words.items(), key=lambda pair: -len(pair[0]))
        ]

    @classmethod
    def of_this_machine(cls) -> Redactor:
        """Know this machine's names, its user and its environment."""
        name = socket.gethostname()
        try:
            user = getpass.getuser()
        except (OSError, KeyError):  # a container's user may have no name
            user = ""
        users = (user, os.environ.get("USER", ""), os.environ.get("SUDO_USER", ""))
        hosts = (name, name.partition(".")[0], socket.getfqdn())
        homes = (str(Path.home()), os.environ.get("HOME", ""))
        return cls(os.environ, hosts=hosts, users=users, homes=homes)

    def __call__(self, value: Any) -> Any:
        """Return a text, or all texts of lists and objects, without what tells."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {str(key): self(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self(item) for item in value]
        return value

    def _text(self, text: str) -> str:
        for exact, label in self._exact:
            text = text.replace(exact, label)
        text = _NAMED_SECRET.sub(r"\1(secret)", text)
        text = _TOKEN.sub("(secret)", text)
        text = _USERINFO.sub("", text)
        text = _EMAIL.sub("(mail)", text)
        text = _HOST.sub(_host, text)
        text = _HOME.sub("~", text)
        text = _ADDRESS.sub(_address, text)
        for word, label in self._words:
            text = word.sub(label, text)
        return text


def _parts_of_addresses(environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the passwords and the hosts of the addresses that variables hold."""
    passwords, hosts = [], []
    for value in environ.values():
        if "://" not in value:
            continue
        try:
            parts = urlsplit(value)
            host, password = parts.hostname, parts.password
        except ValueError:
            continue
        hosts += [host] if host and not _is_local(host) else []
        passwords += [password] if password else []
    return passwords, hosts


def _host(match: re.Match[str]) -> str:
    host = match[0].strip("[]")
    return match[0] if host in _PUBLIC_HOSTS or host == "(host)" or _is_local(host) else "(host)"


def _address(match: re.Match[str]) -> str:
    try:
        ipaddress.ip_address(match[0])
    except ValueError:  # a version, or a time
        return match[0]
    return match[0] if _is_local(match[0]) else "(address)"


def _is_local(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified

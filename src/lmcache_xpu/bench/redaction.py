"""Hides keys, passwords, names of machines and users, addresses and paths in a text.

A value is shown if the name before it is listed here: the name of a variable, an option or a
setting. Paths are shown if they are listed. Only a value without a name, such as an address, is
recognised by its form.
"""

from __future__ import annotations

import getpass
import ipaddress
import json
import os
import pwd
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin
from urllib.parse import quote

from lmcache_xpu.launch.fields import ENV_PREFIX
from lmcache_xpu.launch.settings import DIAGNOSTIC_VARIABLES, Settings

HIDDEN = "(secret)"
PUBLIC_HOSTS = ["github.com", "gpu.intel.com", "localhost", "127.0.0.1", "0.0.0.0", "::1", "::"]


def _is_choice(kind: Any) -> bool:
    """Return whether a setting takes numbers, switches or listed words: no text of a user's."""
    if kind in (bool, int, float, NoneType) or get_origin(kind) is Literal:
        return True
    return get_origin(kind) is not None and all(map(_is_choice, get_args(kind)))


_CHOICES = [name for name, field in Settings.model_fields.items() if _is_choice(field.annotation)]
_VARIABLES = "|".join(
    [ENV_PREFIX + name.upper() for name in _CHOICES]
    + [*DIAGNOSTIC_VARIABLES, "PYTHONHASHSEED|TOKENIZERS_PARALLELISM|DO_NOT_TRACK|RENDER_GID"]
    + [
        r"(?:VLLM|ONEAPI|ZES?|ZEX|SYCL|CCL|UR|FI|I_MPI|OCL|IGC|NEO|(?:PY)?TORCH|TORCHINDUCTOR"
        r"|TRITON|OMP|KMP|ONEDNN|DNNL|MKL|CUDA|LMCACHE(?!_XPU))_[A-Z0-9_]+"
    ]
)
_OPTIONS = "|".join(_CHOICES).replace("_", "[_-]") + (
    r"|(?:tensor|pipeline|data)[_-]parallel[_-]size|max[_-](?:model[_-]len|num[_-]\w+)|seed"
    r"|gpu[_-]memory[_-]utilization|kv[_-](?:cache[_-](?:memory[_-]bytes|dtype)|role|connector)"
    r"|block[_-]size|quantization|load[_-]format|(?:no|enable|enforce)-[\w-]+|e|i"
)
# Values that are shown whatever setting they are of.
_PLAIN = (
    r"(?i:[-+]?[\d.,]+[a-z%]{0,3}|true|false|yes|no|on|off|none|auto|(?:cpu|xpu|cuda)(?::\d+)?"
    r"|(?:torch\.)?(?:b?float|u?int)\d+|fp8\w*|vllm|lmcache[\w.]*)"
)
_SECRET = (
    r"[\w.-]*(?i:keys?|token|secrets?|passw\w*|passphrase|pass|pwd?|credentials?|auth|authorization"
    r"|bearer|cookie|sig|signature|user(?:name)?|login|owner|company|customer|tenant)(?![a-zA-Z])"
    r"[\w.-]*"
)
_VALUE = r"""(?:\\+"[^"\\]*\\+"|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\[[^\]]*\]|[^\s"']+)"""
_HIDDEN = [  # what follows the first group is hidden
    # A secret's name, what stands between, and its value; or its name and a word with a digit.
    rf"((?<![\w.-]){_SECRET}(?:\\*[\"']?\s*(?:[=:]|\bis\b(?=\s+\S*[^\sa-z.,])|,\s*(?=[\"']))\s*"
    rf"(?i:bearer |basic )?|[ \t]+(?=\S*\d)(?=\S*[a-zA-Z])(?=\S{{6}}))){_VALUE}",
    # Variables, options, and settings as a configuration is printed.
    rf"((?<![\w-])(?!(?:{_VARIABLES})=)[A-Z_][A-Z0-9_]+=){_VALUE}",
    rf"((?<![\w-])(?!--?(?:{_OPTIONS})(?![\w-]))(?:--[a-zA-Z][\w.-]*|-[a-zA-Z])"
    rf"(?:=|[ \t]+(?!-|or |and )|[\"'],\s*(?=[\"'][^-])|(?<=\s-[aup])(?=[^\s-]{{3}}))){_VALUE}",
    rf"((?<![\w.-])(?!(?:{_OPTIONS})\b)[a-z_]\w*(?:=(?!=)|[\"']:\s*))"
    rf"(?![\[{{]|[A-Z]\w+\(|['\"]?{_PLAIN}(?![\w./:@(-])){_VALUE}",
    # Keys and numbers of devices that no name says.
    r"()-----BEGIN [\s\S]*?(?:-----END[^\n]*|\Z)",
    r"()\b(?:hf_|sk-|gh[a-z]_|github_pat_|glpat-|xox[a-z]-|AKIA|ASIA|eyJ)[\w.-]{8,}",
    r"()(?<![A-Za-z0-9])(?!0x)(?=(?:[A-Za-z]*\d){3})(?=\d*[A-Za-z])[A-Za-z0-9]{16,}",
    r"()\b(?i:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?:[0-9a-f]{2}:){5}[0-9a-f]{2})\b",
]
_UNLISTED = re.compile(
    rf"{_SECRET}|(?!(?:{_VARIABLES})$)[A-Z][A-Z0-9]*_[A-Z0-9_]+"
    rf"|(?!--?(?:{_OPTIONS})$)--?[A-Za-z][\w.-]*"
)
_PATHS = re.compile(
    r"/(?:dev/dri|proc|sys|lib(?:64)?|usr/(?:lib(?:64)?|s?bin|include|share|local/lib)"
    r"|opt/(?:intel|venv|lmcache-xpu)|v1)(?:/.*)?"
    r"|/(?:dev|dev/shm|cache|models|tmp|shm|var/cache/kv|health|ping|metrics)/?"
)
_CODE = re.compile(
    r"(?:(?:site|dist)-packages|src)/(?:vllm|lmcache\w*|torch|triton|transformers|pydantic\w*)/"
    r".*\.(?:py|so)$|python3\.\d+/[\w/]+\.py$"
)


def _place(match: re.Match[str]) -> str:
    """Return what is shown of a URL or a path."""
    if scheme := match["scheme"]:
        host = re.match(r"\[?([\w.:-]*?)\]?(?::\d+)?(?:[/?]|$)", rest := match["rest"])
        if not rest or rest.startswith("/"):
            return scheme + ("<path>" if rest else "")
        shown = host and host[1] in PUBLIC_HOSTS and "@" not in rest
        return scheme + (rest.partition("?")[0] if shown else "(host)")
    code = _CODE.search(match[0])
    return match[0] if _PATHS.fullmatch(match[0]) else f"<path>/{code[0]}" if code else "<path>"


def _address(match: re.Match[str]) -> str:
    try:
        ipaddress.ip_address(match[0])
    except ValueError:  # a version, or a time
        return match[0]
    return match[0] if match[0] in PUBLIC_HOSTS else "(address)"


_URL_OR_PATH = (
    r"""(?P<scheme>\b[a-zA-Z][\w+.-]*://)(?P<rest>(?:[^\s"'<>`]*[^\s"'<>`;,.:)])?)"""
    r"""|(?<=["'])/[^"'\n]+(?=["'])|[A-Za-z]:\\[^\s"']+"""
    r"""|(?<![\w/])(?:<path>|~\w*|\.{1,2})?/[^\s"'`,;:()<>|]+"""
)
_HOST = (
    r"(?<![\w./-])(?!\S*\.(?:py|c|cc|cpp|h|hpp|so):|(?:github|gpu\.intel)\.com\b)[\w-]+"
    r"(?:\.[\w-]+)*\.(?:[a-zA-Z][\w-]*(?=:\d{2,5}\b)"
    r"|(?:com|net|org|io|cloud|internal|intranet|corp|lan)\b)"
)
_ADDRESS = r"(?i)(?<![\w.:])(\d{1,3}(\.\d{1,3}){3}|[0-9a-f]*:[0-9a-f:.]*:[0-9a-f.]*)(?!\w)"
_Rule = tuple[str, str | Callable[[re.Match[str]], str]]  # what is hidden, and what is shown
_RULES: list[_Rule] = [
    *((rule, rf"\g<1>{HIDDEN}") for rule in _HIDDEN),
    (_URL_OR_PATH, _place),
    (r"[\w.+-]+@[\w-]+(\.[\w-]+)+", "(mail)"),
    (_HOST, "(host)"),
    (_ADDRESS, _address),
]


class Redactor:
    """Hides in texts what this module says, and values of unlisted variables and hosts of URLs."""

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        hosts: tuple[str, ...] = (),
        users: tuple[str, ...] = (),
        homes: tuple[str, ...] = (),
    ) -> None:
        urls = re.findall(r"://(?:[^/\s]*:([^/\s]*)@)?\[?([\w.-]*)", " ".join(environ.values()))
        secrets = [password for password, _ in urls if password]
        for name, value in environ.items():
            # Paths are hidden anyway, or listed. Short values stand in other words.
            listed = re.fullmatch(_VARIABLES, name) or re.fullmatch(_PLAIN, value)
            if re.fullmatch(_SECRET, name):
                secrets += [value] if len(value) > 2 else []
            elif not listed and not value.startswith("/") and len(value) > 5:
                secrets.append(value)
        values = {home: "<path>" for home in homes if home not in ("", "/")}
        for value in secrets:
            for form in (value, quote(value), repr(value)[1:-1], json.dumps(value)[1:-1]):
                values[form] = HIDDEN
        names = {*hosts, *(host for _, host in urls), *(host.partition(".")[2] for host in hosts)}
        rules: list[_Rule] = []
        for value in _longest_first(values):
            text = re.escape(value)
            rules.append((rf"(?<!\w){text}(?!\w)" if len(text) < 8 else text, values[value]))
        rules += _RULES
        for name in _longest_first(names - {"", *PUBLIC_HOSTS}):
            rules.append((rf"(?i)(?<![\w-])(?:[\w-]+\.)*{re.escape(name)}(?!\w)", "(host)"))
        for name in _longest_first(set(users) - {"", "root"}):
            rules.append((rf"(?i)(?<![^\W\d_]){re.escape(name)}(?![^\W\d_])", "(user)"))
        self._rules = [(re.compile(rule), label) for rule, label in rules]

    @classmethod
    def of_this_machine(cls) -> Redactor:
        """Know this machine's names, its users and its environment."""
        name = socket.gethostname()
        try:
            user = getpass.getuser()
        except (OSError, KeyError):  # a container's user may have no name
            user = ""
        people = (entry.pw_name for entry in pwd.getpwall() if 1000 <= entry.pw_uid < 60000)
        users = (user, os.environ.get("USER", ""), os.environ.get("SUDO_USER", ""), *people)
        hosts = (name, name.partition(".")[0], socket.getfqdn())
        homes = (str(Path.home()), os.environ.get("HOME", ""))
        return cls(os.environ, hosts=hosts, users=users, homes=homes)

    def __call__(self, value: Any) -> Any:
        """Return a text, or lists and objects of texts, with what has to be hidden taken out."""
        if isinstance(value, Mapping):
            return {self(str(key)): self._value(str(key), x) for key, x in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._value(str(name), x) for name, x in zip(["", *value], value, strict=False)]
        if isinstance(value, str):
            for rule, label in self._rules:
                value = rule.sub(label, value)
        return value

    def _value(self, name: str, value: Any) -> Any:
        """Return what is shown of a value behind a key of an object, or an item of a list."""
        hidden = _UNLISTED.fullmatch(name) and not str(value).startswith("-")
        return HIDDEN if hidden else self(value)


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted(texts, key=len, reverse=True)  # a value may hold another one

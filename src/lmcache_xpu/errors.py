"""Every error this package raises on purpose.

Each message states what was found, what was expected, and what to do about it, and ends with the
address of the page about its kind. Errors about values are ValueErrors too, which is what callers
of LMCache's own connectors catch.
"""

from __future__ import annotations

from typing import ClassVar

PAGE = "docs/troubleshooting.md"  # or its address on a site (docs/guides/release.md)


class LMCacheXPUError(Exception):
    """Base of all errors raised by this package: what is the case, what would be right, what to do.

    `fix` is left out where `expected` already says it.
    """

    anchor: ClassVar[str] = "error-lines"

    def __init__(self, found: str, expected: str, fix: str = "") -> None:
        self.found = found
        self.expected = expected
        self.fix = fix
        advice = f" {fix}" if fix else ""
        page = f"(see {PAGE}#{self.anchor})"
        super().__init__(f"found {found}; expected {expected}.{advice} {page}")

    def __reduce__(self) -> tuple[type[LMCacheXPUError], tuple[str, str, str]]:
        # vLLM sends worker errors between processes; the default would call us with one string.
        return type(self), (self.found, self.expected, self.fix)


class SettingsError(LMCacheXPUError, ValueError):
    """A setting is missing, wrong, or contradicts another."""

    anchor = "setting-error"


class VersionError(LMCacheXPUError):
    """LMCache or vLLM is outside the tested versions."""

    anchor = "version-error"


class SeamError(LMCacheXPUError):
    """Our connector is not the one that LMCache uses."""

    anchor = "connector-error"


class LayoutError(LMCacheXPUError, ValueError):
    """The engine's KV cache can't be expressed as a paged view, or can be read two ways."""

    anchor = "layout-error"


class TransferError(LMCacheXPUError, ValueError):
    """A transfer's arguments don't fit each other; neither side was changed."""

    anchor = "transfer-error"


class SlotError(TransferError):
    """Slots of the wrong type, shape or range."""


class HostMemoryError(TransferError):
    """Host memory of the wrong shape, dtype, format or device."""


class EngineError(LMCacheXPUError):
    """An engine did not come up, does not answer, or went away."""

    anchor = "engine-error"

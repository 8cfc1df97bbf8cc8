"""Errors: what each says, and that it reaches another process as it was."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from lmcache_xpu import errors

ROOT = Path(__file__).resolve().parents[1]
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_says_what_was_found_expected_and_to_be_done(kind):
    page = f"(see {errors.PAGE}#{kind.anchor})"
    assert str(kind("a", "b")) == f"found a; expected b. {page}"
    assert str(kind("a", "b", "Do c.")) == f"found a; expected b. Do c. {page}"


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_a_worker_is_the_same_in_the_engine(kind):
    error = kind("a", "b", "Do c.")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (kind, str(error))
    assert (copy.found, copy.expected, copy.fix) == ("a", "b", "Do c.")


def test_the_page_that_an_error_names_is_there():
    if not errors.PAGE.startswith("https://"):
        assert (ROOT / errors.PAGE).is_file()


def test_errors_about_values_are_value_errors():
    """LMCache catches these where it calls a connector."""
    about_values = {kind.__name__ for kind in KINDS if issubclass(kind, ValueError)}
    assert about_values == {
        "HostMemoryError",
        "LayoutError",
        "SettingsError",
        "SlotError",
        "TransferError",
    }

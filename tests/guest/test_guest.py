"""Sandboxes on the machine that most users have: kernel 6.1, control groups of version 2, root with every right."""

import os
from collections.abc import Iterator

import pytest

from tests.guest.__main__ import passes
from tests.guest.checks import CHECKS
from tests.guest.image import MissingToolError, built
from tests.guest.machine import Guest, booted


@pytest.fixture(scope="module")
def guest() -> Iterator[Guest]:
    if not os.environ.get("FORKPOINT_GUEST"):
        pytest.skip("boots a machine in software emulation, for minutes: FORKPOINT_GUEST=1 runs it")
    try:
        image = built()
    except MissingToolError as error:
        pytest.skip(str(error))
    with booted(image) as guest:
        yield guest


@pytest.mark.parametrize("check", CHECKS)
def test_guest_shows(guest: Guest, check: str) -> None:
    """Each check prints its result in one line."""
    assert passes(guest, check)

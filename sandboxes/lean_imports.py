"""Imports of libraries without the optional packages that they load when they find them (pure)."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(package: str) -> Iterator[None]:
    """Hide a top-level package, unless it is loaded already, from the imports of this block.

    structlog loads Rich, httpx Pygments and sqlite-utils NumPy, which the proxy never needs. A None in `sys.modules`
    makes an import fail as if the package were not installed (Python language reference, 5.3.1).
    """
    hidden = package not in sys.modules
    if hidden:
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[package]

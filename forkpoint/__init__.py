"""Forkpoint: a transparent proxy between LLM agents and their tools.

This package is what other programs may import. Everything else in the distribution is internal and may change.

- `forkpoint.drivers`: the contract of sandbox drivers, for drivers of your own.
- `forkpoint.dialects`: the contract of request dialects, for endpoints of your own.
- `forkpoint.testing`: the test suite that every driver must pass.

Importing `forkpoint` itself loads nothing else: sandbox processes import it and must start in milliseconds.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """Return the version on first use; reading the metadata takes milliseconds."""
        if name != "__version__":
            raise AttributeError(f"module 'forkpoint' has no attribute {name!r}")
        from importlib.metadata import version  # noqa: PLC0415 - see above

        return version("forkpoint")


__all__ = ["__version__"]

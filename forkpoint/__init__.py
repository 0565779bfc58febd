"""Forkpoint: a transparent proxy between LLM agents and their tools.

This package is what other programs may import. Everything else in the distribution is internal and may change.

- `forkpoint.Client` and `forkpoint.AsyncClient`: clients of a proxy.
- `forkpoint.local`: a proxy on this machine for the duration of a block.
- `forkpoint.to_dataframe`: rollouts, trajectories and reports as data frames.
- `forkpoint.pytest`: fixtures that start a proxy.
- `forkpoint.trackers`: figures of each training step for W&B, MLflow, TensorBoard and TRL.
- `forkpoint.drivers`: the contract of sandbox drivers, for drivers of your own.
- `forkpoint.dialects`: the contract of request dialects, for endpoints of your own.
- `forkpoint.inspect`, `forkpoint.harbor` and `forkpoint.trl`: sandboxes for Inspect AI, Harbor and TRL.
- `forkpoint.ray`: proxies on the nodes of a Ray cluster.
- `forkpoint.testing`: the test suite that every driver must pass.

Importing `forkpoint` itself loads nothing else: sandbox processes import it and must start in milliseconds.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forkpoint.client import AsyncClient, Client
    from forkpoint.ephemeral_proxy import local
    from forkpoint.errors import ForkpointError, UnreachableError
    from forkpoint.notebook import to_dataframe

    __version__: str
else:
    _MODULES = {
        "AsyncClient": "client", "Client": "client", "ForkpointError": "errors", "UnreachableError": "errors",
        "local": "ephemeral_proxy", "to_dataframe": "notebook",
    }  # fmt: skip

    def __getattr__(name: str) -> Any:
        """Import a name on its first use; `__version__` reads the metadata, which takes milliseconds."""
        if name == "__version__":
            from importlib.metadata import version  # noqa: PLC0415 - see above

            return version("forkpoint")
        if name not in _MODULES:
            raise AttributeError(f"module 'forkpoint' has no attribute {name!r}")
        from importlib import import_module  # noqa: PLC0415 - see above

        return getattr(import_module(f"forkpoint.{_MODULES[name]}"), name)


__all__ = ["AsyncClient", "Client", "ForkpointError", "UnreachableError", "__version__", "local", "to_dataframe"]

"""Where a proxy is, and what a client shows to be let in: for the client of this package and for the commands."""

import os

DEFAULT_URL = "http://127.0.0.1:8700"
"""The URL of `forkpoint serve` on this machine."""


def base_url(url: str) -> str:
    """Return the base URL of an address as a user types it: `127.0.0.1:8700` means plain HTTP."""
    return (url if "://" in url else f"http://{url}").rstrip("/")


def token_headers(token: str | None = None) -> dict[str, str]:
    """Return the headers with a client's token; None for that in FORKPOINT_TOKEN, if it is set."""
    token = token or os.environ.get("FORKPOINT_TOKEN")
    return {"x-forkpoint-token": token} if token else {}

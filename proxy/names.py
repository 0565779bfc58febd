"""Names of tasks and rollouts: one path segment each."""

import ipaddress
import re

from proxy.refusals import RefusalError

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._~@:=+,-]{0,199}$"
"""Matches names of tasks and rollouts: one path segment that needs no escaping and is not a relative path."""

ONLY = "*"
"""Stands for the endpoint of a task's only server."""
ROLLOUT_TOKEN = re.compile(r"(?<![A-Za-z0-9])fp_[A-Za-z0-9_-]{32}")
"""The form of rollouts' tokens: `fp_` and 192 random bits in base64. In the middle of a word it is another's."""
_NAME = re.compile(NAME_PATTERN)


def named(kind: str, text: str) -> str:
    """Return a task's or rollout's name that matches `NAME_PATTERN`. Raises RefusalError (400)."""
    if _NAME.match(text) is None or text.endswith("\n"):
        raise RefusalError(
            400,
            "name",
            f"{text[:80]!r} is not a name of a {kind}. Use 1 to 200 of A-Z a-z 0-9 . _ ~ @ : = + , - and begin with a "
            "letter or digit.",
        )
    return text


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address to listen on."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

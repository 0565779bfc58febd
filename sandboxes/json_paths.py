"""Members of JSON values by dotted path, and names in them (pure)."""

from collections.abc import Iterable
from typing import Any

OUR_NAME = "forkpoint-rollout"
"""Stands for the rollout's or the session's name where it is recorded."""


def member(value: Any, path: str) -> Any:
    """Return what path leads to; None where it leads nowhere."""
    for part in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


def renamed(
    value: dict[str, Any], paths: Iterable[str], before: str, after: str, *, whole: bool = False
) -> dict[str, Any]:
    """Return value with after for before in the texts that paths lead to; whole: only where it is all of the text."""
    for path in paths:
        value = _replaced(value, path.split("."), before, after, whole=whole)
    return value


def _replaced(value: dict[str, Any], path: list[str], before: str, after: str, *, whole: bool) -> dict[str, Any]:
    inner = value.get(path[0])
    if len(path) > 1:
        if not isinstance(inner, dict):
            return value
        return {**value, path[0]: _replaced(inner, path[1:], before, after, whole=whole)}
    if isinstance(inner, int) and not isinstance(inner, bool) and str(inner) == before:
        return {**value, path[0]: after}
    if not isinstance(inner, str) or not before or (whole and inner != before):
        return value
    return {**value, path[0]: inner.replace(before, after)}

"""Members of JSON values by dotted path, and the replacement of names in them (pure)."""

from collections.abc import Iterable
from typing import Any

OUR_NAME = "forkpoint-rollout"
"""Stands for the name of the rollout or the session in records, so that every rollout has equal ones."""


def member(value: Any, path: str) -> Any:
    """Return the member at a dotted path; None if there is none."""
    for part in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


def renamed(
    value: dict[str, Any], paths: Iterable[str], before: str, after: str, *, whole: bool = False
) -> dict[str, Any]:
    """Return a copy of a JSON object with a name replaced by another in the members at some dotted paths."""
    # Texts and whole numbers are replaced. With `whole`, only members that equal `before` change, not members that
    # contain it.
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

"""Values in compose files: variables, files of variables, durations, sizes."""

import re
from collections.abc import Mapping
from typing import Any

VARIABLE = re.compile(r"\$(?:\$|\{(?P<braced>\w+)(?:(?P<how>:?[-?+])(?P<other>[^}]*))?\}|(?P<bare>[A-Za-z_]\w*))")
_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][\w.]*)\s*=\s*(.*?)\s*")
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?")
_SIZE = re.compile(r"([0-9.]+) *([bkmg]?)(?:i?b)?")
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def filled(value: Any, variables: Mapping[str, str]) -> Any:
    """Return a part of a file with the values of its variables; those without a value stay."""
    if isinstance(value, dict):
        return {key: filled(member, variables) for key, member in value.items()}
    if isinstance(value, list):
        return [filled(member, variables) for member in value]
    return VARIABLE.sub(lambda match: _value(match, variables), value) if isinstance(value, str) else value


def emptied(value: Any) -> str:
    """Return a text without the variables that are left in it."""
    return VARIABLE.sub(lambda match: match[0] if match[0] == "$$" else "", str(value))


def plain(value: Any) -> str:
    """Return a text with `$$` as `$`."""
    return str(value).replace("$$", "$")


def unset_variable(value: Any) -> str:
    """Return the first variable without a value in a part of a file; empty if there is none."""
    match = VARIABLE.search(str(value).replace("$$", ""))
    return match[0] if match else ""


def variables_of(text: str) -> dict[str, str]:
    """Return the variables of a file such as `.env`."""
    variables = {}
    for line in text.splitlines():
        match = None if line.lstrip().startswith("#") else _LINE.fullmatch(line)
        if match is None:
            continue
        value = match[2]
        if value[:1] in {"'", '"'} and value.rfind(value[0]) > 0:
            value = value[1 : value.rfind(value[0])]
        else:
            # As in a shell, a comment begins behind a space.
            value = re.sub(r"(?:^|\s+)#.*", "", value)
        variables[match[1]] = value
    return variables


def seconds(duration: Any) -> float:
    """Return a duration such as `1m30s` in seconds; 0 for one that is missing or malformed."""
    match = _DURATION.fullmatch(str(duration or ""))
    if not match or not any(match.groups()):
        return 0.0
    hours, minutes, rest = (float(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + rest


def size_bytes(size: Any) -> int:
    """Return a size such as `2G` or `512mb` in bytes. Raises ValueError if it is malformed."""
    match = _SIZE.fullmatch(str(size).strip().lower())
    if match is None:
        raise ValueError(f"{size!r} is no size")
    return int(float(match[1]) * _UNITS[match[2]])


def _value(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name, how, other = match["braced"] or match["bare"], match["how"] or "", match["other"] or ""
    if not name:
        # Two dollars stand for one, which the members' own readers know.
        return match[0]
    given = variables.get(name)
    if how.startswith(":") and not given:
        given = None
    if how.endswith("+"):
        return other if given is not None else ""
    if given is None:
        return other if how.endswith("-") else match[0]
    return given.replace("$", "$$")

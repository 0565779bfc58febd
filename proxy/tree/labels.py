"""Labels of rollouts, by which a trainer filters, groups and sums them.

They are no part of a state or key. Agents can send them too, so they are bounded here and escaped wherever shown.
"""

import math
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from proxy.refusals import RefusalError

Labels = Mapping[str, str]
"""Labels by name, as they are kept: all as texts; `step`, `epoch` and `reward` are numbers in their shortest form."""

MAX_LABELS = 16
"""Most labels of one rollout: a run, a step, a group, a policy, a reward, and a trainer's own."""
MAX_VALUE_CHARS = 200
"""Longest value in characters. Sixteen of them keep a rollout's row below 4 kB, one page of the store."""
MAX_TEXT = 16_384
"""Longest text of labels in a header or a query, in bytes: all labels of a rollout, percent-encoded."""
NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$"
"""A label's name."""
_NAME = re.compile(NAME_PATTERN)
_WHOLE = frozenset({"step", "epoch"})
"""Labels whose values are whole numbers."""
_MAX_WHOLE = 10**15
RUN = "run"
"""The label by which metrics are counted."""
REWARD = "reward"
"""The label whose value is a number, so that it can be averaged."""


def checked(values: Mapping[str, Any]) -> dict[str, str]:
    """Return labels as they are kept, all as strings. Raises RefusalError (422) if they break a rule."""
    if len(values) > MAX_LABELS:
        raise _refusal(f"a rollout has at most {MAX_LABELS} labels, not {len(values)}. Leave some out.")
    return {name: _value(name, value) for name, value in values.items()}


def typed(labels: Labels) -> dict[str, str | int | float]:
    """Return labels as views show them: `step` and `epoch` as whole numbers, `reward` as a number, others as texts."""
    return {
        name: int(value) if name in _WHOLE else float(value) if name == REWARD else value
        for name, value in labels.items()
    }


def changed(labels: Labels, changes: Mapping[str, Any]) -> dict[str, str]:
    """Return labels with changes; None as a value removes a label. Errors as for `checked`."""
    removed = {name for name, value in changes.items() if value is None}
    merged = {**labels, **{name: value for name, value in changes.items() if value is not None}}
    return checked({name: value for name, value in merged.items() if name not in removed})


def inherited(labels: Labels) -> dict[str, str]:
    """Return the labels that a fork takes over from its source: all but the reward, which it has not earned."""
    return {name: value for name, value in labels.items() if name != REWARD}


def parsed(text: bytes) -> dict[str, str]:
    """Return the labels in a header or a query: `run=r7,step=3`, percent-encoded. Raises RefusalError (422)."""
    if len(text) > MAX_TEXT:
        raise _refusal(f"labels have at most {MAX_TEXT} bytes. Set more with PATCH …/rollouts/{{rollout}}/labels.")
    values: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(b","))):
        name, separator, value = part.partition(b"=")
        if not separator:
            raise _refusal("labels are written as run=r7,step=3, with percent-encoded values.")
        try:
            values[name.strip().decode("ascii")] = unquote_to_bytes(value.strip()).decode()
        except UnicodeDecodeError:
            raise _refusal("labels are UTF-8 with percent-encoding; their names are ASCII.") from None
    return checked(values)


def _value(name: str, value: object) -> str:
    if _NAME.match(name) is None or name.endswith("\n"):
        raise _refusal(f"a label's name begins with a letter and has up to 64 of A-Z a-z 0-9 . _ -, not {name[:80]!r}.")
    if name == REWARD:
        return _reward(value)
    if name in _WHOLE:
        return _whole(name, value)
    if isinstance(value, bool):
        value = "true" if value else "false"
    if not isinstance(value, str | int | float):
        raise _refusal(f"label {name!r} must be a text, a number or a boolean.")
    text = str(value)
    if len(text) > MAX_VALUE_CHARS:
        raise _refusal(f"label {name!r} has {len(text)} characters; at most {MAX_VALUE_CHARS} are kept.")
    if not text.isprintable():
        raise _refusal(f"label {name!r} holds control characters or line breaks. Leave them out.")
    return text


def _reward(value: object) -> str:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise _refusal("label 'reward' must be a finite number.")
    return repr(number)


def _whole(name: str, value: object) -> str:
    try:
        number = -1 if isinstance(value, bool | float) else int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number <= _MAX_WHOLE:
        raise _refusal(f"label {name!r} must be a whole number from 0.")
    return str(number)


def _refusal(detail: str) -> RefusalError:
    return RefusalError(422, "labels", detail)

"""Call keys: digests under which equal calls of different rollouts meet."""

from hashlib import blake2b
from typing import Any, NewType

import orjson

from sandboxes.calls import Arguments, ToolCall

CallKey = NewType("CallKey", bytes)

KEY_VERSION = 2
"""Version of the rules below, part of every root key: when they change, new trees begin and no old record is served."""


class UncanonicalArgumentsError(ValueError):
    """The arguments of a call have no canonical form, so the call has no key."""

    def __init__(self, tool: str, reason: str) -> None:
        super().__init__(
            f"arguments of {tool!r} have no canonical form: {reason}. "
            "Send them as finite JSON numbers within 64 bits, valid Unicode strings, lists and objects."
        )


def canonical_json(value: Any) -> bytes:
    """Return a value as JSON with sorted members and no spaces.

    The order of members does not count, the order of items does. 1, 1.0, "1" and true all differ: a tool may print them
    differently, and a wrong hit costs more than a miss. Strings are not normalised, for the same reason. Raises
    ValueError if the value holds NaN, an infinity, an integer beyond 64 bits, a lone surrogate, or no JSON at all.
    """
    encoded = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    # orjson writes NaN and the infinities as null, which would make them share a key with None.
    if b"null" in encoded and not _finite(value):
        raise ValueError("a number is NaN or infinite")
    return encoded


def call_key(call: ToolCall) -> CallKey:
    """Return the 32-byte key of a call: BLAKE2b over endpoint, tool, canonical arguments and uploaded body.

    Two calls have the same key only if they are equal. Raises UncanonicalArgumentsError.
    """
    digest = blake2b(digest_size=32)
    for part in (
        call.endpoint.encode(),
        call.tool.encode(),
        _canonical_arguments(call.tool, call.arguments),
        call.body,
    ):
        # The length comes first, so that no two different sequences of parts give the same bytes.
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return CallKey(digest.digest())


def private_key(key: CallKey, rollout: int, turn: int) -> CallKey:
    """Return a key that only this call of this rollout uses: no other rollout, and no later turn, looks it up."""
    salt = rollout.to_bytes(8, "little") + turn.to_bytes(8, "little")
    return CallKey(blake2b(key + salt, digest_size=32, person=b"private").digest())


def withdrawn_key(key: CallKey, record: int) -> CallKey:
    """Return the key of a record that answers no more calls: no rollout looks it up."""
    return CallKey(blake2b(key + record.to_bytes(8, "little"), digest_size=32, person=b"withdrawn").digest())


def again_key(key: CallKey, nth: int) -> CallKey:
    """Return the key of a call's n-th repetition (0: its own key), which all rollouts that repeat it share."""
    return CallKey(blake2b(key + nth.to_bytes(8, "little"), digest_size=32, person=b"again").digest()) if nth else key


def root_key(spec_json: bytes, identity: str) -> str:
    """Return the hex digest that names a tree: of its spec, what the spec refers to, and `KEY_VERSION`."""
    return blake2b(b"%d\0%b\0%b" % (KEY_VERSION, identity.encode(), spec_json), digest_size=16).hexdigest()


def _canonical_arguments(tool: str, arguments: Arguments) -> bytes:
    try:
        return canonical_json(arguments)
    except (TypeError, ValueError) as error:
        raise UncanonicalArgumentsError(tool, str(error)) from error


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return value - value == 0
    if isinstance(value, dict):
        return all(_finite(member) for member in value.values())
    if isinstance(value, list | tuple):
        return all(_finite(item) for item in value)
    return True

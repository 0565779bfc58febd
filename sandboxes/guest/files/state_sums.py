"""Digests of sets of paths that follow from what changed in the set, whatever its size (pure)."""

# Theory of operation.
#
# A set's digest is the sum of one long number for each member, modulo 2**4096. A member that comes adds its number, one
# that goes subtracts it. So equal sets have equal sums by whatever history, and an update costs what changed. The
# numbers are hashes (AdHash; Bellare and Micciancio, "A New Paradigm for Collision-Free Hashing", 1997). An agent can
# choose thousands of files, so the generalized birthday problem (Wagner, 2002) decides the length: a sum of n bits
# holds out for about 2**(2 * sqrt(n)) attempts. That is 2**32 for 256 bits and 2**128 for 4,096.
#
# The order of modification times is a set too: of pairs of neighbours. All paths of one time are a *group*. Each group
# and the next later one are a pair. The pairs tell the order completely, and a change concerns few of them.

import hashlib
from collections.abc import Callable, Collection, Iterable

SUM_BYTES = 512
"""The length of a sum; see the theory of operation."""

_MODULUS = 1 << (8 * SUM_BYTES)

Group = bytes
"""A digest of the paths that share one modification time; empty for a time that no path has."""


def added(total: int, more: int) -> int:
    """Return the sum with a number added; a negative number takes it away."""
    return (total + more) % _MODULUS


def term(*parts: bytes) -> int:
    """Return the number of a member."""
    # Each part with its length, because a part may hold any byte.
    data = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return int.from_bytes(hashlib.shake_128(data).digest(SUM_BYTES), "little")


def packed(total: int) -> bytes:
    """Return a sum as bytes of fixed length."""
    return total.to_bytes(SUM_BYTES, "little")


def group(paths: Iterable[bytes]) -> Group:
    """Return the group of paths; empty for none."""
    digest = hashlib.sha256()
    known = sorted(paths)
    for path in known:
        digest.update(path + b"\0")
    return digest.digest() if known else b""


def pairs(times: Iterable[int], touched: Collection[int], group_at: Callable[[int], Group]) -> int:
    """Return the sum of the pairs of neighbours that concern some of the times."""
    # The times are the touched ones and, for each, the nearest earlier and later one that is not touched. The sum of
    # all pairs changes by the difference of two such sums, after the change and before it.
    total, before, concerned = 0, b"", False
    for time in sorted(set(times)):
        here = group_at(time)
        # A touched time without paths concerns the pair around it.
        concerned = concerned or time in touched
        if not here:
            continue
        if before and concerned:
            total = added(total, term(before, here))
        # The next pair is concerned by this time if it is touched, else only by what comes.
        before, concerned = here, time in touched
    return total

"""What a session keeps and no catalog shows: it is named by the statements that may have changed it (pure).

Theory of operation. `PostgresLink.session` does not show four things. Each of them is named by a list of statements
with their parameters, so that equal histories have equal names:

1. *Settings without a row in `pg_settings`* (`UNSHOWN`): custom ones (`SET app.user = 'x'`), the seed of `random`, and
   those that the driver sets itself. They last as long as the session: a custom setting is empty after a reset.
2. *Rows and sequences of temporary objects.* They are gone when no temporary object is left.
3. *Positions of cursors.* They are gone when nothing is left in the session.
4. *The position in a seeded sequence of random numbers*: each statement that draws one moves it.
"""

import re
import secrets
from dataclasses import dataclass, field

from sandboxes.postgres.volatile import VOLATILE

UNSHOWN = re.compile(
    r"\b(?:set_config|setseed|set_limit)\b"
    r"|\b(?:re)?set\s*(?:(?:session|local)\b\s*)?(?:/\*|--|%|'\s*\|\||(?:names|client_encoding|application_name|seed)\b"
    r"""|(?:"[^"]*"|[\w$\x80-\U0010ffff]+)\s*(?:\.|/\*|--))|\bu&\"""",
    re.IGNORECASE,
)
"""Matches statements that may set what `pg_settings` does not show. `RESET app.user` defines the setting, too. Behind a
comment, in a text that is put together while it runs, and in an identifier with escapes (`U&"..."`), there may be any
name. A false match costs a replay. Words of which a text is put together in pieces (`'SE' || 'T'`) do not match."""
HELD = re.compile(r"\b(?:lo_open|lo_creat|lo_lseek\w*|lo_close|loread|lowrite)\b", re.IGNORECASE)
"""Matches what opens, moves or closes a large object's descriptor, which lasts until the transaction ends."""
_RESETS = re.compile(r"\b(?:reset|discard)\b", re.IGNORECASE)
_DISCARDS = re.compile(r"\bdiscard\b", re.IGNORECASE)
_SEEDS = re.compile(r"\bsetseed\b|\bset\b[^;]*\bseed\b", re.IGNORECASE)


@dataclass(slots=True)
class SessionHistory:
    """The statements that may have changed what no catalog shows of a session."""

    # Statements that set something, or drew random numbers after a seed.
    settings: list[str] = field(default_factory=list)
    # Those that ran while there were temporary objects, and did more than read.
    temporary: list[str] = field(default_factory=list)
    cursor_moves: list[str] = field(default_factory=list)
    # Those that ran since names could mean other objects than in another session.
    shaped: list[str] = field(default_factory=list)
    seeded: bool = False  # Whether random numbers follow from a seed.

    def __bool__(self) -> bool:
        """Return whether the session keeps more than the server shows. Cursors themselves are shown."""
        return bool(self.settings or self.temporary)

    def note_settings(self, text: str, meaning: str) -> bool:
        """Note a statement that may set something, or draw a random number after a seed; return whether it may."""
        draws = self.seeded and VOLATILE.search(meaning) is not None
        resets = self.settings and _RESETS.search(meaning) is not None
        if not (draws or resets or UNSHOWN.search(meaning)):
            return False
        self.seeded = self.seeded or _SEEDS.search(meaning) is not None
        self.settings.append(self.name_of(text, meaning))
        return True

    def note_shaped(self, text: str | None, session: str, *, temporary: bool) -> str:
        """Note a call in a session that decides what names mean, and return all such calls, or empty if there are none.

        Temporary objects and `search_path` decide, and DISCARD ends both. Equal content does not make the state after
        such a session an earlier one: the calls become part of the state's name. `text` is None for a call that read.
        """
        if text is not None and (self.shaped or temporary or "search_path=" in session or _DISCARDS.search(text)):
            self.shaped.append(text)
        return "\n".join(self.shaped)

    def name_of(self, text: str, meaning: str) -> str:
        """Return a name for what a statement left in the session. A replay does not repeat what it left by chance."""
        names = [name.lower() for name in VOLATILE.findall(meaning)]
        by_chance = [name for name in names if not (self.seeded and name.startswith("random"))]
        return f"{text}\n{secrets.token_hex(16)}" if by_chance else text

    def clear_gone(self, session: str, *, temporary: bool) -> None:
        """Forget what is gone. `session` is what the server shows of the session; empty if nothing."""
        if not temporary:
            self.temporary.clear()
        if not session:
            # Without a session there is no cursor either.
            self.cursor_moves.clear()

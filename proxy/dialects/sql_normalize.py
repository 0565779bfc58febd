"""The one form of a statement that all its spellings with other whitespace and comments share (pure).

A key that merges two statements whose answers differ would poison a cache, so this merges less than it could:

- Inside strings, quoted identifiers and dollar quotes nothing is touched.
- SQLite names a result column that has no alias by its source text, so inside such an expression nothing is touched.
- What a database keeps as text (`CREATE …`), several statements in one, and what is not understood, stay as they are.

sqlglot merges statements that answer differently (`7%3` and `mod(7,3)` have other headings; `length` and `len`).
"""

import re
from dataclasses import dataclass
from typing import Literal

SqlDialect = Literal["sqlite", "postgres"]

_TEXTLESS = frozenset({"select", "with", "values", "insert", "replace", "update", "delete", "table"})
"""First words of statements whose own text nothing keeps."""
_LIST_ENDS = frozenset({"from", "where", "group", "having", "order", "limit", "union", "intersect", "except", "on"})
"""Words that end a list of result columns, and can be no column's name."""

_QUANTIFIERS = {("select", "distinct"), ("select", "all")}

_QUOTED = r"""'(?:[^']|'')*'|"(?:[^"]|"")*\""""
_SQLITE = re.compile(
    rf"""(?P<gap>(?:[ \t\n\f\r]+|--[^\n]*(?:\n|\Z)|/\*(?:[^*]|\*(?!/))*(?:\*/|\Z))+)
    |(?P<word>[A-Za-z_\x80-\U0010ffff][\w$\x80-\U0010ffff]*)
    |(?P<quoted>{_QUOTED}|`(?:[^`]|``)*`|\[[^\]]*\])
    |(?P<mark>[(),;])
    |(?P<number>[0-9.][\w.]*)
    |(?P<other>[^'"`\[])""",
    re.VERBOSE | re.ASCII,
)
_POSTGRES = re.compile(
    rf"""(?P<gap>(?:[ \t\n\f\r\v]+|--[^\n\r]*|/\*(?:[^*/]|\*(?!/)|/(?!\*))*\*/)+)
    |(?P<word>[A-Za-z_\x80-\U0010ffff][\w$\x80-\U0010ffff]*)
    |(?P<quoted>{_QUOTED}|\$(?P<tag>(?:[A-Za-z_\x80-\U0010ffff][\w\x80-\U0010ffff]*)?)\$(?:.|\n)*?\$(?P=tag)\$)
    |(?P<mark>[(),;])
    |(?P<number>[0-9.][\w.]*)
    |(?P<other>(?!/\*)[^'"$]|\$(?=[0-9]))""",
    re.VERBOSE | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str


def canonical_statement(sql: str, dialect: SqlDialect) -> str:
    """Return what stands for sql and for every spelling of it that surely has the same answer, column names included.

    The result is a statement too, and is what runs. About 0.5 us for each byte.
    """
    tokens = _tokens(sql, _SQLITE if dialect == "sqlite" else _POSTGRES)
    if dialect == "postgres" and "\\" in sql:
        # What a backslash means in a string is a setting of the session.
        return sql
    if tokens is None:
        return sql
    while tokens and tokens[-1].text == ";":
        tokens.pop()
        if tokens and tokens[-1].kind == "gap" and not _comment(tokens[-1].text):
            tokens.pop()
    first = next((token for token in tokens if token.kind != "gap"), None)
    if first is None or first.text.lower() not in _TEXTLESS or any(token.text == ";" for token in tokens):
        return sql
    gaps = _Gaps(dialect)
    parts = [gaps.read(token, tokens[n + 1] if n + 1 < len(tokens) else None) for n, token in enumerate(tokens)]
    return "".join(parts).strip(" \n")


def _tokens(sql: str, lexer: re.Pattern[str]) -> list[_Token] | None:
    """Return all tokens of sql; None where some of it is not understood, as an open string."""
    tokens, at = [], 0
    text = sql.strip(" \t\n\f\r")
    while at < len(text):
        found = lexer.match(text, at)
        if found is None:
            return None
        kind = next(name for name in ("gap", "word", "quoted", "mark", "number", "other") if found[name] is not None)
        tokens.append(_Token(kind, found[0]))
        at = found.end()
    return tokens


class _Gaps:
    """Walks along the tokens and says what each gap becomes."""

    def __init__(self, dialect: SqlDialect) -> None:
        self._dialect = dialect
        self._depth = 0
        self._lists: list[int] = []
        self._before = self._second = ""

    def read(self, token: _Token, following: _Token | None) -> str:
        if token.kind == "gap":
            return self._gap(token.text, following)
        word = token.text.lower() if token.kind in ("word", "mark") else token.kind
        if word == "(":
            self._depth += 1
        elif word == ")":
            self._depth -= 1
            self._lists = [depth for depth in self._lists if depth <= self._depth]
        elif word in ("select", "returning"):
            self._lists.append(self._depth)
        elif word in _LIST_ENDS and self._before != "distinct":
            # `IS DISTINCT FROM` is an operator.
            self._lists = [depth for depth in self._lists if depth < self._depth]
        self._second, self._before = self._before, word
        return token.text

    def _gap(self, text: str, following: _Token | None) -> str:
        if self._dialect == "postgres":
            # Two strings with a line break between them are one string.
            return "\n" if "\n" in text or "\r" in text else " "
        if not self._lists or self._between_columns(text, following):
            return " "
        return text

    def _between_columns(self, text: str, following: _Token | None) -> bool:
        """Say whether a gap in a list of result columns lies between them, and not in the text that names one."""
        if self._lists != [self._depth]:
            return False
        if self._before in ("select", "returning", ",") or (self._second, self._before) in _QUANTIFIERS:
            return True
        if following is None or _comment(text) or self._before == "distinct":
            return False
        return following.text == "," or following.text.lower() in _LIST_ENDS


def _comment(gap: str) -> bool:
    return "--" in gap or "/*" in gap

"""The canonical form of an SQL statement, without regard to whitespace and comments (pure).

If two statements with different results had one key, the second would get a wrong answer. So this module changes only
the gaps (whitespace and comments) between tokens, and leaves many alone:

1. A statement that the lexer does not understand stays as it is, and so do several statements in one and statements
   whose text the database keeps (`CREATE …`).
2. Strings, quoted identifiers and dollar quotes are one token each, so nothing inside them changes.
3. SQLite names a result column without an alias by its source text. `_Gaps` therefore follows the lists of result
   columns, by the depth of parentheses, and keeps the gaps inside an expression there.
4. PostgreSQL joins two strings with a line break between them, so a gap there stays a line break or becomes a space.
   It does not join them over a comment in `/* */`, so a gap with both stays as it is.

sqlglot would merge more, but also statements with different results: `7%3` and `mod(7,3)` have different headings.
"""

import re
from dataclasses import dataclass
from typing import Literal

SqlDialect = Literal["sqlite", "postgres"]

_TEXTLESS = frozenset({"select", "with", "values", "insert", "replace", "update", "delete", "table"})
"""First words of statements whose text the database does not keep."""
_LIST_ENDS = frozenset({"from", "where", "group", "having", "order", "limit", "union", "intersect", "except", "on"})
"""Words that end a list of result columns and cannot be the name of a column."""
_QUANTIFIERS = {("select", "distinct"), ("select", "all")}
"""Pairs of words after which a list of result columns begins, as it does after `select` alone."""

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
    """Return the canonical form of a statement, which runs and has the same result, column names included."""
    tokens = _tokens(sql, _SQLITE if dialect == "sqlite" else _POSTGRES)
    if dialect == "postgres" and "\\" in sql:
        # A setting of the session (standard_conforming_strings) decides where a string with a backslash ends.
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
    """Return the tokens of a statement; None for one that is not understood, such as one with an open string."""
    tokens, at = [], 0
    text = sql.strip(" \t\n\f\r")
    while at < len(text):
        match = lexer.match(text, at)
        if match is None:
            return None
        kind = next(name for name in ("gap", "word", "quoted", "mark", "number", "other") if match[name] is not None)
        tokens.append(_Token(kind, match[0]))
        at = match.end()
    return tokens


class _Gaps:
    """Replaces the gaps between tokens, by the depths of parentheses at which lists of result columns are open."""

    def __init__(self, dialect: SqlDialect) -> None:
        self._dialect = dialect
        self._depth = 0
        self._lists: list[int] = []
        self._before = self._second = ""

    def read(self, token: _Token, following: _Token | None) -> str:
        """Return the text of a token in the canonical form."""
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
            # Two strings with a line break between them are one string, but not with a comment in /* */ there too.
            if "\n" not in text and "\r" not in text:
                return " "
            return text if "/*" in text else "\n"
        if not self._lists or self._between_columns(text, following):
            return " "
        return text

    def _between_columns(self, text: str, following: _Token | None) -> bool:
        """Return whether a gap in a list of result columns lies between two columns, and not inside the text of one."""
        if self._lists != [self._depth]:
            return False
        if self._before in ("select", "returning", ",") or (self._second, self._before) in _QUANTIFIERS:
            return True
        if following is None or _comment(text) or self._before == "distinct":
            return False
        return following.text == "," or following.text.lower() in _LIST_ENDS


def _comment(gap: str) -> bool:
    return "--" in gap or "/*" in gap

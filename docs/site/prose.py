"""Checks of prose: `python -m docs.site.prose` lists long sentences, and how hard each page is to read.

A list item, a table cell, a heading and a paragraph are blocks; a sentence ends with its block. A code span counts as
one word. The Flesch reading ease (1948) is 206.835 - 1.015 x words per sentence - 84.6 x syllables per word: 60 is
plain English, 30 is hard.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs.site.markdown import ADOPTED, DOCS, ROOT, outside_code

MAX_WORDS = 35
"""The longest sentence. Readers lose longer ones; half of it would forbid many clear sentences."""

_CODE = re.compile(r"`+[^`]+`+")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_MARKS = re.compile(r"\*\*|(?<!\w)[*_]|[*_](?!\w)|<!--.*?-->")
_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.)\s+")
_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9\u2026])")
_WORD = re.compile(r"[A-Za-z0-9][\w'.,/%-]*")
_VOWELS = re.compile(r"[aeiouy]+")


@dataclass(frozen=True)
class Sentence:
    """A sentence of a page.

    Attributes:
        line: The line where its block begins.
        text: Without marks; code is `X`.
    """

    line: int
    text: str

    @property
    def words(self) -> list[str]:
        """The words, and numbers, of the sentence."""
        return _WORD.findall(self.text)


def pages() -> list[Path]:
    """Return every page that is checked: all Markdown below `docs/`, and the pages that the site adopts."""
    return sorted([*DOCS.rglob("*.md"), *(ROOT / origin for origin in ADOPTED)])


def sentences_of(text: str) -> Iterator[Sentence]:
    """Yield the sentences of a page's Markdown."""
    for line, block in _blocks(text):
        plain = _MARKS.sub("", _LINK.sub(r"\1", _CODE.sub("X", block)))
        for part in _END.split(" ".join(plain.split())):
            if part:
                yield Sentence(line, part)


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    begin, lines = 0, list[str]()
    for number, line, prose in outside_code(text):
        is_row, is_heading = line.startswith("|"), line.startswith("#")
        item = _ITEM.match(line)
        if lines and (not prose or not line.strip() or is_row or is_heading or item):
            yield begin, " ".join(lines)
            lines = []
        if not prose or not line.strip():
            continue
        if is_row:
            yield from ((number, cell.strip()) for cell in re.split(r"(?<!\\)\|", line.strip("|")) if cell.strip(" -:"))
        elif is_heading:
            yield number, line.lstrip("# ")
        else:
            begin = begin if lines else number
            lines.append(line[item.end() :] if item else line)
    if lines:
        yield begin, " ".join(lines)


def too_long(text: str) -> list[Sentence]:
    """Return the sentences of a page that have more than `MAX_WORDS` words."""
    return [sentence for sentence in sentences_of(text) if len(sentence.words) > MAX_WORDS]


def reading_ease(text: str) -> tuple[float, float]:
    """Return the words per sentence and the Flesch reading ease of a page, without sentences of under four words."""
    sentences = [words for sentence in sentences_of(text) if len(words := sentence.words) > 3]
    words = [word for sentence in sentences for word in sentence]
    if not words:
        return 0.0, 100.0
    length = len(words) / len(sentences)
    return length, 206.835 - 1.015 * length - 84.6 * sum(map(_syllables, words)) / len(words)


def _syllables(word: str) -> int:
    groups = len(_VOWELS.findall(word.lower()))
    # A silent e at the end.
    return max(1, groups - (word.lower().endswith("e") and not word.lower().endswith("le") and groups > 1))


def main() -> int:
    """Print the long sentences, then the pages, the hardest first; return 1 if a sentence is too long."""
    found = 0
    table = []
    for page in pages():
        text = page.read_text()
        name = page.relative_to(ROOT)
        for sentence in too_long(text):
            found += 1
            print(f"{name}:{sentence.line}: {len(sentence.words)} words: {sentence.text}")
        table.append((*reversed(reading_ease(text)), str(name)))
    for ease, length, page_name in sorted(table):
        print(f"{ease:6.1f} ease {length:5.1f} words a sentence  {page_name}")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())

"""Prose is checked: no sentence of more than 35 words, no misspelt word."""

import subprocess
import sys

from docs.site.markdown import ROOT
from docs.site.prose import MAX_WORDS, pages, reading_ease, sentences_of, too_long


def test_sentences_are_short() -> None:
    entries = {page.relative_to(ROOT).as_posix(): too_long(page.read_text()) for page in pages()}
    assert [f"{page}:{sentence.line}: {sentence.text}" for page, long in entries.items() for sentence in long] == []


def test_words_are_spelt_right() -> None:
    """codespell knows common misspellings; `docs/site/codespell.txt` lists words that it takes for one."""
    words = [sys.executable, "-m", "codespell_lib", "--ignore-words", str(ROOT / "docs" / "site" / "codespell.txt")]
    checked = subprocess.run([*words, *map(str, pages())], capture_output=True, text=True, check=False)
    assert checked.stdout == ""


def test_blocks_end_sentences() -> None:
    text = (
        "# Title\nOne `code.span` two. Three\nfour.\n\n- five\n- six\n\n| a | b. C |\n|---|---|\n\n```\nnot this\n```\n"
    )
    results = [(sentence.line, sentence.text) for sentence in sentences_of(text)]
    assert results == [
        (1, "Title"), (2, "One X two."), (2, "Three four."), (5, "five"), (6, "six"), (8, "a"), (8, "b."), (8, "C"),
    ]  # fmt: skip


def test_long_sentence_is_found() -> None:
    assert len(too_long("word " * (MAX_WORDS + 1))) == 1
    assert too_long("word " * MAX_WORDS) == []


def test_plain_text_reads_more_easily() -> None:
    hard = (
        "Notwithstanding considerable organisational complexity, administrators habitually reconfigure infrastructure."
    )
    assert reading_ease("The cat sat on the mat. The dog ran to the door.")[1] > 90
    assert reading_ease(hard)[1] < 10

"""`llms.txt`: the pages of the site as a list for language models (https://llmstxt.org)."""

import re
from collections.abc import Mapping, Sequence

_HEADING = re.compile(r"^# (.+)$", re.MULTILINE)
_LINKS = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_MARKS = re.compile(r"[*`]")


def summary(text: str) -> tuple[str, str]:
    """Return a page's title and its first sentence; the sentence is empty for a page that begins otherwise.

    Args:
        text: The page's Markdown.
    """
    heading = _HEADING.search(text)
    title = _plain(heading[1]) if heading else ""
    rest = text[heading.end() :] if heading else text
    paragraphs = (_plain(" ".join(part.split())) for part in rest.split("\n\n"))
    prose = next((part for part in paragraphs if part[:1].isalpha()), "")
    sentence = re.match(r".+?[.:](?=\s|$)", prose)
    return title, sentence[0].rstrip(":") if sentence else ""


def table_of_contents(order: Sequence[str], texts: Mapping[str, str]) -> str:
    """Return the text of `llms.txt`.

    Args:
        order: The pages in the order of the navigation, by path.
        texts: The Markdown of each page.
    """
    lines = [
        "# Forkpoint",
        "",
        "> A transparent HTTP proxy between LLM agents and their tools. It records the calls of all rollouts of a task",
        "> in a tree, answers known calls from it, and runs new calls in sandboxes that it forks from snapshots.",
        "",
        "Each page is there as Markdown; with `.html` in place of `.md` it is for people.",
        "",
        "## Pages",
    ]
    for page in order:
        title, sentence = summary(texts[page])
        # A decision's title is its summary.
        shown = f": {sentence}" if sentence and not page.startswith("decisions/0") else ""
        lines.append(f"- [{title}]({page}){shown}")
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return _MARKS.sub("", _LINKS.sub(r"\1", text)).strip()

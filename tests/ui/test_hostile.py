"""Whatever a tool says is shown as what it is: text. Nothing of it runs, and none of it holds the page up."""

import base64
import json
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from sandboxes.calls import ToolResult
from tests.machine import wait_until
from tests.proxy.serving import Running, serving
from tests.ui.planting import plant_answers

SCRIPT = "<script>window.hacked=1</script><img src=x onerror=window.hacked=2><svg onload=window.hacked=3>"
ESCAPES = (
    "\x1b[31mred\x1b[0m \x1b[2J\x1b]0;title\x07\x1b]8;;javascript:window.hacked=4\x1b\\link\x1b]8;;\x1b\\ \x08\x7f"
)
BIDI = "safe \u202egnp.exe"
LINE = "x" * 5_000_000


def png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress((b"\0" + b"\xff\0\0" * 4) * 4)) + chunk(b"IEND", b"")
    )


def as_json(value: Any) -> ToolResult:
    return ToolResult(200, "application/json", json.dumps(value).encode())


def shell(stdout: str) -> ToolResult:
    return as_json({"stdout": stdout, "stderr": "", "exit_code": 0, "timed_out": False, "truncated": False})


CONTENT = [
    {"type": "text", "text": SCRIPT},
    {"type": "image", "mimeType": "image/png", "data": base64.b64encode(png()).decode()},
    {"type": "image", "mimeType": "image/svg+xml", "data": base64.b64encode(SCRIPT.encode()).decode()},
]
ANSWERS = {
    "script": (SCRIPT, shell(SCRIPT)),
    "escapes": ("printf escapes", shell(ESCAPES)),
    "bidi": (BIDI, shell(BIDI)),
    "line": ("cat line", shell(LINE)),
    "binary": ("cat /bin/true", ToolResult(200, "text/plain", b"\xff\xfe<b>\x00\x80 end")),
    "html": ("curl page", ToolResult(200, "text/html", f"<html>{SCRIPT}</html>".encode())),
    "svg": (
        "draw",
        ToolResult(200, "image/svg+xml", f'<svg xmlns="http://www.w3.org/2000/svg">{SCRIPT}</svg>'.encode()),
    ),
    "png": ("plot", ToolResult(200, "image/png", png())),
    "no-png": ("plot badly", ToolResult(200, "image/png", SCRIPT.encode())),
    "not-json": ("lie", ToolResult(200, "application/json", b"{not json " + SCRIPT.encode())),
    "deep": ("nest", ToolResult(200, "application/json", b"[" * 900 + b"]" * 900)),
    "records": ("list", as_json([{"<b>": SCRIPT, "n": None}] * 3)),
    "sql": ("select", as_json({"columns": ["a", SCRIPT], "rows": [[1, SCRIPT]], "row_count": 1})),
    "mcp": ("mcp", as_json({"content": CONTENT})),
}


@dataclass(frozen=True)
class Planted:
    """A proxy, and the node that each answer led to."""

    running: Running
    nodes: dict[str, str]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    data = tmp_path_factory.mktemp("data")
    names = plant_answers(data, "hostile", list(ANSWERS.values()))
    with serving(data) as running:
        yield Planted(running, dict(zip(ANSWERS, names, strict=True)))


def shown(planted: Planted, page: Page, name: str) -> Page:
    page.goto(f"{planted.running.client.base_url}/ui/#/t/hostile/n/{planted.nodes[name]}")
    expect(page.locator(".answer")).to_be_visible()
    return page


def harmless(page: Page) -> None:
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, main iframe, main svg[onload], main img[onerror]").count() == 0


@pytest.mark.parametrize("name", list(ANSWERS))
def test_no_script_in_an_answer_runs(planted: Planted, page: Page, name: str) -> None:
    shown(planted, page, name)
    for tab in page.get_by_role("tab").all():
        tab.click()
    harmless(page)


def test_markup_is_shown_as_text(planted: Planted, page: Page) -> None:
    expect(shown(planted, page, "script").locator(".answer .output")).to_have_text(SCRIPT)
    expect(page.locator(".command").first).to_have_text(SCRIPT)
    expect(shown(planted, page, "html").locator(".answer .output")).to_contain_text(SCRIPT)
    page.goto(f"{planted.running.client.base_url}/ui/#/t/hostile?view=table")
    expect(page.get_by_role("treegrid")).to_contain_text(SCRIPT)
    harmless(page)


def test_escapes_only_colour_text(planted: Planted, page: Page) -> None:
    output = shown(planted, page, "escapes").locator(".answer .output")
    expect(output.locator(".f-1")).to_have_text("red")
    expect(output).to_contain_text("␛[2J")
    expect(output).to_contain_text("␛]8;;javascript:window.hacked=4␛\\link")
    expect(output.locator("a")).to_have_count(0)
    assert page.title().endswith("Forkpoint")


def test_text_cannot_change_its_direction(planted: Planted, page: Page) -> None:
    expect(shown(planted, page, "bidi").locator(".answer .output")).to_contain_text("⟨202E⟩")
    expect(page.locator(".command").first).to_contain_text("⟨202E⟩")


def test_line_of_five_megabytes_is_shown_in_part(planted: Planted, page: Page) -> None:
    page.goto(f"{planted.running.client.base_url}/ui/")
    page.evaluate("performance.mark('asked')")
    shown(planted, page, "line")
    took = page.evaluate("performance.now() - performance.getEntriesByName('asked').at(-1).startTime")
    assert took < 20_000
    expect(page.get_by_text("cut: download the whole answer")).to_be_visible()
    assert len(page.locator(".answer .output").inner_text()) == 20_000
    page.get_by_role("button", name=re.compile("Show more")).click()
    wait_until(lambda: len(page.locator(".answer .output").inner_text()) > 60_000, "no more is shown")


def test_invalid_utf8_is_shown_and_marked(planted: Planted, page: Page) -> None:
    output = shown(planted, page, "binary").locator(".answer .output")
    expect(output).to_have_text("��<b>␀� end")
    expect(page.get_by_text("not UTF-8")).to_be_visible()


def test_only_real_images_are_shown(planted: Planted, page: Page) -> None:
    picture = shown(planted, page, "png").locator("img.picture")
    expect(picture).to_have_js_property("naturalWidth", 4)
    expect(shown(planted, page, "no-png").locator("img.picture")).to_have_js_property("naturalWidth", 0)
    expect(shown(planted, page, "svg").locator("img")).to_have_count(0)
    expect(shown(planted, page, "mcp").locator("img.picture")).to_have_count(1)


def test_rows_are_shown_as_table(planted: Planted, page: Page) -> None:
    table = shown(planted, page, "sql").get_by_role("table")
    expect(table.get_by_role("cell").nth(1)).to_have_text(SCRIPT)
    expect(shown(planted, page, "records").get_by_role("row")).to_have_count(4)

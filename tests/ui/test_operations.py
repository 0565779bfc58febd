"""What is done with a whole tree: it is checked, saved as a file, and taken from one."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from sandboxes.calls import ToolResult
from tests.proxy.serving import Running, serving
from tests.ui.planting import plant_answers

WRONG = b'{"stdout":"2\\n","stderr":"","exit_code":0,"timed_out":false,"truncated":false}'


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    data = tmp_path_factory.mktemp("data")
    plant_answers(data, "wrong", [("echo 1", ToolResult(200, "application/json", WRONG))])
    with serving(data) as running:
        for command in ("echo 1 > f", "cat f", "echo 2 > f"):
            running.exec("r", command, task="good")
        yield running


def test_audit_shows_confidence_interval(proxy: Running, page: Page) -> None:
    page.goto(f"{proxy.client.base_url}/ui/#/t/good/audit")
    expect(page.get_by_text("No recorded call differs.")).to_be_visible()
    page.get_by_role("button", name="Verify").click()
    row = page.get_by_role("row", name=re.compile("recorded calls 3 0"))
    expect(row).to_contain_text("0 % to")
    expect(page.get_by_text("Nothing is ignored.")).to_be_visible()


def test_differing_call_is_shown_as_quarantined(proxy: Running, page: Page) -> None:
    page.goto(f"{proxy.client.base_url}/ui/#/t/wrong?view=table")
    page.get_by_role("treegrid").get_by_text("echo 1").click()
    page.locator(".side .menu summary").click()
    page.locator(".side").get_by_role("button", name="Verify").click()
    expect(page).to_have_url(re.compile("#/t/wrong/audit"))
    finding = page.get_by_role("row", name=re.compile("echo 1"))
    expect(finding).to_contain_text("quarantined")
    page.goto(f"{proxy.client.base_url}/ui/#/t/wrong?view=table")
    expect(page.get_by_role("treegrid").get_by_role("row", name=re.compile("echo 1"))).to_contain_text("diverged")


def test_exported_tree_is_imported_elsewhere(
    proxy: Running, page: Page, tmp_path_factory: pytest.TempPathFactory
) -> None:
    page.goto(f"{proxy.client.base_url}/ui/#/t/good")
    with page.expect_download() as download:
        page.get_by_role("link", name="Export").click()
    file = Path(download.value.path())
    with serving(tmp_path_factory.mktemp("other")) as other:
        page.goto(f"{other.client.base_url}/ui/")
        page.get_by_label("File to import").set_input_files(file)
        page.get_by_role("dialog").get_by_label("Task").fill("travelled")
        page.get_by_role("dialog").get_by_role("button", name="Import").click()
        expect(page).to_have_url(re.compile("#/t/travelled$"))
        expect(page.locator(".counts")).to_contain_text("3 nodes")
        page.goto("about:blank")


@pytest.mark.parametrize("content", [b"", b"<script>alert(1)</script>" * 100, b"\0" * 10_240])
def test_import_of_other_file_is_refused(proxy: Running, page: Page, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.forkpoint.tar"
    file.write_bytes(content)
    page.goto(f"{proxy.client.base_url}/ui/")
    page.get_by_label("File to import").set_input_files(file)
    page.get_by_role("dialog").get_by_label("Task").fill("broken")
    page.get_by_role("dialog").get_by_role("button", name="Import").click()
    expect(page.locator(".toast.bad")).to_be_visible()
    assert proxy.client.get("/api/v1/tasks/broken").status_code == 404

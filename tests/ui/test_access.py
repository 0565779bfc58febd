"""Who may steer the proxy through a browser: its own page, with the token where there is one, and nobody else."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.sync_api import BrowserContext, Page, expect
from pydantic import SecretStr

from tests.proxy.serving import Running, serving


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("data")) as running:
        running.exec("r", "echo 1 > f")
        yield running


@contextmanager
def somebody_else() -> Iterator[str]:
    """Serve an empty page on another port: another origin."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", "6")
            self.end_headers()
            self.wfile.write(b"<p>hi\n")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


ATTACKS = """async (base) => {
    const outcomes = [];
    for (const [method, path, body] of [
        ["POST", "/api/v1/tasks/task/nodes/n2/pin", null],
        ["POST", "/api/v1/tasks/task/nodes/n2/exec", '{"command": "rm f"}'],
        ["POST", "/t/task/r/r/shell/exec", '{"command": "echo hacked > f"}'],
        ["GET", "/api/v1/tasks/task/nodes/n1/diff/n2", null],
    ]) {
        for (const mode of ["no-cors", "cors"]) {
            const request = fetch(base + path, { method, body, mode });
            outcomes.push(await request.then((answer) => answer.type, () => "failed"));
        }
    }
    outcomes.push(await new Promise((resolve) => {
        const wire = new WebSocket(base.replace("http", "ws") + "/api/v1/tasks/task/nodes/n2/terminal");
        wire.onopen = () => resolve("open");
        wire.onerror = () => resolve("refused");
    }));
    return outcomes;
}"""


def test_page_of_another_origin_changes_nothing(proxy: Running, browser: BrowserContext) -> None:
    before = proxy.client.get("/api/v1/stats").json()
    page = browser.new_page()
    with somebody_else() as url:
        page.goto(url)
        result = page.evaluate(ATTACKS, str(proxy.client.base_url).rstrip("/"))
    page.close()
    assert set(result) == {"opaque", "failed", "refused"}, "nothing could be read"
    after = proxy.client.get("/api/v1/stats").json()
    assert all(after[name] == before[name] for name in ("calls", "starts", "restores"))
    assert proxy.client.get("/api/v1/tasks/task/nodes/n2").json()["flags"] == []
    assert proxy.exec("r", "cat f").json()["stdout"] == "1\n"


def test_page_cannot_be_framed_or_run_other_scripts(proxy: Running, browser: BrowserContext) -> None:
    page = browser.new_page()
    page.goto(f"{proxy.client.base_url}/ui/")
    blocked = page.evaluate(
        """() => new Promise((resolve) => {
            document.addEventListener("securitypolicyviolation", (event) => resolve(event.violatedDirective));
            const script = document.createElement("script");
            script.textContent = "window.hacked = 1";
            document.body.append(script);
        })"""
    )
    assert blocked == "script-src-elem"
    assert page.evaluate("window.hacked") is None
    page.close()


def test_tool_output_is_never_shown_as_page(proxy: Running, browser: BrowserContext) -> None:
    proxy.client.put("/t/task/r/web/shell/files/root/page.html", content=b"<script>fetch('/api/v1/tasks')</script>")
    page = browser.new_page()
    answer = page.goto(f"{proxy.client.base_url}/t/task/r/web/shell/files/root/page.html")
    assert answer is not None
    assert answer.status == 403
    page.close()
    # An agent, which is no browser, reads the file as ever.
    assert proxy.client.get("/t/task/r/web/shell/files/root/page.html").content.startswith(b"<script>")


def test_token_is_requested_once_and_always_sent(
    page: Page, browser: BrowserContext, tmp_path_factory: pytest.TempPathFactory
) -> None:
    right = "right-token-0123456789"
    with serving(tmp_path_factory.mktemp("closed"), token=SecretStr(right)) as proxy:
        proxy.client.headers["authorization"] = f"Bearer {right}"
        proxy.exec("r", "echo 1 > f")
        page.goto(f"{proxy.client.base_url}/ui/")
        dialog = page.get_by_role("dialog", name="Token")
        for attempt in ("wrong-token-0123456789", right):
            dialog.get_by_label("Token").fill(attempt)
            dialog.get_by_role("button", name="Use it").click()
        expect(page.locator("tr[data-task=task]")).to_be_visible()
        expect(dialog).to_have_count(0)
        # What happens is streamed to it too.
        proxy.exec("other", "echo 1 > f")
        expect(page.locator("svg.timeline rect").first).to_be_attached()
        page.evaluate("location.hash = '#/t/task'")
        with page.expect_download() as download:
            page.get_by_role("button", name="Export").click()
        assert download.value.suggested_filename == "task.forkpoint.tar"
        page.evaluate("location.hash = '#/t/task/n/n2/terminal'")
        expect(page.get_by_role("status").filter(has_text="offers no terminals")).to_be_visible()
        # Another tab has not received it.
        another = browser.new_page()
        another.goto(f"{proxy.client.base_url}/ui/")
        expect(another.get_by_role("dialog", name="Token")).to_be_visible()
        another.close()
        page.goto("about:blank")


def test_task_token_shows_only_its_tasks(page: Page, tmp_path_factory: pytest.TempPathFactory) -> None:
    data = tmp_path_factory.mktemp("some")
    file = data / "tokens"
    file.write_text("alice-token-012345678 alice-*\nroot-token-0123456789\n")
    with serving(data, token_file=file) as proxy:
        proxy.client.headers["authorization"] = "Bearer root-token-0123456789"
        for task in ("alice-1", "bob-1"):
            proxy.exec("r", "echo 1 > f", task=task)
        page.goto(f"{proxy.client.base_url}/ui/")
        page.get_by_role("dialog").get_by_label("Token").fill("alice-token-012345678")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("tr[data-task=alice-1]")).to_be_visible()
        expect(page.locator("tr[data-task]")).to_have_count(1)
        page.evaluate("location.hash = '#/t/bob-1'")
        expect(page.get_by_role("alert")).to_contain_text("this token sees")
        page.goto("about:blank")


def test_page_shows_when_proxy_does_not_answer(page: Page, tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("gone")) as running:
        page.goto(f"{running.client.base_url}/ui/")
        expect(page.locator(".pulse")).to_have_text("live")
        page.route("**/api/v1/stats", lambda route: route.abort())
        running.exec("r", "echo 1 > f")
        expect(page.locator(".pulse")).to_have_text("no answer")
        page.unroute("**/api/v1/stats")
        expect(page.locator(".pulse")).to_have_text("live")
        page.goto("about:blank")

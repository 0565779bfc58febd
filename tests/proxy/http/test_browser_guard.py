"""Pages of other sites are refused, and agents, which send no browser headers, are not."""

from collections.abc import Iterator

import httpx
import pytest

from proxy.http.browser_guard import rebindable, refuse_foreign
from proxy.refusals import RefusalError
from tests.proxy.serving import Running, serving

HOST = (b"host", b"127.0.0.1:8700")
AGENTS = [
    [HOST],
    [HOST, (b"user-agent", b"python-httpx/0.28"), (b"accept", b"*/*")],
    # Node's own fetch sends this one.
    [HOST, (b"sec-fetch-mode", b"cors"), (b"user-agent", b"node")],
    [(b"host", b"forkpoint:8700")],
    [(b"host", b"host.docker.internal:8700")],
    [(b"host", b"[::1]:8700")],
    [],
]
OURS = [HOST, (b"sec-fetch-site", b"same-origin"), (b"sec-fetch-dest", b"empty"), (b"origin", b"http://127.0.0.1:8700")]
FOREIGN = [
    [HOST, (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"no-cors"), (b"sec-fetch-dest", b"empty")],
    [HOST, (b"sec-fetch-site", b"same-site"), (b"sec-fetch-mode", b"cors")],
    [HOST, (b"origin", b"https://evil.example")],
    [HOST, (b"origin", b"http://127.0.0.1:9999")],
    [HOST, (b"origin", b"null")],
    *(
        [HOST, (b"origin", origin)]
        for origin in (
            b"http://x//127.0.0.1:8700",
            b"http://evil.example//127.0.0.1:8700",
            b"//127.0.0.1:8700",
            b"127.0.0.1:8700",
            b"http://evil@127.0.0.1:8700",
            b"http://127.0.0.1:8700/",
            b"http://127.0.0.1:8700?x",
            b"ftp://127.0.0.1:8700",
            b"http://127.0.0.1:8700#x",
            b"http://[127.0.0.1:8700",
            b"http://127.0.0.1",
            b"\xff",
            b"http:127.0.0.1:8700",
        )
    ),
    [(b"host", b"rebound.example:8700")],
    [(b"host", b"127.0.0.1.evil.example")],
]


@pytest.mark.parametrize("headers", [*AGENTS, OURS])
@pytest.mark.parametrize("tool", [True, False])
def test_agents_and_own_page_are_accepted(headers: list[tuple[bytes, bytes]], tool: bool) -> None:
    refuse_foreign("POST", headers, tool=tool)


@pytest.mark.parametrize("headers", FOREIGN)
@pytest.mark.parametrize("tool", [True, False])
def test_requests_of_other_sites_are_refused(headers: list[tuple[bytes, bytes]], tool: bool) -> None:
    with pytest.raises(RefusalError, match=r"another site|not a name of this proxy") as refused:
        refuse_foreign("POST", headers, tool=tool)
    assert refused.value.status == 403


@pytest.mark.parametrize(
    "hosts",
    [
        [b"127.0.0.1:8700", b"evil.example"], [b"localhost", b"localhost"], [b"localhost:80@evil.example"], [b"a b"],
        [b"localhost:x"], [b"local/host"], [b"localhost,evil.example"], [b"[::1"], [b"::1"], [b"localhost:80:80"],
        [b"[::1]evil.example"], [b"localhost\xff"],
    ],
)  # fmt: skip
def test_malformed_hosts_are_refused(hosts: list[bytes]) -> None:
    """Each of these has a name that one reader takes for another."""
    with pytest.raises(RefusalError) as refused:
        refuse_foreign("GET", [(b"host", host) for host in hosts], tool=False)
    assert refused.value.status == 400


def test_foreign_links_open_only_the_control_plane() -> None:
    """Links from other sites open only the control plane."""
    followed = [
        HOST,
        (b"sec-fetch-site", b"cross-site"),
        (b"sec-fetch-mode", b"navigate"),
        (b"sec-fetch-dest", b"document"),
    ]
    refuse_foreign("GET", followed, tool=False)
    with pytest.raises(RefusalError):
        refuse_foreign("POST", followed, tool=False)
    with pytest.raises(RefusalError):
        refuse_foreign("GET", followed, tool=True)
    framed = [
        HOST,
        (b"sec-fetch-site", b"cross-site"),
        (b"sec-fetch-mode", b"navigate"),
        (b"sec-fetch-dest", b"iframe"),
    ]
    with pytest.raises(RefusalError):
        refuse_foreign("GET", framed, tool=False)


def test_browser_never_shows_a_tool_response() -> None:
    typed = [HOST, (b"sec-fetch-site", b"none"), (b"sec-fetch-mode", b"navigate"), (b"sec-fetch-dest", b"document")]
    refuse_foreign("GET", typed, tool=False)
    with pytest.raises(RefusalError, match="browsers"):
        refuse_foreign("GET", typed, tool=True)


def test_only_registrable_names_are_rebindable() -> None:
    harmless = [
        "127.0.0.1:1",
        "[::1]:80",
        "localhost",
        "LOCALHOST.",
        "a.localhost:80",
        "proxy",
        "x.internal",
        "",
        "10.0.0.1",
    ]
    assert not any(rebindable(host) for host in harmless)
    assert all(rebindable(host) for host in ["evil.example", "evil.example:8700", "127.0.0.1.nip.io", "a.b.com."])


def test_names_in_the_settings_are_accepted() -> None:
    refuse_foreign("GET", [(b"host", b"forkpoint.example.org:443")], tool=True, names=["forkpoint.example.org"])


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("data")) as running:
        running.exec("r", "echo 1 > f")
        yield running


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}])
@pytest.mark.parametrize(
    "path", ["/api/v1/tasks/task/nodes/n1/pin", "/t/task/r/r/shell/exec", "/t/task/r/new/shell/exec"]
)
def test_cross_site_request_changes_nothing(proxy: Running, path: str, headers: dict[str, str]) -> None:
    before = proxy.client.get("/api/v1/stats").json()["calls"]
    answer = proxy.client.post(path, content=b'{"command": "echo 1 > f"}', headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (403, "application/problem+json")
    assert proxy.client.get("/api/v1/stats").json()["calls"] == before
    assert proxy.client.get("/api/v1/tasks/task/nodes/n1").json()["flags"] == []


def test_hit_is_refused_to_pages_too(proxy: Running) -> None:
    """The short way of hits must not be a way around."""
    assert proxy.exec("second", "echo 1 > f").headers["cache-status"] == "forkpoint; hit"
    body = {"command": "echo 1 > f"}
    for headers in ({"Sec-Fetch-Dest": "document"}, {"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        answer = proxy.client.post("/t/task/r/second/shell/exec", json=body, headers=headers)
        assert answer.status_code == 403, headers


def test_control_plane_forbids_content_sniffing(proxy: Running) -> None:
    for path in ("/api/v1/stats", "/api/v1/tasks/none", "/metrics", "/openapi.json"):
        assert httpx.get(f"{proxy.client.base_url}{path}").headers["x-content-type-options"] == "nosniff"


def test_tokens_allow_any_host_name() -> None:
    refuse_foreign("POST", [(b"host", b"forkpoint.example.com")], tool=True, names=None)
    with pytest.raises(RefusalError, match="another site"):
        refuse_foreign("POST", [(b"host", b"a.example"), (b"origin", b"https://evil.example")], tool=True, names=None)

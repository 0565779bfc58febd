"""What specs may name: nothing of the proxy's own, and confined specs only what the operator allows."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sandboxes.errors import ForbiddenSourceError
from sandboxes.linux.plain_paths import open_plain
from sandboxes.server_spec import Egress
from sandboxes.sources import SourceRules, has_dot_segments, malformed_source
from sandboxes.spec import EnvironmentSpec

URLS = ("http://tools:8080/alice", "https://models.example", "postgresql://db.example/shop")


@pytest.fixture
def rules(tmp_path: Path) -> SourceRules:
    """A proxy with a data directory and a token file, and one directory for everybody."""
    for name in ("data", "shared", "other"):
        (tmp_path / name).mkdir()
    for name in ("tokens", "data/secret", "shared/a.db", "other/b.db"):
        (tmp_path / name).touch()
    return SourceRules((tmp_path / "data", tmp_path / "tokens"), (str(tmp_path / "shared"), *URLS, "env:MODEL_KEY"))


@pytest.mark.parametrize(
    ("listed", "named", "allowed"),
    [
        ("pypi.org", "pypi.org", True),
        ("*.pypi.org", "files.pypi.org", True),
        ("*.pypi.org", "a.b.pypi.org", True),
        ("*.pypi.org", "*.pypi.org", True),
        ("*.pypi.org", "*.b.pypi.org", True),
        ("pypi.org:8080", "pypi.org:8080", True),
        ("*.pypi.org", "pypi.org", False),
        ("*.pypi.org", "xpypi.org", False),
        ("pypi.org", "*.pypi.org", False),
        ("*.b.pypi.org", "*.pypi.org", False),
        ("pypi.org", "pypi.org:8080", False),
        ("pypi.org:443", "pypi.org", False),
    ],
)
def test_egress_is_to_listed_hosts_only(listed: str, named: str, allowed: bool) -> None:
    for confined in (False, True):
        spec = EnvironmentSpec(egress=Egress(hosts=(named,)), confined=confined)
        with nullcontext() if allowed else pytest.raises(ForbiddenSourceError, match="setting `egress`"):
            SourceRules(egress=(listed,)).check(spec)
        with pytest.raises(ForbiddenSourceError, match="setting `egress`"):
            SourceRules().check(spec)


@pytest.mark.parametrize(
    "host",
    [
        "", "localhost", "PYPI.org", "pypi.org.", "127.0.0.1", "2130706433", "0x7f.1", "a.0x7f", "[::1]", "*", "*.org",
        "pypi.*", "a b.org", "http://pypi.org", "pypi.org/", "u@pypi.org", "pypi.org:0", "pypi.org:65536",
        "pypi.org:080", "pypi.org\n", "-a.org", f"{'a' * 64}.org",
    ],
)  # fmt: skip
def test_egress_names_hosts_and_nothing_else(host: str) -> None:
    with pytest.raises(ValidationError):
        Egress(hosts=(host,))


def specs_naming(path: str) -> list[EnvironmentSpec]:
    """Return a spec for each place that names a path of the proxy's machine."""
    members: list[dict[str, Any]] = [
        {"base": path},
        {"archives": [{"source": path}]},
        {"databases": {"t": {"path": "/root/t.db", "source": path}}},
        {"image": path},
        {"image": "i", "databases": {"t": {"path": "/root/t.db", "source": path}}},
        {"driver": "sqlite", "databases": {"t": {"source": path}}},
        {"driver": "sqlite", "databases": {"t": {"source": [path, path]}}},
        {"driver": "video", "video": {"source": path}},
        {"driver": "video", "video": {"source": {"v": path}}},
        {"driver": "mine", "options": {"deep": [{"er": path}]}},
        {"driver": "mine", "options": {path: 1}},
    ]
    return [EnvironmentSpec.model_validate(fields) for fields in members]


def confined(spec: EnvironmentSpec) -> EnvironmentSpec:
    return spec.model_copy(update={"confined": True})


def test_nobody_reaches_the_proxy_s_own_files(rules: SourceRules, tmp_path: Path) -> None:
    """Neither by path, by a parent, by a link, by a hard link, nor through `..`: also without a token."""
    links = {
        "to-data": tmp_path / "data", "to-secret": tmp_path / "data" / "secret", "to-tokens": tmp_path / "tokens",
        "to-root": Path("/"), "to-proc": Path("/proc/self"),
    }  # fmt: skip
    for name, target in links.items():
        (tmp_path / "shared" / name).symlink_to(target)
    os.link(tmp_path / "tokens", tmp_path / "shared" / "hard")
    names = [
        "data",
        "data/secret",
        "data/later",
        "tokens",
        "",
        "shared/../data",
        "shared/hard",
        "shared/to-data/secret",
    ]
    paths = [str(tmp_path / name) for name in (*names, *(f"shared/{name}" for name in links))]
    paths += [
        "/",
        "/proc",
        "/proc/1/environ",
        "/sys",
        "/dev/sda",
        "//proc/self/root/etc",
        f"/{tmp_path}",
        f"/{tmp_path}/data",
    ]
    for path in paths:
        for spec in specs_naming(path):
            with pytest.raises(ForbiddenSourceError, match="no spec may read"):
                rules.check(spec)


def test_confined_specs_name_only_allowed_paths(rules: SourceRules, tmp_path: Path) -> None:
    (tmp_path / "shared" / "out").symlink_to(tmp_path / "other")
    for allowed in ("shared", "shared/a.db", "shared/later", "shared/../shared/a.db"):
        for spec in specs_naming(str(tmp_path / allowed)):
            rules.check(confined(spec))
    for forbidden in ("other/b.db", "shared/out/b.db", "shared/../other", "shared2", "nowhere"):
        for spec in specs_naming(str(tmp_path / forbidden)):
            rules.check(spec)
            with pytest.raises(ForbiddenSourceError, match="not among the `sources`"):
                rules.check(confined(spec))


def test_without_sources_confined_specs_name_nothing(tmp_path: Path) -> None:
    """Nothing is allowed by default, except the host's own system as a base."""
    SourceRules().check(EnvironmentSpec(confined=True, files={"/etc/motd": "hi"}, setup=("true",)))
    for spec in specs_naming(str(tmp_path)):
        with pytest.raises(ForbiddenSourceError):
            SourceRules().check(confined(spec))


def test_relative_names_of_options_count_as_paths(rules: SourceRules, tmp_path: Path, monkeypatch: Any) -> None:
    """The default data directory is `forkpoint-data`, in the directory that the proxy was started in."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ForbiddenSourceError):
        rules.check(EnvironmentSpec(driver="mine", options={"folder": "data"}))
    with pytest.raises(ForbiddenSourceError):
        rules.check(EnvironmentSpec(driver="mine", options={"folder": "other"}, confined=True))
    rules.check(EnvironmentSpec(driver="mine", options={"mode": "fast", "n": 3, "odd": "a\0b"}, confined=True))


def upstream(url: str) -> EnvironmentSpec:
    return EnvironmentSpec.model_validate({"driver": "http", "servers": {"api": {"upstream": url}}, "confined": True})


def database(dsn: str) -> EnvironmentSpec:
    databases = {"shop": {"dsn": dsn, "source": "shop"}}
    return EnvironmentSpec.model_validate({"driver": "postgres", "databases": databases, "confined": True})


def model(url: str, key: str | None = None) -> EnvironmentSpec:
    video = {"source": {}, "model": {"base_url": url, "model": "m", "api_key_env": key}}
    return EnvironmentSpec.model_validate({"driver": "video", "video": video, "confined": True})


def test_confined_specs_name_only_allowed_urls(rules: SourceRules) -> None:
    for allowed in (
        upstream("http://tools:8080/alice"), upstream("http://TOOLS:8080/alice/deeper"), model("https://models.example"),
        model("https://models.example:443/v1", "MODEL_KEY"), database("postgresql://db.example/shop"),
        database("postgresql://me:pw@db.example:5432/shop"),
    ):  # fmt: skip
        rules.check(allowed)
    for forbidden in (
        upstream("http://127.0.0.1:8080/alice"), upstream("http://169.254.169.254/latest/meta-data"),
        upstream("http://[::1]/"), upstream("http://tools:8081/alice"), upstream("https://tools:8080/alice"),
        upstream("http://tools:8080/alicent"), upstream("http://tools:8080/"), upstream("http://tools:8080/alice/../bob"),
        upstream("http://tools:8080/alice/%2E%2e/bob"), upstream("http://tools.evil:8080/alice"),
        model("http://models.example"), model("https://models.example@evil/"), model("https://evil/?https://models.example"),
        model("https://models.example\\@evil/"), model("https://models.example", "FORKPOINT_TOKEN"),
        database("postgresql://db.example/shop?host=127.0.0.1"), database("host=db.example dbname=shop"),
        database("postgresql://db.example,evil/shop"), database("postgresql:///shop"), database("service=mine"),
        database("postgresql://db.example/shop?passfile=/root/.pgpass"), database("postgresql://%2Ftmp/shop"),
        database("postgresql://db.example/other"), database("file:///etc/passwd"),
    ):  # fmt: skip
        with pytest.raises(ForbiddenSourceError):
            rules.check(forbidden)
        rules.check(forbidden.model_copy(update={"confined": False}))


@given(st.text(max_size=60) | st.text("/.%25cCeEfF\\ab?", max_size=20))
def test_any_text_is_allowed_or_refused(text: str) -> None:
    """No text makes the rules fail in another way, and none outside the allowed prefixes is let through."""
    rules = SourceRules((), URLS)
    for spec in (text, f"http://tools:8080/alice/{text}", f"http://tools:8080{text}", f"http://{text}tools:8080/alice"):
        try:
            rules.check_url(spec)
        except ForbiddenSourceError:
            continue
        assert spec.lower().startswith(("http://tools:8080/alice", "http://", "https://models.example", "postgres"))
        assert not has_dot_segments(spec.partition("://")[2])


def test_malformed_entries_of_sources_are_known() -> None:
    assert [malformed_source(entry) for entry in ("/a", "env:KEY", *URLS)] == [False] * 5
    assert [malformed_source(entry) for entry in ("a/b", "file:///a", "http://", "http://x/?y", "~", "")] == [True] * 6


def test_link_put_later_is_not_followed(rules: SourceRules, tmp_path: Path) -> None:
    """Between the check and its use, the checked directory is replaced by a link to a secret one."""
    folder = tmp_path / "shared" / "folder"
    folder.mkdir()
    (folder / "f").write_text("mine")
    real = rules.real(folder / "f", confined=True)
    with open_plain(real) as path:
        folder.rename(tmp_path / "shared" / "away")
        folder.symlink_to(tmp_path / "other")
        assert path.read_text() == "mine"
    (tmp_path / "other" / "f").write_text("secret")
    with pytest.raises(OSError, match="Not a directory"), open_plain(real):
        pass


def test_special_files_are_not_opened(tmp_path: Path) -> None:
    """A FIFO would hold its reader for ever."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    for name in ("fifo", "link"):
        with pytest.raises(OSError, match="a link or a special file"), open_plain(tmp_path / name):
            pass

"""The control plane reads JSON whatever curl says about the body."""

from pathlib import Path

import pytest

from tests.proxy.serving import serving


@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded", None])
def test_body_of_curl_is_json(tmp_path: Path, kind: str | None) -> None:
    """`curl -d` calls every body a form, and README's commands use curl."""
    with serving(tmp_path) as running:
        made = running.client.put(
            "/api/v1/tasks/x",
            content=b'{"driver": "memory", "merge": "off"}',
            headers={"content-type": kind} if kind else {},
        )
        assert made.status_code == 201, made.text
        assert made.json()["spec"]["merge"] == "off"


def test_form_of_another_site_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        headers = {"content-type": "application/x-www-form-urlencoded", "origin": "https://evil.example"}
        sent = running.client.post("/api/v1/gc", content=b"{}", headers=headers)
        assert sent.status_code == 403

"""The description of the REST API in a browser."""

import pytest
from playwright.sync_api import Page, expect
from pydantic import SecretStr

from tests.proxy.serving import serving

TOKEN = "browser-token-0123456789"


@pytest.mark.parametrize("path", ["/docs", "/ui/docs.html"])
def test_description_is_shown_by_own_files(page: Page, tmp_path_factory: pytest.TempPathFactory, path: str) -> None:
    """Under the page's policy, and without asking another host (the fixture's rules)."""
    with serving(tmp_path_factory.mktemp("data")) as proxy:
        page.goto(f"{str(proxy.client.base_url).rstrip('/')}{path}")
        expect(page.get_by_role("heading", level=1)).to_contain_text("REST API")
        route = page.locator("details", has_text="/api/v1/tasks/{task}/rollouts").first
        route.locator("summary").click()
        expect(route.locator("pre").first).to_be_visible()


def test_description_asks_for_the_token(page: Page, tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("data"), token=SecretStr(TOKEN)) as proxy:
        page.goto(f"{str(proxy.client.base_url).rstrip('/')}/ui/docs.html")
        page.get_by_label("Token", exact=True).last.fill(TOKEN)
        page.get_by_role("button", name="Use it").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("REST API")

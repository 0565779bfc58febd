"""What is prepared of videos is seen on the overview, and nothing of it where there are none."""

from pathlib import Path

from playwright.sync_api import Page, expect

from sandboxes.video.driver import VideoDriver
from tests.proxy.serving import serving
from tests.sandboxes.videos import make


def test_overview_shows_progress_of_videos(tmp_path: Path, page: Page) -> None:
    clip = make(tmp_path / "clip.mp4")
    with serving(tmp_path / "data", drivers={"video": VideoDriver(tmp_path / "video")}) as proxy:
        page.goto(f"{proxy.client.base_url}/ui/")
        expect(page.get_by_role("heading", name="Tasks")).to_be_visible()
        expect(page.get_by_role("heading", name="Videos")).to_be_hidden()
        spec = {"driver": "video", "video": {"source": str(clip)}}
        proxy.client.put("/api/v1/tasks/clips", json=spec).raise_for_status()
        for tool, arguments in (("load_video", {"name": "clip.mp4"}), ("preprocess", {})):
            proxy.client.post(f"/t/clips/r/a/video/{tool}", json=arguments).raise_for_status()
        panel = page.locator("section", has=page.get_by_role("heading", name="Videos"))
        expect(panel.locator("tbody tr")).to_have_count(1)
        expect(panel).to_contain_text("done")
        expect(panel).to_contain_text("100 %")

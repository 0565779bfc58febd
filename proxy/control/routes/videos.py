"""What the control plane shows of videos: preprocesses under way, and how often models were asked."""

from fastapi import APIRouter, Request
from pydantic import BaseModel

from proxy.control.routes.params import EngineDep, granted
from sandboxes.video.driver import VideoDriver

router = APIRouter()


class PreprocessView(BaseModel):
    """A preprocess. video: SHA-256. stage: pictures, sound, captions, vectors, done or failed.

    at_s, of_s: how far it is in the video, and its length. share: how much of the stage is done. seconds: so far, or
    all that it took. error: why it failed.
    """

    video: str
    stage: str
    at_s: float
    of_s: float
    share: float
    seconds: float
    error: str | None


class VideosView(BaseModel):
    """preprocesses: under way, and the last that ended, oldest first. model_questions: really asked, and
    model_answers_reused: answered from what a model said before, since this proxy started."""

    preprocesses: list[PreprocessView]
    model_questions: int
    model_answers_reused: int


@router.get("/videos")
async def show_videos(engine: EngineDep, request: Request) -> VideosView:
    """Show preprocesses and how far they are, and how often models were asked."""
    granted(request).require_whole()
    driver = engine.drivers.get("video")
    if not isinstance(driver, VideoDriver):
        return VideosView(preprocesses=[], model_questions=0, model_answers_reused=0)
    return VideosView(**driver.overview())

"""Routes of videos: the progress of preprocessing, and the number of model requests."""

from pydantic import BaseModel

from proxy.control.routes.params import WHOLE, ControlDep, api_router
from sandboxes.video.driver import VideoDriver

router = api_router("resources")


class PreprocessView(BaseModel):
    """The preprocessing of a video.

    Attributes:
        video: SHA-256 of the video.
        stage: `pictures`, `sound`, `captions`, `vectors`, `done` or `failed`.
        at_s: Position in the video, in seconds.
        of_s: Length of the video, in seconds.
        share: Finished share of the stage, from 0 to 1.
        seconds: How long it has run, or ran in total.
    """

    video: str
    stage: str
    at_s: float
    of_s: float
    share: float
    seconds: float
    error: str | None


class VideosView(BaseModel):
    """The work of the video driver since this proxy started.

    Attributes:
        model_answers_reused: Number of requests answered from an earlier answer of a model.
        model_tokens: Tokens that models counted for their answers. Reports show what the tree has saved of them.
    """

    preprocesses: list[PreprocessView]
    model_questions: int
    model_answers_reused: int
    model_tokens: int


@router.get("/videos", dependencies=[WHOLE])
async def show_videos(control: ControlDep) -> VideosView:
    """Show the progress of preprocessing, and the number of model requests."""
    driver = control.drivers.get("video")
    if not isinstance(driver, VideoDriver):
        return VideosView(preprocesses=[], model_questions=0, model_answers_reused=0, model_tokens=0)
    return VideosView(**driver.overview())

"""An agent that finds a scene in a video and looks at it, without a model. Run it twice: the second run costs nothing.

    FORKPOINT_DRIVERS='["video"]' forkpoint serve
    python examples/make_clip.py /tmp/clip.mp4
    python examples/video_agent.py /tmp/clip.mp4 "a green meadow" --save /tmp/frame.jpg

What it says is its tools' word alone. Where the task names a model (`--model-url`, `--model`), it asks that, too.
"""

import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import httpx


class Tools:
    """The video tools of one rollout. Nothing here knows of a cache: the base URL is all there is."""

    def __init__(self, client: httpx.Client, base_url: str) -> None:
        self._client, self._base_url = client, base_url

    def call(self, tool: str, **arguments: Any) -> httpx.Response:
        """Call a tool and tell how it was answered."""
        began = time.perf_counter()
        answer = self._client.post(f"{self._base_url}/{tool}", json=arguments)
        took_ms = (time.perf_counter() - began) * 1e3
        how = answer.headers.get("cache-status", "").partition("; ")[2]
        print(f"  {tool:<27} {took_ms:8.1f} ms  {how}", file=sys.stderr)
        if answer.status_code == 422:
            sys.exit(answer.json()["error"]["message"])
        return answer.raise_for_status()


def look_for(tools: Tools, video: str, description: str) -> tuple[str, bytes]:
    """Return what an agent reports of the scene that fits a description best, and its picture."""
    tools.call("load_video", name=video)
    tools.call("preprocess")
    info = tools.call("video_info").json()
    found = tools.call("segment_localization", description=description, k=1).json()["found"]
    if not found:
        return f"Nothing in {info['duration_s']:g} s fits {description!r}.", b""
    segment = found[0]
    middle = (segment["start_s"] + segment["end_s"]) / 2
    shots = tools.call("detect_shots").json()["shots"]
    shot = next(shot for shot in shots if shot["start_s"] <= middle < shot["end_s"])
    texts = tools.call("get_subtitles", start=shot["start_s"], end=shot["end_s"]).json()["subtitles"]
    question = {"question": f"Is this {description}?", "segment": segment["segment"]}
    answer = tools.call("visual_question_answering", **question).json()
    picture = tools.call("get_frame", t=middle).content
    lines = [
        f"{description!r} fits best from {shot['start_s']:g} s to {shot['end_s']:g} s (shot {shot['id']}).",
        f"Description: {segment['caption']}",
        *(f"Subtitle: {each['text']}" for each in texts),
        f"Asked about it: {answer['answer']}",
    ]
    return "\n".join(lines), picture


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("video", type=Path)
    parser.add_argument("description")
    parser.add_argument("--proxy", default="http://127.0.0.1:8700")
    parser.add_argument("--rollout", default=f"run-{time.time_ns()}", help="a new one each time, if not given")
    parser.add_argument("--save", type=Path, help="write the picture there")
    parser.add_argument("--model-url", help="an OpenAI-compatible endpoint, as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="its model")
    options = parser.parse_args()
    model = {"base_url": options.model_url, "model": options.model} if options.model_url else None
    spec = {"driver": "video", "video": {"source": str(options.video.resolve()), "model": model}}
    with httpx.Client(base_url=options.proxy, timeout=600) as client:
        client.put("/api/v1/tasks/look", json=spec).raise_for_status()
        tools = Tools(client, f"/t/look/r/{options.rollout}/video")
        report, picture = look_for(tools, options.video.name, options.description)
    print(report)
    if options.save and picture:
        options.save.write_bytes(picture)


if __name__ == "__main__":
    main()

"""Run an agent that finds a scene in a video and describes it, without a model. A second run is all hits.

    FORKPOINT_DRIVERS='["video"]' forkpoint serve
    python examples/make_clip.py /tmp/clip.mp4
    python examples/video_agent.py /tmp/clip.mp4 "a green meadow" --save /tmp/frame.jpg

Its report consists of its tools' results. If `--model-url` and `--model` name a model, the report has its answer too.
"""

import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import httpx


class Tools:
    """The video tools of one rollout. The client knows nothing of a cache: only the base URL names the proxy."""

    def __init__(self, client: httpx.Client, base_url: str) -> None:
        self._client, self._base_url = client, base_url

    def call(self, tool: str, **arguments: Any) -> httpx.Response:
        """Call a tool, and print how long the call took and whether it was a hit."""
        began = time.perf_counter()
        response = self._client.post(f"{self._base_url}/{tool}", json=arguments)
        took_ms = (time.perf_counter() - began) * 1e3
        how = response.headers.get("cache-status", "").partition("; ")[2]
        print(f"  {tool:<27} {took_ms:8.1f} ms  {how}", file=sys.stderr)
        if response.status_code == 422:
            sys.exit(response.json()["error"]["message"])
        return response.raise_for_status()


def describe(tools: Tools, video: str, description: str) -> tuple[str, bytes]:
    """Return the agent's report on the scene that fits a description best, and a frame of it."""
    tools.call("load_video", name=video)
    tools.call("preprocess")
    info = tools.call("video_info").json()
    segments = tools.call("segment_localization", description=description, k=1).json()["found"]
    if not segments:
        return f"Nothing in {info['duration_s']:g} s fits {description!r}.", b""
    segment = segments[0]
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
    """Run the agent that the command line describes."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("video", type=Path)
    parser.add_argument("description")
    parser.add_argument("--proxy", default="http://127.0.0.1:8700")
    parser.add_argument(
        "--rollout", default=f"run-{time.time_ns()}", help="name of the rollout; a new one each time by default"
    )
    parser.add_argument("--save", type=Path, help="write the frame to this file")
    parser.add_argument("--model-url", help="an OpenAI-compatible endpoint, as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="name of the model at that endpoint")
    options = parser.parse_args()
    model = {"base_url": options.model_url, "model": options.model} if options.model_url else None
    spec = {"driver": "video", "video": {"source": str(options.video.resolve()), "model": model}}
    with httpx.Client(base_url=options.proxy, timeout=600) as client:
        client.put("/api/v1/tasks/look", json=spec).raise_for_status()
        tools = Tools(client, f"/t/look/r/{options.rollout}/video")
        report, picture = describe(tools, options.video.name, options.description)
    print(report)
    if options.save and picture:
        options.save.write_bytes(picture)


if __name__ == "__main__":
    main()

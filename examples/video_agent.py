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

from forkpoint import Client
from forkpoint.client import Rollout
from forkpoint.results import VideoResult


class Tools:
    """The video tools of one rollout."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout

    def call(self, tool: str, **arguments: Any) -> VideoResult:
        """Call a tool, and print how long the call took and how it was answered."""
        began = time.perf_counter()
        result = self._rollout.video(tool, **arguments)
        took_ms = (time.perf_counter() - began) * 1e3
        print(f"  {tool:<27} {took_ms:8.1f} ms  {result.outcome}", file=sys.stderr)
        if result.error is not None:
            sys.exit(result.error["message"])
        return result


def describe(tools: Tools, video: str, description: str) -> tuple[str, bytes]:
    """Return the agent's report on the scene that fits a description best, and a frame of it."""
    tools.call("load_video", name=video)
    tools.call("preprocess")
    info = tools.call("video_info").payload
    segments = tools.call("segment_localization", description=description, k=1).payload["found"]
    if not segments:
        return f"Nothing in {info['duration_s']:g} s fits {description!r}.", b""
    segment = segments[0]
    middle = (segment["start_s"] + segment["end_s"]) / 2
    shots = tools.call("detect_shots").payload["shots"]
    shot = next(shot for shot in shots if shot["start_s"] <= middle < shot["end_s"])
    texts = tools.call("get_subtitles", start=shot["start_s"], end=shot["end_s"]).payload["subtitles"]
    question = {"question": f"Is this {description}?", "segment": segment["segment"]}
    answer = tools.call("visual_question_answering", **question).payload
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
    with Client(options.proxy) as client:
        task = client.task("look")
        task.put(spec)
        with task.rollout(options.rollout) as rollout:
            report, picture = describe(Tools(rollout), options.video.name, options.description)
    print(report)
    if options.save and picture:
        options.save.write_bytes(picture)


if __name__ == "__main__":
    main()

"""A small agent that runs in a sandbox: memory, a timer thread, a child, and requests to one of four APIs."""

import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from typing import Any

STYLE, URL = sys.argv[1], os.environ.get("MODEL_URL") or os.environ["ANTHROPIC_BASE_URL"]
TOOL = {"name": "bash", "type": "function"}
SECRET = f"secret {random.random()}"  # noqa: S311
ticks: list[int] = []


def count() -> None:
    while True:
        time.sleep(0.02)
        ticks.append(0)


def said(messages: list[dict[str, Any]]) -> str | None:
    """Return the command that the model wants, after a request that is streamed."""
    path, tools = {
        "anthropic": ("messages", [TOOL]),
        "chat": ("chat/completions", [{"type": "function", "function": TOOL}]),
        "responses": ("responses", [{**TOOL, "name": "shell_command"}]),
        "google": ("models/m:streamGenerateContent?alt=sse", [{"functionDeclarations": [TOOL]}]),
    }[STYLE]
    sent = {"responses": "input", "google": "contents"}.get(STYLE, "messages")
    members = {sent: messages, "tools": tools, "model": "m", "stream": True}
    request = urllib.request.Request(  # noqa: S310
        f"{URL}/v1/{path}", json.dumps(members).encode(), {"content-type": "application/json", "x-api-key": "inside"}
    )
    text = ""
    with urllib.request.urlopen(request) as response:  # noqa: S310
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            text += event.get("delta", {}).get("partial_json", "") if STYLE == "anthropic" else ""
            if STYLE == "responses" and event["type"] == "response.function_call_arguments.delta":
                text += event["delta"]
            for candidate in event.get("candidates", []):
                for part in candidate["content"]["parts"]:
                    text += json.dumps(part["functionCall"]["args"]) if "functionCall" in part else ""
            for choice in event.get("choices", []):
                for call in choice["delta"].get("tool_calls", []):
                    text += call["function"]["arguments"]
    return json.loads(text)["command"] if text else None


def main() -> None:
    threading.Thread(target=count, daemon=True).start()
    sleeper = subprocess.Popen(["sleep", "1000"])
    messages: list[dict[str, Any]] = [{"role": "user", "content": SECRET, "parts": [{"text": SECRET}]}]
    while (command := said(messages)) is not None:
        before = len(ticks)
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        time.sleep(0.1)
        moved = "moves" if len(ticks) > before and sleeper.poll() is None else "stands"
        asked = {"type": "function_call", "tool_calls": "", "parts": [{"functionCall": {}}]}
        messages.append({"role": "assistant", "content": command, **asked})
        seen = f"{done.stdout}|{moved}|{time.monotonic()}"
        messages.append({"role": "user", "content": seen, "parts": [{"text": seen}]})
    print(json.dumps([SECRET, *[message["content"] for message in messages]]))
    sys.exit(7)


main()

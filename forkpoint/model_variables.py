"""The variables by which agents find their model, in place of which an agent in a sandbox gets others. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_URL = re.compile(r"(?:[A-Z0-9]+_)*(?:BASE_URL|API_BASE)")
"""Matches variables with the URL of a model, such as ANTHROPIC_BASE_URL, OPENAI_API_BASE and LLM_BASE_URL."""
_KEY = re.compile(r"(?:[A-Z0-9]+_)*(?:API_KEY|AUTH_TOKEN)")
_VERSION = re.compile(r"/v[0-9]+[a-z0-9]*/?$")
"""Matches the version at the end of a URL, to which clients append a path."""
_KEY_HEADERS = (
    ("ANTHROPIC_API_KEY", "x-api-key"),
    ("GEMINI_API_KEY", "x-goog-api-key"),
    ("GOOGLE_API_KEY", "x-goog-api-key"),
)
_INSIDE = "forkpoint"
"""The key that the agent has in its sandbox. It is the same for all rollouts, and opens nothing."""


@dataclass(frozen=True, slots=True)
class ModelVariables:
    """Where the model of an agent is: its URL, headers with its key, and variables with `{model}` for the URL."""

    upstream: str
    headers: Mapping[str, str]
    env: Mapping[str, str]


def model_variables(env: Mapping[str, str]) -> ModelVariables | None:
    """Return what the variables of an agent say of its model; None if they name no model, or more than one."""
    urls = {
        name: value for name, value in env.items() if _URL.fullmatch(name) and value.startswith(("http://", "https://"))
    }
    upstreams = {_VERSION.sub("", url).rstrip("/") for url in urls.values()}
    if len(upstreams) != 1:
        return None
    keys = {name: value for name, value in env.items() if _KEY.fullmatch(name) and value}
    headers = {header: keys[name] for name, header in _KEY_HEADERS if name in keys}
    others = [value for name, value in keys.items() if name not in dict(_KEY_HEADERS)]
    if others:
        headers["authorization"] = f"Bearer {others[0]}"
    inside = {name: "{model}" + "".join(_VERSION.findall(url)) for name, url in urls.items()}
    return ModelVariables(upstreams.pop(), headers, {**env, **inside, **dict.fromkeys(keys, _INSIDE)})

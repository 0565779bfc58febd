"""An agent's variables name its model, and no key of a rollout gets into the sandbox."""

import pytest

from forkpoint.model_variables import model_variables


@pytest.mark.parametrize(
    ("env", "upstream", "headers", "inside"),
    [
        (
            {"ANTHROPIC_BASE_URL": "http://gw:1/s/7", "ANTHROPIC_API_KEY": "secret", "HOME": "/h"},
            "http://gw:1/s/7", {"x-api-key": "secret"}, {"ANTHROPIC_BASE_URL": "{model}", "HOME": "/h"},
        ),
        (
            {"OPENAI_BASE_URL": "https://gw/s/7/v1", "OPENAI_API_KEY": "secret"},
            "https://gw/s/7", {"authorization": "Bearer secret"}, {"OPENAI_BASE_URL": "{model}/v1"},
        ),
        (
            {"GOOGLE_GEMINI_BASE_URL": "http://gw/", "GEMINI_API_KEY": "secret"},
            "http://gw", {"x-goog-api-key": "secret"}, {"GOOGLE_GEMINI_BASE_URL": "{model}"},
        ),
        (
            {"LLM_BASE_URL": "http://gw/v1", "OPENAI_API_BASE": "http://gw/v1/", "LLM_API_KEY": ""},
            "http://gw", {}, {"LLM_BASE_URL": "{model}/v1", "OPENAI_API_BASE": "{model}/v1/", "LLM_API_KEY": ""},
        ),
    ],
)  # fmt: skip
def test_the_model_is_found_and_its_key_stays_outside(
    env: dict[str, str], upstream: str, headers: dict[str, str], inside: dict[str, str]
) -> None:
    found = model_variables(env)
    assert found is not None
    assert (found.upstream, found.headers) == (upstream, headers)
    assert {name: found.env[name] for name in inside} == inside
    assert "secret" not in str(found.env)


@pytest.mark.parametrize(
    "env", [{}, {"PATH": "/bin"}, {"OPENAI_BASE_URL": "unix:/x"}, {"A_BASE_URL": "http://a", "B_BASE_URL": "http://b"}]
)
def test_commands_without_one_model_are_ordinary_commands(env: dict[str, str]) -> None:
    assert model_variables(env) is None

"""Tests of agents inside their sandboxes."""

from pathlib import Path


def scripted_agent_text() -> str:
    return (Path(__file__).parent / "scripted_agent.py").read_text()

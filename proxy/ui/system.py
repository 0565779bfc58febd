"""Routes that show the proxy itself: its last day, settings, latest warnings, wrong answers, and `doctor`."""

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import orjson
from fastapi import Query
from pydantic import BaseModel, SecretStr

from proxy.control.activity import HOUR, Second, timeline
from proxy.control.metrics import WrongAnswers, wrong_answers
from proxy.control.paging import Page
from proxy.control.routes.params import WHOLE, ControlDep, api_router
from proxy.logs import recent
from proxy.refusals import RefusalError
from proxy.times import utc_text
from sandboxes.spec import EnvironmentSpec

_DOCTOR_S = 60.0
"""Longest run of `doctor`. Its trials take a second; a loaded machine takes ten."""
_MINUTE = 60

system = api_router("page", "/system", WHOLE)
_examining = asyncio.Lock()


class SettingView(BaseModel):
    """A setting: `FORKPOINT_` and its name in capitals is its variable. Values of secrets are never shown."""

    name: str
    value: Any
    usual: bool
    about: str


class HistoryView(BaseModel):
    """The activity of a span of time, oldest first. Steps in which the proxy did not run are missing."""

    step_s: int
    steps: list[Second]


@system.get("/history")
async def get_history(control: ControlDep, span_s: Annotated[int, Query(ge=60, le=24 * HOUR)] = HOUR) -> HistoryView:
    """Show calls and tool seconds of up to a day, in at most 144 steps."""
    if span_s <= 10 * _MINUTE:
        step_s = max(1, span_s // 120)
        return HistoryView(step_s=step_s, steps=timeline(list(control.activity.seconds), span_s=span_s, step_s=step_s))
    step = max(1, span_s // 144 // _MINUTE)
    minutes = list(control.history.minutes)
    return HistoryView(step_s=step * _MINUTE, steps=timeline(minutes, span_s=span_s // _MINUTE, step_s=step))


@system.get("/wrong-answers")
async def get_wrong_answers(control: ControlDep) -> Page[WrongAnswers]:
    """Show the rate of wrong answers over all audits of all tasks, with its confidence bounds."""
    return Page.whole(list(wrong_answers(control)))


@system.get("/warnings")
async def get_warnings(control: ControlDep) -> Page[dict[str, str]]:
    """List the latest warnings and errors of this proxy, the newest first, each with its task if it names a node."""
    return Page.whole([_placed(event, control.store.trees.task_with_node) for event in recent()])


@system.get("/changes")
async def get_changes(control: ControlDep) -> Page[dict[str, Any]]:
    """List what people have changed by REST, the newest first: with which token, from which address."""
    return Page.whole(await asyncio.to_thread(control.changes.latest))


@system.get("/alerts")
async def get_alerts(control: ControlDep) -> Page[dict[str, str]]:
    """List the alerts that are raised now, the newest first: those of `docs/monitoring/alerts.yml`."""
    raised = sorted(control.alerts.raised(), key=lambda alert: alert.since, reverse=True)
    return Page.whole([
        {"timestamp": utc_text(alert.since), "alert": alert.rule.name, "severity": alert.rule.severity,
         "summary": alert.summary, "what_to_do": alert.rule.what_to_do}
        for alert in raised
    ])  # fmt: skip


def _placed(event: Mapping[str, str], task_with_node: Callable[[int], str]) -> dict[str, str]:
    """Return an event whose node is named as in addresses; what no request caused gets the task of its node."""
    node = event.get("node", "").removeprefix("n")
    if not node.isdecimal():
        return dict(event)
    task = event.get("task") or task_with_node(int(node))
    return {**event, "node": f"n{node}"} | ({"task": task} if task else {})


@system.get("/settings")
async def get_settings(control: ControlDep) -> Page[SettingView]:
    """List the settings that this proxy runs with. Secrets are never shown."""
    fields = type(control.settings).model_fields
    settings = [
        SettingView(
            name=name,
            value=_shown(getattr(control.settings, name)),
            usual=getattr(control.settings, name) == field.get_default(call_default_factory=True),
            about=field.description or "",
        )
        for name, field in sorted(fields.items())
    ]
    return Page.whole(settings)


@system.post("/doctor")
async def examine() -> Page[dict[str, Any]]:
    """Check the machine, as `forkpoint doctor` does, in a process of its own."""
    if _examining.locked():
        raise RefusalError(409, "busy", "doctor is running already. Try again when it has ended.")
    async with _examining:
        return Page.whole(await _doctor())


async def _doctor() -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "forkpoint", "doctor", "--json"]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(_DOCTOR_S):
            output, _ = await process.communicate()
        checks: list[dict[str, Any]] = orjson.loads(output)
    except TimeoutError as error:
        raise RefusalError(503, "busy", f"doctor took more than {_DOCTOR_S:.0f} s. Run `forkpoint doctor`.") from error
    except orjson.JSONDecodeError as error:
        raise RefusalError(503, "doctor", "doctor could not run. Run `forkpoint doctor` to see why.") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return checks


def _shown(value: Any) -> Any:
    """Return a setting's value as JSON, without secrets."""
    if isinstance(value, SecretStr):
        return "set, not shown"
    if isinstance(value, EnvironmentSpec):
        return value.redacted().model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, dict):
        return {str(key): _shown(member) for key, member in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_shown(member) for member in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)

"""The client's results have the members that the proxy sends: a renamed or a new one is noticed here."""

from dataclasses import fields

import pytest
from pydantic import BaseModel

from forkpoint import results
from proxy.control.views.nodes import NodeDetail, NodeView
from proxy.control.views.resources import StatsView
from proxy.control.views.rollouts import RolloutDetail, RolloutView, StepView, TaskSummary, TaskView

KNOWN = [
    (results.TaskInfo, TaskView, {"default"}),
    (results.RolloutInfo, RolloutView, set()),
    (results.Step, StepView, {"record"}),
    (results.Node, NodeView, set()),
]
"""A result, the view whose members it has, and those that it leaves out."""
SENT = [
    (results.TaskInfo, {TaskView, TaskSummary}, set()),
    (results.RolloutInfo, {RolloutDetail}, {"next_steps"}),
    (results.Step, {StepView}, {"title"}),
    (results.Node, {NodeView, NodeDetail}, set()),
    (results.Stats, {StatsView}, {"raw"}),
]
"""A result, the views that it is made of, and members that the client makes itself."""


def members(result: type) -> set[str]:
    return {each.name for each in fields(result)}


@pytest.mark.parametrize(("result", "view", "left_out"), KNOWN)
def test_a_result_has_what_its_view_has(result: type, view: type[BaseModel], left_out: set[str]) -> None:
    assert view.model_fields.keys() - members(result) == left_out


@pytest.mark.parametrize(("result", "views", "own"), SENT)
def test_a_result_has_nothing_that_no_view_has(result: type, views: set[type[BaseModel]], own: set[str]) -> None:
    sent = {name for view in views for name in view.model_fields}
    assert members(result) - sent == own

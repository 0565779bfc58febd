"""What the cache did in each training step, for W&B, MLflow, TensorBoard, and the trainers of TRL and Transformers.

A `StepTracker` reads the report of one step's rollouts, which carry the label `step`, and passes its figures to sinks:

    tracker = StepTracker(Client(), to_wandb(wandb.init(project="agents")), labels={"run": "r7"})
    for step in range(steps):
        ...  # rollouts with labels={"run": "r7", "step": step}
        tracker.log(step)

The packages of the trackers are not needed by this module: it loads the one whose sink is used.
"""
# ruff: noqa: PLC0415 - see above

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from forkpoint.errors import ForkpointError, UnreachableError

if TYPE_CHECKING:
    from forkpoint.client import Client
    from forkpoint.operations import Labels
    from forkpoint.results import ReportRow

Sink = Callable[[Mapping[str, float], int], object]
"""Takes figures by their names, and the number of the step."""
PREFIX = "forkpoint/"
"""Precedes the name of each figure; trackers make it a group of charts."""
log = logging.getLogger(__name__)


def to_wandb(run: Any) -> Sink:
    """Return a sink that logs to Weights & Biases.

    Args:
        run: What `wandb.init` returned. Its own step is left alone, because trainers count it in their way: charts
            of the figures have `forkpoint/step` as their axis.
    """
    axis = f"{PREFIX}step"
    run.define_metric(axis)
    run.define_metric(f"{PREFIX}*", step_metric=axis)
    return lambda figures, step: run.log({**figures, axis: step})


def to_mlflow(run_id: str | None = None) -> Sink:
    """Return a sink that logs to a run of MLflow; None for the active one."""
    import mlflow

    return lambda figures, step: mlflow.log_metrics(dict(figures), step=step, run_id=run_id)


def to_tensorboard(writer: Any) -> Sink:
    """Return a sink that logs to TensorBoard, by a writer of PyTorch, tensorboardX or `tensorboard.summary`."""

    def add(figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)

    return add


class StepTracker:
    """Logs what the cache did in each step."""

    def __init__(self, client: "Client", *sinks: Sink, labels: "Labels | None" = None, by: str = "step") -> None:
        """Create a tracker.

        Args:
            client: A client of the proxy.
            sinks: Where the figures go; none to only return them.
            labels: Labels of the rollouts to count, such as `run`; None for those of the client.
            by: The label that has the number of the step.
        """
        self._client, self._sinks, self._by = client, sinks, by
        self._labels = dict(client.labels if labels is None else labels)

    def log(self, step: int) -> dict[str, float]:
        """Log the figures of a step, and return them, if there are any. A proxy that does not answer is a warning."""
        try:
            total = self._client.report(by=self._by, labels={**self._labels, self._by: step}).total
        except (ForkpointError, UnreachableError) as error:
            log.warning("The figures of step %s are missing: %s", step, error)
            return {}
        figures = _figures(total)
        if figures:
            for sink in self._sinks:
                sink(figures, step)
        return figures


def _figures(total: "ReportRow") -> dict[str, float]:
    if not total.calls:
        return {}
    whole_s = total.saved_s + total.executed_s
    figures = {
        "hit_rate": total.hit_rate, "calls": total.calls, "saved_s": total.saved_s, "executed_s": total.executed_s,
        "saved_share": total.saved_s / whole_s if whole_s else 0.0, "replayed_s": total.replayed_s or 0.0,
        "tool_p50_s": total.paid_p50_s, "tool_p95_s": total.paid_p95_s,
    }  # fmt: skip
    if total.reward is not None:
        figures["reward"] = total.reward
    return {f"{PREFIX}{name}": float(value) for name, value in figures.items()}


def trainer_callback(tracker: StepTracker) -> Any:
    """Return a callback for the trainers of TRL and Transformers that logs after each optimizer step.

    Rollouts have the trainer's `state.global_step` as their label: it is 0 while the first batch is generated.

    Args:
        tracker: Its sinks take the figures. The trainer's own log has them too.
    """
    from transformers import TrainerCallback

    class Callback(TrainerCallback):  # type: ignore[misc,unused-ignore]
        """Logs the rollouts whose step has just ended."""

        def __init__(self) -> None:
            self._figures: dict[str, float] = {}

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del args, control
            self._figures = tracker.log(state.global_step - 1) or self._figures

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            del args, state, control
            if logs is not None:
                logs.update(self._figures)

    return Callback()

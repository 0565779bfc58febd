"""Traces: a span for each call, and below it a span for each part. Needs OpenTelemetry, the extra `[otel]`."""

import time
from typing import TYPE_CHECKING, Any

from proxy.storage.records import RecordStore
from proxy.telemetry.timing import Timing
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_PARTS = ("wait_s", "restore_s", "replay_s", "tool_s")
"""Parts of a call in the order in which they happen; fields of `Timing`."""


class Traces:
    """Makes spans of answered calls and hands them to an exporter, which sends them from a thread."""

    def __init__(self, records: RecordStore, endpoint: str, exporter: "SpanExporter | None" = None) -> None:
        """Set up the export of spans to an OTLP collector (HTTP). Raises SystemExit without the extra."""
        # Imported here, because most installations do not have the extra.
        try:
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - an extra
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

                exporter = OTLPSpanExporter(endpoint=endpoint)
        except ImportError as error:
            raise SystemExit(f"traces need OpenTelemetry ({error}): pip install 'forkpoint[otel]'") from error
        self._records = records
        self._provider = TracerProvider(resource=Resource.create({"service.name": "forkpoint"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("forkpoint")

    def answered(self, rollout: Rollout, record: Record, outcome: Outcome, timing: Timing | None) -> None:
        """Make the spans of a call that was just answered."""
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415 - loaded by now

        ended = time.time_ns()
        parts = [(name, int(1e9 * getattr(timing, name))) for name in _PARTS] if timing is not None else []
        began = ended - sum(length for _, length in parts)
        call = self._records.call(record)
        attributes: dict[str, Any] = {
            "forkpoint.task": rollout.task, "forkpoint.rollout": rollout.name, "forkpoint.node": f"n{record.target.id}",
            "forkpoint.from": f"n{record.source.id}", "forkpoint.outcome": outcome.name.lower(),
            "forkpoint.endpoint": call.endpoint, "forkpoint.tool": call.tool, "forkpoint.record": record.id,
            "forkpoint.tool_seconds": record.seconds, "forkpoint.effect": record.effect.names,
            "forkpoint.replayed_calls": 0 if timing is None else timing.replayed_calls,
        }  # fmt: skip
        span = self._tracer.start_span(f"{call.endpoint} {call.tool}", start_time=began, attributes=attributes)
        at, context = began, set_span_in_context(span)
        for name, length in parts:
            if length:
                part = self._tracer.start_span(name.removesuffix("_s"), context=context, start_time=at)
                part.end(at + length)
                at += length
        span.end(ended)

    def close(self) -> None:
        """Send the remaining spans. Blocking, so call it in a thread."""
        self._provider.shutdown()

"""The log of egress."""

from proxy.telemetry.egress_log import MAX_EVENTS, EgressLog
from sandboxes.calls import EgressExchange


def test_totals_count_what_the_list_has_forgotten() -> None:
    log = EgressLog()
    for _ in range(MAX_EVENTS + 1):
        log.note([EgressExchange("GET", "http://example.org/", "live", 200, 3)], 1, 2, "r", 0.0)
    assert len(log.events) == MAX_EVENTS
    assert (log.requests["live"], log.size_bytes["live"]) == (MAX_EVENTS + 1, 3 * (MAX_EVENTS + 1))

"""The hit path: a whole request becomes a whole response, without an await.

A hit does four look-ups (numbered below), each in a memory that earlier requests filled. If any of them fails, the
request takes the regular path (`dispatch`), which parses, checks, opens and reports errors. The hit path reports none,
and changes nothing except the step that it takes. Nothing can run between the look-up and the step.
"""

from collections.abc import Hashable, Mapping
from typing import Any, Protocol

import structlog

from proxy.compat.endpoints import Endpoint, EndpointContext, KnowingEndpoint
from proxy.dataplane.addressing import Addressing, request_of, session_of
from proxy.dialects.base import AT_ONCE_BYTES, Call, Request
from proxy.http.access import ALL, GRANT
from proxy.http.address import Address
from proxy.http.answer_cache import PreparedAnswer, raw, response
from proxy.http.exchange import client_form
from proxy.http.lru_cache import LruCache
from proxy.telemetry.counters import Counters
from proxy.tree.keys import CallKey
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Record

log = structlog.get_logger()


_FORMS_BYTES = 32 << 20
"""Memory of responses in the forms of clients, such as MCP's under the ID of a request."""
_MAX_FORM_BYTES = 64 << 10
"""The largest of them: a larger one costs more to send than to make."""


class HitSteps(Protocol):
    """Finds and takes the steps of hits. `proxy.step.Stepper` is one."""

    def find(self, rollout: Rollout, key: CallKey) -> Record | None:
        """Return the record that answers a call, or None."""
        ...

    def take(self, rollout: Rollout, record: Record) -> None:
        """Take the step of a record that `find` returned."""
        ...


class HitPath:
    """Answers calls that the tree knows; an API in `apis` answers its own, or they take the regular path."""

    def __init__(
        self,
        context: EndpointContext,
        addressing: Addressing,
        counts: Counters,
        apis: Mapping[str, Endpoint],
        steps: HitSteps | None = None,
    ) -> None:
        """Create a hit path; with other `steps` than the context's, calls of APIs take the regular path."""
        self._step: HitSteps = steps or context.step
        self._order, self._addressing = context.step.order, addressing
        # The same dictionary that `Tasks` changes: a rollout that ends is gone here at once.
        self._answers, self._rollouts = context.answers, context.tasks.rollouts.running
        self._largest_bytes = min(context.settings.max_body_bytes, AT_ONCE_BYTES)
        self._endpoints = counts.endpoints
        self._apis = apis
        # They take their steps themselves.
        self._knowing = {name: api for name, api in apis.items() if isinstance(api, KnowingEndpoint) and steps is None}
        # Responses to requests that mean the same, and get the same form of the same answer.
        self._forms: LruCache[Hashable, bytes] = LruCache(_FORMS_BYTES, len)

    def known(self, scope: Mapping[str, Any], body: bytes | bytearray) -> bytes | None:
        """Return the HTTP response to a call that the tree knows and take its step, or None, as for errors."""
        # 1. URL -> `Address`: the rollout and the endpoint. An unfamiliar host name or a browser's header also ends
        # here, so foreign pages never get a hit.
        address = self._addressing.remembered(scope)
        if address is None or len(body) > self._largest_bytes:
            return None
        api = self._knowing.get(address.endpoint)
        if api is None and address.endpoint in self._apis:
            return None
        # An ended or unknown rollout is the regular path's business: it may have to be read back from the store.
        rollout = self._rollout(scope, address)
        if rollout is None:
            return None
        try:
            # A bytearray cannot be part of a key below; `bytes` of bytes makes no copy.
            body = bytes(body)
            if api is not None:
                return api.known_call(scope, address, body, rollout)
            return self._response(scope, address, body, rollout)
        except Exception as error:  # noqa: BLE001 - the regular path meets the same error and reports it
            log.debug("hit path failed", error=repr(error))
            return None

    def expect(self, scope: Mapping[str, Any]) -> Rollout | None:
        """Note that a request goes the regular way, so that no later one overtakes it; return its rollout, if known."""
        address = self._addressing.remembered(scope)
        if address is None or address.endpoint in self._apis:
            return None
        rollout = self._rollout(scope, address)
        if rollout is not None:
            self._order.expect(rollout)
        return rollout

    def _rollout(self, scope: Mapping[str, Any], address: Address) -> Rollout | None:
        """Return the running rollout that the URL names, or else the session that the client got from the proxy."""
        if address.rollout:
            return self._rollouts.get((address.task, address.rollout))
        session = session_of(address, scope["headers"])
        # The grant was checked for the URL, which says nothing of the session.
        own = scope.get(GRANT, ALL).rollout
        return self._rollouts.get((address.task, session)) if session and own in ("", session) else None

    def _response(self, scope: Mapping[str, Any], address: Address, body: bytes, rollout: Rollout) -> bytes | None:
        # 2., 3. Endpoint -> `Dialect` of the rollout's tree, and bytes -> `Call`.
        asked = self._addressing.asked(scope, address, body, rollout)
        call = asked.meaning
        # A request with an ID may be a retry, a constant call belongs to no rollout, and a routed one to another task.
        if not isinstance(call, Call) or call.request_id or call.constant or call.shared_at_root or call.routed:
            return None
        # 4. The record at the rollout's node.
        record = self._step.find(rollout, call.key)
        if record is None:
            return None
        ready = self._answers.of(record)
        # Most answers are the same bytes for every client, whole response included.
        whole = ready.hit
        if ready.has_location or call.bound:
            # The recorded answer names a URL or a rollout, so this client gets its own form of it.
            same = None if ready.has_location or asked.same is None else (record.id, asked.same)
            known = self._forms.get(same)
            whole = known or self._form(asked.request or request_of(scope, address, body), address, rollout, ready)
            if known is None and same is not None and len(whole) <= _MAX_FORM_BYTES:
                self._forms[same] = whole
        # The step comes last: whatever fails above leaves the rollout where its agent saw it. It is in the journal
        # before the response is sent.
        self._step.take(rollout, record)
        self._endpoints[call.call.endpoint][Outcome.HIT] += 1
        return whole

    def _form(self, request: Request, address: Address, rollout: Rollout, ready: PreparedAnswer) -> bytes:
        """Return the whole response in the form of the client that sent a request."""
        own = client_form(ready, self._addressing.dialect(rollout, address.endpoint), request)
        return response(own.status, raw(own.headers) + ready.headers[ready.own :] + ready.hit_headers, own.body)

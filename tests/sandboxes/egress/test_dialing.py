"""Connections to hosts outside."""

import asyncio
import socket

import pytest

from sandboxes.egress import dialing
from sandboxes.egress.dialing import Dialer, FailedError
from sandboxes.egress.fair_slots import Requester
from tests.sandboxes.egress.origin import ADDRESS

REQUESTER = Requester("sandbox", "scope")


def test_an_address_of_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of this machine may listen at its public address too, the proxy among them."""
    monkeypatch.setattr(dialing, "is_public", lambda _: True)

    async def resolve(_name: str) -> list[str]:
        return ["127.0.0.1"]

    with pytest.raises(FailedError, match="not public"):
        asyncio.run(Dialer(resolve).dial(REQUESTER, "example.org", 80))


def test_further_addresses_are_tried() -> None:
    tried = []

    async def resolve(_name: str) -> list[str]:
        return [ADDRESS, "93.184.215.15", "93.184.215.16", "93.184.215.17"]

    async def connect(address: str, _port: int) -> socket.socket:
        tried.append(address)
        raise ConnectionRefusedError("refused")

    with pytest.raises(FailedError, match="cannot be reached: refused"):
        asyncio.run(Dialer(resolve, connect).dial(REQUESTER, "example.org", 80))
    assert tried == [ADDRESS, "93.184.215.15", "93.184.215.16"]

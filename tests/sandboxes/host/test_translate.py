"""From calls to requests for a supervisor."""

import pytest

from sandboxes.calls import ToolCall
from sandboxes.host import translate
from sandboxes.ipc.messages import RunFileOperation
from sandboxes.spec import EnvironmentSpec, Limits


@pytest.mark.parametrize(("disk_mb", "limit_mb"), [(4096, 512), (64, 64)])
def test_file_that_is_read_fits_into_memory(disk_mb: int, limit_mb: int) -> None:
    """An agent's sparse file of 4 GB takes no room, and its content would take 12 GB of the proxy's memory."""
    spec = EnvironmentSpec(limits=Limits(disk_mb=disk_mb))
    request, _ = translate.request(ToolCall("shell", "get", {"path": "/f"}), spec, 1.0)
    assert isinstance(request, RunFileOperation)
    assert request.arguments["limit_bytes"] == limit_mb << 20

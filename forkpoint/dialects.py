"""The contract of dialects: how the requests to one endpoint become calls, and results become responses.

`docs/extending.md` builds one.
"""

from proxy.dialects.base import Call, Dialect, Local, Request, Response
from proxy.refusals import Problem, RefusalError
from proxy.tree.keys import call_key
from sandboxes.calls import ToolCall
from sandboxes.spec import EnvironmentSpec

__all__ = [
    "Call", "Dialect", "EnvironmentSpec", "Local", "Problem", "RefusalError", "Request", "Response", "ToolCall",
    "call_key",
]  # fmt: skip

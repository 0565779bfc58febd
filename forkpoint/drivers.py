"""The contract of sandbox drivers: what a driver of your own implements, and what it is given.

`docs/extending.md` builds one. `forkpoint.testing.DriverContract` tests one.
"""

from sandboxes.calls import Execution, ResourceUse, ToolCall, ToolResult
from sandboxes.driver import Driver, FrozenState, Sandbox
from sandboxes.effects import Effect, StateDigest
from sandboxes.errors import NotFreezableError, SandboxError, SpecError, StateGoneError
from sandboxes.plugins import DriverContext
from sandboxes.spec import EnvironmentSpec

__all__ = [
    "Driver", "DriverContext", "Effect", "EnvironmentSpec", "Execution", "FrozenState", "NotFreezableError",
    "ResourceUse", "Sandbox", "SandboxError", "SpecError", "StateDigest", "StateGoneError", "ToolCall", "ToolResult",
]  # fmt: skip

"""The environment that a task runs in, as its user writes it (pure)."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

AbsolutePath = Annotated[str, Field(pattern=r"^/[^\x00]*$", max_length=4096)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]


class Limits(BaseModel):
    """What one sandbox may use. Memory, pids and disk are for all its processes together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_mb: int = Field(default=2048, ge=16, le=1 << 20)
    pids: int = Field(default=512, ge=8, le=1 << 16)
    disk_mb: int = Field(default=4096, ge=1, le=1 << 24, description="new bytes over the base, and the largest file")
    timeout_s: float = Field(default=120.0, gt=0, le=86_400, description="of a call that names none")
    output_bytes: int = Field(default=1 << 20, ge=0, le=1 << 28, description="kept of stdout and of stderr, each")


class Archive(BaseModel):
    """A tarball or directory on the proxy's machine, unpacked into the sandbox before set-up."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: AbsolutePath
    target: AbsolutePath = "/"


class EnvironmentSpec(BaseModel):
    """What a task's sandboxes hold before the first call. Two equal specs over equal bases have one root state."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    driver: str = "local"
    base: Literal["host"] | AbsolutePath = Field(
        default="host",
        description="'host': this machine's own system, without homes and secrets; or a directory or tarball",
    )
    image: str | None = Field(
        default=None, min_length=1, max_length=512, description="of driver container, which needs one: name or id"
    )
    archives: tuple[Archive, ...] = ()
    files: dict[AbsolutePath, Text] = Field(default_factory=dict, description="path in the sandbox -> text")
    setup: tuple[Text, ...] = Field(default=(), description="shell commands, run in order; each must exit 0")
    env: dict[VariableName, Text] = Field(default_factory=dict)
    workdir: AbsolutePath = "/root"
    limits: Limits = Limits()
    merge: Literal["on", "off"] = Field(default="on", description="one node for one state")
    cache: Literal["always", "never"] = Field(default="always", description="'never' runs each call: for baselines")

    @model_validator(mode="after")
    def _image_or_base(self) -> "EnvironmentSpec":
        if self.image is not None and self.driver != "container":
            raise ValueError(f"driver {self.driver!r} has no images: leave `image` out, or use driver 'container'")
        return self

"""Every setting, in one place: by option, environment (`FORKPOINT_…`) or TOML file, in this order."""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from proxy.names import is_loopback
from sandboxes.spec import EnvironmentSpec


class Settings(BaseSettings):
    """What the proxy is told when it starts. Nothing else is read behind anyone's back."""

    model_config = SettingsConfigDict(env_prefix="FORKPOINT_", env_nested_delimiter="__", extra="forbid", frozen=True)

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8700, ge=0, le=65535)
    names: tuple[str, ...] = Field(
        default=(),
        description="public DNS names under which this proxy may be asked; without any: addresses, localhost",
    )
    token: SecretStr | None = Field(default=None, description="needed for everything; required beyond loopback")
    token_file: Path | None = Field(
        default=None, description="more tokens, one a line, each with the names of the tasks that it sees, if not all"
    )
    data: Path = Field(default=Path("forkpoint-data"), description="directory of the store, layers and snapshots")
    log: Literal["pretty", "json"] = "pretty"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    drivers: tuple[str, ...] = Field(
        default=("local", "sqlite", "http"),
        description="the drivers to start, by the names of their entry points in the group forkpoint.drivers",
    )
    otel_endpoint: str | None = Field(
        default=None, description="where traces go, by OTLP over HTTP: http://host:4318/v1/traces; needs the extra otel"
    )
    default_spec: EnvironmentSpec = Field(default=EnvironmentSpec(), description="for tasks that were never PUT")
    e2b_templates: dict[str, EnvironmentSpec] = Field(
        default_factory=dict, description="environments by templateID, for sandboxes of tasks that were never PUT"
    )
    any_image: bool = Field(
        default=False, description="a create request's image that no driver here has means default_spec, not 404"
    )
    max_sandboxes: int = Field(default=64, ge=1, description="live at once")
    sandbox_patience_s: float = Field(default=60.0, gt=0, description="wait for a free sandbox, then 503")
    sandbox_idle_s: float = Field(default=120.0, gt=0, description="an idle sandbox is closed after this")
    container_spares: int = Field(default=2, ge=0, description="started containers that wait, for each image in use")
    postgres_spares: int = Field(
        default=2,
        ge=0,
        description="clones that wait for a first write, for each PostgreSQL database in use, to 512 MB",
    )
    snapshot_bytes: int = Field(default=20 << 30, ge=0, description="kept layers; the least valuable go first")
    checkpoint_dir: Path | None = Field(
        default=None, description="where images of live processes go, if not below data: a tmpfs is faster"
    )
    checkpoint_bytes: int = Field(default=4 << 30, ge=0, description="of them, those with images of live processes")
    warm_sandboxes: int = Field(
        default=8, ge=0, description="made ahead where they will be wanted; at most half of max_sandboxes; 0: none"
    )
    memory_reserve_bytes: int = Field(
        default=512 << 20, ge=0, description="below this much free memory of the machine idle sandboxes are closed"
    )
    answer_memory_bytes: int = Field(default=256 << 20, ge=0, description="answers held ready in memory")
    tree_memory_records: int = Field(default=2_000_000, ge=0, description="nodes and records in memory, 1 kB each")
    audit_share: float = Field(
        default=0.0, ge=0, le=1, description="of the hits, checked by running them again while nobody waits; 0: none"
    )
    audit_quarantine: bool = Field(
        default=True, description="calls that an audit found to differ are run again for everybody from then on"
    )
    max_body_bytes: int = Field(default=64 << 20, ge=1024, description="of one request")
    import_bytes: int = Field(default=16 << 30, ge=1024, description="of a file that a tree is imported from")
    max_requests: int = Field(default=4096, ge=1, description="calls being answered at once, then 429")
    durability: Literal["process", "power"] = Field(
        default="process", description="what an answered call survives: a kill of the proxy, or loss of power too"
    )

    @model_validator(mode="after")
    def _guarded(self) -> "Settings":
        if not (is_loopback(self.host) or self.token or self.token_file):
            raise ValueError(
                f"host {self.host} is reached from other machines, and whoever reaches the proxy can run commands: set "
                "token or token_file (docs/security.md), or listen on 127.0.0.1"
            )
        return self

    @classmethod
    def load(cls, config: Path | None = None, **options: object) -> "Settings":
        """Return the settings; options that are None were not given.

        Raises:
            ValueError: a value is not allowed, a name is unknown, or config is not TOML.
            OSError: config cannot be read.
        """
        source = None if config is None else config.resolve(strict=True)
        given = {name: value for name, value in options.items() if value is not None}
        return _with_file(source)(**given)  # type: ignore[arg-type]


def _with_file(config: Path | None) -> type[Settings]:
    class FromFile(Settings):
        model_config = SettingsConfigDict(toml_file=config)

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the library's signature
            file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            """Read options first, then the environment, then the file."""
            return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    return FromFile

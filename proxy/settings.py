"""Every setting of the proxy. Options come first, then the environment (`FORKPOINT_…`), then a TOML file."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from proxy.names import is_loopback
from sandboxes.server_spec import Host
from sandboxes.sources import SourceRules, malformed_source
from sandboxes.spec import EnvironmentSpec


class Settings(BaseSettings):
    """The settings that the proxy starts with. Nothing else configures it."""

    model_config = SettingsConfigDict(env_prefix="FORKPOINT_", env_nested_delimiter="__", extra="forbid", frozen=True)

    host: str = Field(default="127.0.0.1", description="The address that the proxy listens on.")
    port: int = Field(default=8700, ge=0, le=65535, description="The port that the proxy listens on. 0 picks one.")
    workers: int = Field(
        default=1,
        ge=1,
        le=256,
        description="The processes that share the port and the tasks, for machines with many cores (docs/workers.md). "
        "A data directory keeps its number.",
    )
    names: tuple[str, ...] = Field(
        default=(),
        description="Public DNS names that requests may use. Addresses and localhost are always allowed.",
    )
    token: SecretStr | None = Field(
        default=None, description="The token that every request needs. Required if host is not a loopback address."
    )
    token_file: Path | None = Field(
        default=None,
        description="A file with more tokens, one per line, each with the names of tasks that it may see, if not all.",
    )
    data: Path = Field(
        default=Path("forkpoint-data"), description="The directory of the store, the layers and the snapshots."
    )
    log: Literal["pretty", "json"] = Field(default="pretty", description="The format of log lines on stderr.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least severe level that is logged."
    )
    sources: tuple[str, ...] = Field(
        default=(),
        description="What specs of tokens for some tasks may name: directories, prefixes of URLs, env:NAME.",
    )
    egress: tuple[Host, ...] = Field(
        default=(),
        description="Hosts that specs may name in `egress`: HOST, HOST:PORT or *.DOMAIN. None by default: no sandbox "
        "has a way out.",
    )
    drivers: tuple[str, ...] = Field(
        default=("local", "sqlite", "http"),
        description="The drivers to start, by the names of their entry points in the group forkpoint.drivers. "
        "container: local, also where `any_image` is set.",
    )
    otel_endpoint: str | None = Field(
        default=None,
        description="The URL that traces are sent to by OTLP over HTTP, such as http://host:4318/v1/traces. "
        "Needs the extra otel.",
    )
    default_spec: EnvironmentSpec = Field(
        default=EnvironmentSpec(), description="The environment of tasks that were never PUT."
    )
    e2b_templates: dict[str, EnvironmentSpec] = Field(
        default_factory=dict, description="The environments of E2B templates, by templateID, for tasks never PUT."
    )
    any_image: bool = Field(
        default=False,
        description="Whether every image that a client names means default_spec, unless `drivers` names container.",
    )
    max_sandboxes: int | None = Field(
        default=None,
        ge=1,
        description="Most sandboxes that are live at once; none for as many as the machine has room for, by memory, "
        "open files and processes.",
    )
    sandbox_patience_s: float = Field(
        default=60.0, gt=0, description="Seconds that a call waits for a free sandbox before it gets 503."
    )
    sandbox_idle_s: float = Field(default=120.0, gt=0, description="Seconds after which an idle sandbox is closed.")
    idle_finish_s: float | None = Field(
        default=None, gt=0, description="Seconds without a call after which a rollout is finished; none for never."
    )
    postgres_spares: int = Field(
        default=2,
        ge=0,
        description="Clones kept ready for first writes, for each PostgreSQL database in use of up to 512 MB.",
    )
    snapshot_bytes: int = Field(
        default=20 << 30, ge=0, description="Most bytes of snapshots on disk. The least valuable are evicted first."
    )
    checkpoints: bool = Field(
        default=True,
        description="Whether CRIU saves live processes. If not, states with live processes are reached by replay.",
    )
    checkpoint_dir: Path | None = Field(
        default=None, description="The directory of images of live processes, if not below data. A tmpfs is faster."
    )
    checkpoint_bytes: int = Field(
        default=4 << 30,
        ge=0,
        description="Most bytes of snapshots that hold live processes (CRIU images); part of snapshot_bytes.",
    )
    warm_sandboxes: int = Field(
        default=8,
        ge=0,
        description="Most sandboxes that are prepared ahead of need, up to half of all. 0 prepares none.",
    )
    memory_reserve_bytes: int = Field(
        default=512 << 20,
        ge=0,
        description="Bytes of this machine's memory that stay available: below it, idle sandboxes are closed.",
    )
    answer_memory_bytes: int = Field(
        default=256 << 20, ge=0, description="Most bytes of recorded responses that are kept ready in memory."
    )
    tree_memory_records: int = Field(
        default=2_000_000, ge=0, description="Most nodes and records in memory, about 1 kB each."
    )
    audit_share: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="The share of hits that audits check in the background by running their calls again; 0 for none.",
    )
    audit_quarantine: bool = Field(
        default=True, description="Whether a call that an audit observed to differ runs again for every rollout."
    )
    max_body_bytes: int = Field(default=64 << 20, ge=1024, description="Most bytes of one request's body.")
    import_bytes: int = Field(
        default=16 << 30, ge=1024, description="Most bytes of a file that a tree is imported from."
    )
    max_requests: int = Field(
        default=4096, ge=1, description="Most calls that are answered at once. Further ones get 429."
    )
    quotas: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict,
        description="Most calls that run in sandboxes at once, by pattern of the tasks' names: the first one that fits "
        "counts. In a cluster, of all members together. Hits do not count.",
    )
    max_connections: int = Field(
        default=8192,
        ge=16,
        description="Most connections at once, below the limit of open files. Further ones close idle ones.",
    )
    durability: Literal["process", "power"] = Field(
        default="process",
        description="What an answered call survives: process, a kill of the proxy; power, a loss of power too.",
    )

    cluster: SecretStr | None = Field(
        default=None,
        description="The PostgreSQL database of the cluster that this proxy is a member of, as a URL; none for a proxy "
        "of its own.",
    )
    cluster_secret: SecretStr | None = Field(
        default=None,
        min_length=16,
        description="The secret that all members of the cluster share: 16 characters or more.",
    )
    store: str | None = Field(
        default=None,
        description="What all members of the cluster share: a directory, or the URL of a bucket, such as "
        "s3://bucket/folder. Required with cluster.",
    )
    store_bytes_per_s: int = Field(
        default=100 << 20, ge=1 << 20, description="Most bytes of kept states that are sent to store in a second."
    )
    node: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9._-]{1,63}$",
        description="The name of this member of the cluster; none for the host's name.",
    )
    link: str = Field(
        default="",
        pattern=r"^(?:[^:/ ]+|\[[0-9A-Fa-f:]+\])?(?::[0-9]{1,5})?$",
        description="The HOST:PORT at which other members reach this one. Empty for the address from which this "
        "machine reaches the database, and a free port.",
    )

    @model_validator(mode="after")
    def _clustered(self) -> "Settings":
        if self.cluster is None:
            if self.store is not None or self.node is not None or self.link:
                raise ValueError("store, node and link need a cluster. Set cluster too, or leave them out")
            return self
        if self.cluster_secret is None:
            raise ValueError("cluster needs the secret that its members share. Set FORKPOINT_CLUSTER_SECRET")
        if self.store is None:
            raise ValueError("cluster needs a directory or a bucket that all members share. Set store")
        return self

    @model_validator(mode="after")
    def _guarded(self) -> "Settings":
        if not (is_loopback(self.host) or self.token or self.token_file):
            raise ValueError(
                f"host {self.host} can be reached from other machines, and every client can run commands. Set token or "
                "token_file (docs/access.md), or listen on 127.0.0.1"
            )
        return self

    @field_validator("sources")
    @classmethod
    def _are_sources(cls, sources: tuple[str, ...]) -> tuple[str, ...]:
        for entry in sources:
            if malformed_source(entry):
                raise ValueError(f"{entry!r} is not a source: use an absolute path, a URL without a query, or env:NAME")
        return sources

    @property
    def runs_images(self) -> bool:
        """Whether the image that a client names is run; otherwise it stands for `default_spec`, or for nothing."""
        return "container" in self.drivers or ("local" in self.drivers and not self.any_image)

    @property
    def driver_names(self) -> tuple[str, ...]:
        """The drivers to start. `container` is the name that `local` had for images in earlier versions."""
        return tuple(dict.fromkeys("local" if name == "container" else name for name in self.drivers))

    @property
    def source_rules(self) -> SourceRules:
        """What specs may name, and which files of this proxy none may reach."""
        # A TOML file may hold the token.
        # A bucket is no file, and the URL of one names none.
        store = None if self.store is None else self.store.removeprefix("file://")
        data, images = self.data, self.checkpoint_dir
        if self.workers > 1:
            # The directories of the other workers are beside that of this one (`proxy.workers.division`).
            data, images = data.parent, None if images is None else images.parent
        files = (data, self.token_file, images, store, self.model_config.get("toml_file"))
        private = (Path(file).resolve() for file in files if isinstance(file, str | Path))
        return SourceRules(tuple(private), self.sources, self.egress)

    @classmethod
    def load(cls, config: Path | None = None, **options: object) -> "Settings":
        """Return the settings of a TOML file and of options (None: not given). Raises ValueError or OSError."""
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

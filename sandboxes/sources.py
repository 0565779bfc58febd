"""What specs may name outside their sandboxes: paths of the proxy's machine, URLs, DSNs and environment variables.

Two rules hold, and both hold again at each use, because a link may be swapped after the spec was accepted:

1. No spec reaches what is the proxy's own: its data directory, its files with tokens, `/proc`, `/sys` and `/dev`. A
   directory that contains one of them is refused too, since its content would be copied or shown with it.
2. A confined spec (`EnvironmentSpec.confined`) names only what the setting `sources` allows.

No spec, confined or not, names a host for egress that the setting `egress` does not list.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from sandboxes.errors import ForbiddenSourceError
from sandboxes.server_spec import covers
from sandboxes.spec import SQL_DRIVERS, EnvironmentSpec

_KERNEL = ("/proc", "/sys", "/dev")
"""File systems of the kernel: `/proc/1/environ` and `/proc/self/root` lead to everything else."""
_ENVIRONMENT = "env:"
"""Precedes the name of an environment variable among the allowed sources."""
_DEFAULT_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "postgres": 5432}


@dataclass(frozen=True, slots=True)
class SourceRules:
    """The rules of one proxy."""

    private: tuple[Path, ...] = ()  # Files and directories of the proxy's own, as real paths.
    # What confined specs may name: directories and files, prefixes of URLs, and `env:` with the name of an environment
    # variable.
    allowed: tuple[str, ...] = ()
    egress: tuple[str, ...] = ()  # The hosts that any spec may name for egress, see `server_spec.covers`.

    def check(self, spec: EnvironmentSpec) -> None:
        """Check everything that a spec names; raise `ForbiddenSourceError` for what it must not reach."""
        self.check_egress(spec)
        for path in _paths(spec):
            self.real(path, confined=spec.confined)
        for text in _texts(spec.options):
            # What a plug-in does with an option is unknown: a text with a slash, or with the name of a file here, is
            # taken for a path.
            if "://" in text:
                if spec.confined:
                    self.check_url(text)
            elif "/" in text or os.path.lexists(text):
                self.real(text, confined=spec.confined)
        if spec.confined:
            self._check_urls(spec)

    def check_egress(self, spec: EnvironmentSpec) -> None:
        """Check that the administrator has listed every host that a spec names; none are by default. Microseconds."""
        for host in () if spec.egress is None else spec.egress.hosts:
            if not any(covers(entry, host) for entry in self.egress):
                raise ForbiddenSourceError(
                    f"egress to {host!r} is not allowed. Ask this proxy's operator to list it in the setting `egress`."
                )

    def real(self, path: str | Path, *, confined: bool) -> str:
        """Return the real path, without links, of a path that a spec may name. Open it with `open_plain`."""
        # Not strict: only those who may read a file learn whether it exists.
        real = _normal(os.path.realpath(path))
        # As written too: `/proc/self/root/etc` is no way to name `/etc`.
        written = _normal(os.path.abspath(path))  # noqa: PTH100 - links stay
        private = [str(own) for own in self.private]
        # By path, which also covers directories that contain a private one; and by identity, which covers hard links
        # and bind mounts.
        if (
            any(_is_below(real, own) or _is_below(own, real) for own in (*private, *_KERNEL))
            or any(_is_below(written, own) for own in _KERNEL)
            or _identities(private) & _identities((real, *map(str, Path(real).parents)))
        ):
            raise ForbiddenSourceError(
                f"{str(path)!r} is or contains what no spec may read: Forkpoint's own files, /proc, /sys or /dev. "
                "Name another directory."
            )
        # The allowed directories are the operator's, so links in their own names are followed.
        if confined and not any(
            _is_below(real, os.path.realpath(entry)) for entry in self.allowed if entry.startswith("/")
        ):
            raise _not_allowed(repr(str(path)))
        return real

    def check_url(self, url: str) -> None:
        """Check that a URL or DSN of a confined spec begins with an allowed prefix."""
        named = _split(url)
        allowed = (_split(entry) for entry in self.allowed if "://" in entry)
        if named is None or not any(entry is not None and _covers(entry, named) for entry in allowed):
            # A DSN may hold a password, so its text is not shown.
            raise _not_allowed(repr(url) if url.startswith("http") else "this DSN")

    def _check_urls(self, spec: EnvironmentSpec) -> None:
        for database in spec.databases.values():
            # libpq's other form, and parameters in the query, can name files, services and other hosts.
            if database.dsn is not None and database.dsn not in self.allowed:
                self.check_url(database.dsn)
        for server in spec.upstreams.values():
            self.check_url(server.upstream)
        model = None if spec.video is None else spec.video.model
        if model is None:
            return
        self.check_url(model.base_url)
        if model.api_key_env is not None and f"{_ENVIRONMENT}{model.api_key_env}" not in self.allowed:
            raise _not_allowed(f"environment variable {model.api_key_env!r}")


def malformed_source(entry: str) -> bool:
    """Return whether an entry of the setting `sources` is no absolute path, no URL and no `env:NAME`."""
    if entry.startswith(("/", _ENVIRONMENT)):
        return False
    return _split(entry) is None


def has_dot_segments(target: str) -> bool:
    """Return whether a request target has segments that a server may resolve upwards, out of an allowed prefix."""
    path = target.partition("?")[0].lower().replace("%2e", ".").replace("%2f", "/").replace("%5c", "/")
    return ".." in path.replace("\\", "/").split("/")


def _paths(spec: EnvironmentSpec) -> Iterator[str]:
    if spec.base != "host":
        yield spec.base
    # Other names of images are Docker's.
    images = (spec.image, *(service.image for service in spec.services.values()))
    yield from (image for image in images if image is not None and image.startswith("/"))
    yield from spec.copied_sources
    if spec.driver in SQL_DRIVERS - {"postgres"}:
        for database in spec.databases.values():
            source = database.source or ()
            yield from (source,) if isinstance(source, str) else source
    if spec.video is not None:
        yield from (spec.video.source,) if isinstance(spec.video.source, str) else spec.video.source.values()


def _texts(options: Any) -> Iterator[str]:
    if isinstance(options, str):
        # No system call takes a path with a zero byte.
        yield options.replace("\0", "")
    elif isinstance(options, dict):
        for key, value in options.items():
            yield from _texts(key)
            yield from _texts(value)
    elif isinstance(options, list | tuple):
        for value in options:
            yield from _texts(value)


def _normal(path: str) -> str:
    # Two slashes at the start stay two (POSIX), and mean what one does on Linux.
    return "/" + path.lstrip("/")


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _identities(paths: Iterable[str]) -> set[tuple[int, int]]:
    identities = set()
    for path in paths:
        try:
            status = Path(path).stat()
        except OSError:
            # It does not exist, so nothing else is it.
            continue
        identities.add((status.st_dev, status.st_ino))
    return identities


def _split(url: str) -> SplitResult | None:
    """Return the parts of a URL; None if two readers could read it differently, or if it has a query."""
    if not url.isascii() or not url.isprintable() or any(character in url for character in " \\?#"):
        return None
    try:
        parts = urlsplit(url)
        return parts if parts.scheme in _DEFAULT_PORTS and parts.hostname and _port(parts) else None
    except ValueError:
        return None


def _port(parts: SplitResult) -> int:
    return parts.port if parts.port is not None else _DEFAULT_PORTS[parts.scheme]


def _covers(allowed: SplitResult, named: SplitResult) -> bool:
    authority = named.netloc.rpartition("@")[2]
    # Several hosts (libpq) and other tricks with the authority are not in `hostname` and `port`.
    plain = authority.lower() in {f"{named.hostname}", f"{named.hostname}:{_port(named)}", f"[{named.hostname}]",
                                  f"[{named.hostname}]:{_port(named)}"}  # fmt: skip
    return (
        plain and (named.scheme, named.hostname, _port(named)) == (allowed.scheme, allowed.hostname, _port(allowed))
        and _is_below(named.path or "/", allowed.path or "/") and not has_dot_segments(named.path)
    )  # fmt: skip


def _not_allowed(what: str) -> ForbiddenSourceError:
    return ForbiddenSourceError(
        f"{what} is not among the `sources` that a token for some tasks may name. Ask this proxy's operator to allow "
        "it, or to PUT the task."
    )

"""Settings of a group: `Options`. Each field can also be set by the environment variable ``TORCHKV_<FIELD>``.

An argument overrides the environment, which overrides the default. A misspelt ``TORCHKV_*`` variable causes a warning.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TypeVar

from torchkv.errors import ProtocolError

__all__ = [
    "PATHS",
    "Options",
    "interface_from_env",
    "seconds",
    "secret_file_from_env",
    "warn_about_unknown_variables",
]

PREFIX = "TORCHKV_"
PATHS = ("runs", "slices", "staged", "direct")

MAX_HEARTBEAT = 3600.0  # seconds

# Variables that are not fields of Options.
_OTHER = ("INTERFACE", "SECRET_FILE")

DEFAULT_THREADS = 4  # that copy: more gain little where several ranks share the memory
MAX_THREADS = 16

RECORDED = 4096  # operations that a flight recorder keeps by default
MAX_RECORDED = 1 << 20

T = TypeVar("T")


def _flag(text: str) -> bool:
    if text.lower() in {"1", "true", "yes", "on"}:
        return True
    if text.lower() in {"0", "false", "no", "off", ""}:
        return False
    raise ValueError("expected one of 1, 0, true, false, yes, no, on, off")


def _text_or_none(text: str) -> str | None:
    return text or None


def _float_or_none(text: str) -> float | None:
    return float(text) if text else None


def _int_or_none(text: str) -> int | None:
    return int(text) if text else None


def _setting(name: str, default: T, parse: Callable[[str], T]) -> T:
    """A dataclass field whose default is its environment variable, read when an `Options` is made, not at import."""

    def read() -> T:
        text = os.environ.get(PREFIX + name.upper())
        if text is None:
            return default
        try:
            return parse(text)
        except ValueError as error:
            raise ProtocolError(f"{PREFIX}{name.upper()}={text!r} is not a valid {name}: {error}") from error

    made: T = field(default_factory=read)
    return made


def seconds(value: float | timedelta, name: str) -> float:
    """``value`` in seconds. name: of the value, for the error. Raises ``ProtocolError`` unless it is positive."""
    try:
        result = value.total_seconds() if isinstance(value, timedelta) else float(value)
    except (TypeError, ValueError):
        result = 0.0
    if not result > 0 or isinstance(value, str | bytes):
        raise ProtocolError(f"{name} must be a positive number of seconds or a timedelta, not {value!r}")
    return result


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of one group; pass them as ``pg_options``.

    transport: name of an installed transport, or ``"auto"``.
    path: ``runs``, ``slices``, ``staged`` or ``direct`` forces this path for every transfer; None: torchkv chooses.
    timeout: seconds without progress after which a granted request fails.
    grant_timeout: seconds that a sender waits for its grant, and a receiver for its first byte or seal.
    heartbeat: seconds between heartbeats; a peer that misses five, and cannot be reconnected to, counts as lost.
    staging_send: bytes of memory into which this rank packs staged transfers, allocated on first use; 0: none.
    staging_recv: bytes of the staging ring that other ranks write to, allocated by ``register``; 0: none.
    sm_budget: thread blocks that each copy kernel may use on a GPU.
    copy_threads: threads that copy together what this rank sends within its host, in host memory; None: as many as this
    process has cores, up to four. They sleep while there is nothing to copy.
    checksum: whether to verify bytes end to end; every transfer then takes the staged path. On GPUs not for
    pages that are converted to another dtype.
    require: a path, such as ``"direct"``, by which every peer must be reachable, else ``register`` raises.
    min_gbps: the lowest rate, in GB/s (1e9 bytes/s), that ``register`` must measure to every peer, else it raises.
    Not for `torchkv.join`.
    flight_recorder: how many of this rank's last operations are kept for dumps; 0: none; None: 4,096 if ``dump_dir``,
    ``metrics_port`` or ``nvtx`` is set, else none. Without it no latencies are counted.
    dump_dir: folder to write a dump of the flight recorder to, when a request fails or is waited for in vain, and on
    SIGUSR2; None: nowhere.
    metrics_port: this rank answers Prometheus at ``127.0.0.1``, at this port plus its rank; 0: at any free port, which
    is logged; None: nowhere. Needs ``prometheus_client``.
    nvtx: whether verbs are NVTX ranges. They are ranges for PyTorch's profiler in any case.

    Raises ``ProtocolError`` for a value that is not allowed.
    """

    transport: str = _setting("transport", "auto", str)
    path: str | None = _setting("path", None, _text_or_none)
    timeout: float = _setting("timeout", 30.0, float)
    grant_timeout: float = _setting("grant_timeout", 300.0, float)
    heartbeat: float = _setting("heartbeat", 1.0, float)
    staging_send: int = _setting("staging_send", 128 << 20, int)
    staging_recv: int = _setting("staging_recv", 256 << 20, int)
    sm_budget: int = _setting("sm_budget", 16, int)
    copy_threads: int | None = _setting("copy_threads", None, _int_or_none)
    checksum: bool = _setting("checksum", False, _flag)
    require: str | None = _setting("require", None, _text_or_none)
    min_gbps: float | None = _setting("min_gbps", None, _float_or_none)
    flight_recorder: int | None = _setting("flight_recorder", None, _int_or_none)
    dump_dir: str | None = _setting("dump_dir", None, _text_or_none)
    metrics_port: int | None = _setting("metrics_port", None, _int_or_none)
    nvtx: bool = _setting("nvtx", False, _flag)

    def __post_init__(self) -> None:
        for name in ("timeout", "grant_timeout", "heartbeat"):
            object.__setattr__(self, name, seconds(getattr(self, name), f"Options.{name}"))
        if self.heartbeat > MAX_HEARTBEAT:
            raise ProtocolError(f"Options.heartbeat={self.heartbeat:g} s is more than {MAX_HEARTBEAT:g} s")
        for name in ("path", "require"):
            value = getattr(self, name)
            if value is not None and value not in PATHS:
                raise ProtocolError(f"Options.{name}={value!r} is not one of {', '.join(PATHS)}")
        for name in ("staging_send", "staging_recv", "sm_budget"):
            value = getattr(self, name)
            least = 1 if name == "sm_budget" else 0
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ProtocolError(f"Options.{name}={value!r} must be an int, {least} or more")
        threads = self.copy_threads
        whole = isinstance(threads, int) and not isinstance(threads, bool)
        if threads is not None and not (whole and 1 <= threads <= MAX_THREADS):
            raise ProtocolError(f"Options.copy_threads={threads!r} must be an int from 1 to {MAX_THREADS}, or None")
        if not isinstance(self.transport, str):
            raise ProtocolError(f"Options.transport={self.transport!r} must be the name of a transport, or 'auto'")
        if self.min_gbps is not None and not (isinstance(self.min_gbps, int | float) and self.min_gbps > 0):
            raise ProtocolError(f"Options.min_gbps={self.min_gbps!r} must be positive, or None to measure nothing")
        for name in ("checksum", "nvtx"):
            if not isinstance(getattr(self, name), bool):
                raise ProtocolError(f"Options.{name}={getattr(self, name)!r} must be a bool")
        self._check_observation()
        if self.checksum and self.path not in (None, "staged"):
            raise ProtocolError(
                f"Options.checksum: only the staged path computes checksums, but Options.path={self.path!r}; leave one "
                "of them out"
            )

    def _check_observation(self) -> None:
        size, port = self.flight_recorder, self.metrics_port
        if isinstance(size, bool) or not isinstance(size, int | None) or not 0 <= (size or 0) <= MAX_RECORDED:
            raise ProtocolError(f"Options.flight_recorder={size!r} must be an int from 0 to {MAX_RECORDED}, or None")
        if self.dump_dir is not None and not isinstance(self.dump_dir, str):
            raise ProtocolError(f"Options.dump_dir={self.dump_dir!r} must be the path of a folder, a str, or None")
        if self.dump_dir is not None and size == 0:
            raise ProtocolError("Options.dump_dir: nothing is recorded, because Options.flight_recorder=0; raise that")
        if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 1 << 16):
            raise ProtocolError(f"Options.metrics_port={port!r} must be a port, 0 for any that is free, or None")

    @property
    def recorded(self) -> int:
        """How many operations the flight recorder keeps; 0: there is none."""
        if self.flight_recorder is not None:
            return self.flight_recorder
        asked = self.dump_dir is not None or self.metrics_port is not None or self.nvtx
        return RECORDED if asked else 0

    @property
    def copiers(self) -> int:
        """Threads that copy beside the resident loop's own."""
        most = min(DEFAULT_THREADS, len(os.sched_getaffinity(0)))
        return (most if self.copy_threads is None else self.copy_threads) - 1

    @property
    def forced_path(self) -> str | None:
        """The path that every transfer must take; None if torchkv chooses."""
        return "staged" if self.checksum else self.path


def interface_from_env() -> str | None:
    """``TORCHKV_INTERFACE``: name or IPv4 address of the interface to listen on and to announce; None if not set."""
    return os.environ.get(PREFIX + "INTERFACE") or None


def secret_file_from_env() -> str | None:
    """``TORCHKV_SECRET_FILE``: the file with the secret that jobs launched apart share; None if not set."""
    return os.environ.get(PREFIX + "SECRET_FILE") or None


def warn_about_unknown_variables() -> list[str]:
    """Warns of each ``TORCHKV_*`` variable that torchkv does not read, and suggests a name. Returns these variables."""
    known = [PREFIX + f.name.upper() for f in fields(Options)] + [PREFIX + name for name in _OTHER]
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
    for name in unknown:
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        warnings.warn(f"environment variable {name} is not read by torchkv{hint}", stacklevel=2)
    return unknown

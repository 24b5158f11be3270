"""Metrics for Prometheus, through ``prometheus_client`` (``pip install 'torchkv[metrics]'``), on loopback only.

`KVCollector` reads what a rank has counted anyway, when it is scraped: requests pay nothing for it. `serve` answers
scrapes; a program that has a server of its own registers a `KVCollector` there instead.
"""

from __future__ import annotations

import importlib.util
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torchkv.errors import TransportUnavailable
from torchkv.observe.stats import Stats

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

__all__ = ["KVCollector", "Service", "check_port", "serve"]

log = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
_LABELS = ["group", "instance", "rank"]


class KVCollector:
    """A collector of ``prometheus_client``. group: a label for all its metrics. stats: counts now; None: rank gone."""

    def __init__(self, group: str, stats: Callable[[], Stats | None]) -> None:
        self._group = group
        self._stats = stats

    def describe(self) -> list[Metric]:
        """Nothing: a registry would else collect when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics of one scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        stats = self._stats()
        if stats is None:
            return
        common = [self._group, stats.instance, str(stats.rank)]

        def counter(name: str, text: str, labels: list[str], values: Mapping[Any, float]) -> Metric:
            return _fill(CounterMetricFamily(f"torchkv_{name}", text, labels=_LABELS + labels), common, values)

        def gauge(name: str, text: str, labels: list[str], values: Mapping[Any, float]) -> Metric:
            return _fill(GaugeMetricFamily(f"torchkv_{name}", text, labels=_LABELS + labels), common, values)

        ended = {("send", how): n for how, n in stats.sends.items()}
        ended |= {("receive", how): n for how, n in stats.receives.items()}
        yield counter("requests", "Requests that have ended", ["role", "outcome"], ended)
        failed = {key: n for key, n in ended.items() if key[1] != "success"}
        yield counter("failures", "Requests that have failed, by the class of the error", ["role", "error"], failed)
        moved = {("sent", *key): n for key, n in _pairs(stats.sent).items()}
        moved |= {("received", *key): n for key, n in _pairs(stats.received).items()}
        yield counter("bytes", "KV bytes moved, by path", ["direction", "peer", "path"], moved)
        yield counter("lane_bytes", "KV bytes sent, by what carried them", ["peer", "lane"], _pairs(stats.lanes))
        opened = {("send", state): n for state, n in stats.open_sends.items()}
        opened |= {("receive", state): n for state, n in stats.open_receives.items()}
        yield gauge("open_sends", "Requests that have not ended", ["role", "state"], opened)
        yield gauge("queue_depth", "What waits or is under way", ["queue"], stats.queues)
        yield gauge("staging_bytes", "Staging memory", ["use"], stats.ring)
        quarantined = {"pages": stats.quarantined_pages, "slots": stats.quarantined_slots}
        yield gauge("quarantined", "Pages and state slots that a writer may still write to", ["kind"], quarantined)
        yield counter("retries", "What was done again", ["what"], stats.retries)
        yield counter("dropped_frames", "Control frames refused", [], {(): stats.dropped_frames})
        yield gauge("lost_peers", "Peers that do not answer", [], {(): len(stats.lost)})
        latency = HistogramMetricFamily("torchkv_latency_seconds", "Durations by phase", labels=[*_LABELS, "phase"])
        for phase, histogram in stats.phases.items():
            latency.add_metric([*common, phase], buckets=histogram.cumulative, sum_value=histogram.total)
        yield latency


def _pairs(nested: Mapping[str, Mapping[str, int]]) -> dict[tuple[str, str], int]:
    return {(outer, inner): value for outer, counts in nested.items() for inner, value in counts.items()}


def _fill(family: Any, common: list[str], values: Mapping[Any, float]) -> Metric:
    for key, value in values.items():
        family.add_metric([*common, *((key,) if isinstance(key, str) else key)], value)
    filled: Metric = family
    return filled


class Service:
    """A rank's metrics at a port of this process, until `close`."""

    def __init__(self, server: _Server, collector: KVCollector) -> None:
        self._server = server
        self._collector: KVCollector | None = collector

    @property
    def port(self) -> int:
        return self._server.port

    def close(self) -> None:
        """Idempotent. The last service of a port ends its server."""
        collector, self._collector = self._collector, None
        if collector is not None:
            with _lock:
                self._server.leave(collector)


class _Server:
    """Answers scrapes at one port, for all groups of this process that asked for it."""

    def __init__(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry: CollectorRegistry = CollectorRegistry(auto_describe=False)
        self._asked = port
        self._services = 0
        self._http, self._thread = start_http_server(port, addr=ADDRESS, registry=self._registry)
        self.port: int = self._http.server_address[1]

    def join(self, collector: KVCollector) -> None:
        self._services += 1
        self._registry.register(collector)

    def leave(self, collector: KVCollector) -> None:
        self._registry.unregister(collector)
        self._services -= 1
        if not self._services:
            _servers.pop(self._asked, None)
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()


_servers: dict[int, _Server] = {}  # by the port that was asked for
_lock = threading.Lock()


def serve(port: int, collector: KVCollector) -> Service:
    """Serves ``collector`` at ``http://127.0.0.1:<port>/metrics``. port: 0: any that is free; groups share it.

    Raises ``TransportUnavailable`` if the port cannot be had.
    """
    with _lock:
        server = _servers.get(port)
        if server is None:
            try:
                server = _servers[port] = _Server(port)
            except OSError as error:
                raise _taken(port, error) from error
        server.join(collector)
    log.info("metrics at http://%s:%d/metrics", ADDRESS, server.port)
    return Service(server, collector)


def check_port(port: int) -> None:
    """Raises ``TransportUnavailable`` without ``prometheus_client``, and if `serve` could not listen at ``port``."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise TransportUnavailable(
            "Options.metrics_port needs prometheus_client: pip install 'torchkv[metrics]', or leave it unset"
        )
    with _lock:
        if port in _servers:
            return
        try:
            with socket.create_server((ADDRESS, port)):
                pass  # it is free
        except (OSError, OverflowError) as error:
            raise _taken(port, error) from error


def _taken(port: int, error: Exception) -> TransportUnavailable:
    return TransportUnavailable(
        f"Options.metrics_port: nothing can listen on {ADDRESS}:{port}: {error}; choose another port"
    )

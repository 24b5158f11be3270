"""What watches a rank beside its verbs: the dumper of its flight recorder, and its metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar
from weakref import ref

from torchkv.errors import ProtocolError
from torchkv.group.reports import snapshot
from torchkv.observe.dumper import Dumper, write_dump
from torchkv.observe.metrics import KVCollector, Service, check_port, serve

if TYPE_CHECKING:
    from torchkv.group.verbs import Verbs
    from torchkv.options import Options

__all__ = ["Observation", "check_observation"]

T = TypeVar("T")
P = ParamSpec("P")


def check_observation(options: Options, rank: int) -> None:
    """Raises ``TransportUnavailable`` if this rank cannot serve the metrics that ``options`` ask for."""
    if options.metrics_port is not None:
        check_port(_port(options.metrics_port, rank))


class Observation:
    """Of one rank, until `close`. group: the name of its c10d group, or instance.

    Raises ``TransportUnavailable`` if the port of the metrics was taken since `check_observation`.
    """

    def __init__(self, verbs: Verbs, *, group: str) -> None:
        engine, options, recorder = verbs.engine, verbs.engine.options, verbs.engine.recorder
        me = engine.group_map.me
        self._name = f"{me.instance}-rank{me.own_number}"
        self._service: Service | None = None
        self._dumper: Dumper | None = None
        if options.metrics_port is not None:
            collector = KVCollector(group, _weakly(verbs, snapshot.stats))
            self._service = serve(_port(options.metrics_port, me.own_number), collector)
        if recorder is not None and options.dump_dir is not None:
            self._dumper = Dumper(options.dump_dir, self._name, _weakly(verbs, snapshot.dump))
            recorder.on_failure = self._dumper.on_failure

    def dump(self, verbs: Verbs, folder: str | None) -> Path:
        """See `KVVerbs.dump`."""
        folder = verbs.engine.options.dump_dir if folder is None else folder
        if verbs.engine.recorder is None:
            raise ProtocolError("dump: nothing is recorded; set Options.flight_recorder, or Options.dump_dir")
        if folder is None:
            raise ProtocolError("dump: give a folder, or set Options.dump_dir")
        return write_dump(Path(folder), self._name, snapshot.dump(verbs, "asked for"))

    def close(self) -> None:
        """Idempotent."""
        if self._service is not None:
            self._service.close()
        if self._dumper is not None:
            self._dumper.close()


def _weakly(verbs: Verbs, report: Callable[Concatenate[Verbs, P], T]) -> Callable[P, T | None]:
    """``report`` of ``verbs``, without keeping them alive: None once they are gone."""
    weak = ref(verbs)

    def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
        alive = weak()
        return None if alive is None else report(alive, *args, **kwargs)

    return call


def _port(first: int, rank: int) -> int:
    """That of one rank; 0 stands for any."""
    return first + rank if first else 0

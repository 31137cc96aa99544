"""Metrics of what is published: of each class produced = delivered + dropped + queued, and how the link does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from agent.mqtt.link import Figures as LinkFigures
from agent.mqtt.spool.spool import Figures as SpoolFigures
from agent.telemetry import Telemetry

_Series = list[tuple[tuple[str, ...], float]]


class Counted(Protocol):
    """What is read, by a thread."""

    @property
    def spool_figures(self) -> SpoolFigures | None: ...

    @property
    def link_figures(self) -> LinkFigures: ...

    @property
    def command_figures(self) -> Mapping[str, int]: ...


def watch(telemetry: Telemetry, fleet: Counted) -> None:
    """Show them, which are none until the log is open."""

    def of_classes(read: Callable[[SpoolFigures], _Series]) -> Callable[[], _Series]:
        return lambda: read(found) if (found := fleet.spool_figures) else []

    def counted(name: str) -> Callable[[SpoolFigures], _Series]:
        return lambda found: [((kind,), getattr(each, name)) for kind, each in found.by_kind.items()]

    def worn(name: str) -> Callable[[], float]:
        return lambda: getattr(found.wear, name) if (found := fleet.spool_figures) else 0.0

    def series(name: str, text: str, labels: tuple[str, ...], read: Callable[[], _Series], *, count: bool) -> None:
        telemetry.watch_series(f"tightfit_mqtt_{name}", text, labels, read, count=count)

    by_class = ("class",)
    series("produced", "Messages that were made.", by_class, of_classes(counted("produced")), count=True)
    series("delivered", "Messages that a broker acknowledged.", by_class, of_classes(counted("delivered")), count=True)
    series("dropped", "Messages that are lost, by why.", ("class", "reason"), of_classes(_dropped), count=True)
    series("queued", "Messages that wait.", by_class, of_classes(counted("queued")), count=False)
    series("spool_pending", "Messages that are not durable yet.", (), of_classes(_pending), count=False)
    series("spool_bytes", "Storage that waiting messages have.", by_class, of_classes(_stored), count=False)
    series("commands", "Commands by what became of them.", ("outcome",), lambda: _commands(fleet), count=True)
    for name, text, attribute in (
        ("appended_bytes", "Bytes of messages that went into the log.", "bytes_appended"),
        ("written_bytes", "Bytes that the log has written to the storage.", "bytes_written"),
        ("syncs", "How often the log had the storage make them durable.", "syncs"),
    ):
        telemetry.watch_one_count(f"tightfit_mqtt_spool_{name}", text, worn(attribute))
    link = {
        "connected": ("1 while there is a broker.", lambda: fleet.link_figures.is_connected),
        "inside": ("Messages that are not acknowledged yet.", lambda: fleet.link_figures.inside),
    }
    for name, (text, read) in link.items():
        telemetry.watch_one(f"tightfit_mqtt_{name}", text, read)
    telemetry.watch_one_count(
        "tightfit_mqtt_connections", "Connections that were made.", lambda: fleet.link_figures.connections
    )


def _dropped(found: SpoolFigures) -> _Series:
    return [((kind, why), count) for kind, each in found.by_kind.items() for why, count in each.dropped.items()]


def _pending(found: SpoolFigures) -> _Series:
    return [((), found.pending)]


def _stored(found: SpoolFigures) -> _Series:
    return [((kind,), nbytes) for kind, nbytes in found.bytes_by_kind.items()]


def _commands(fleet: Counted) -> _Series:
    return [((outcome,), count) for outcome, count in fleet.command_figures.items()]

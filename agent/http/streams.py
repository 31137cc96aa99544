"""Long-lived exchanges over HTTP/1.1 (docs/streams.md): records in and out, results that are followed, and events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol, TypeVar

from aiohttp import web

from agent.config import Config
from agent.errors import Reason, RefusedError
from agent.feed import Feed
from agent.gateway import Gateway
from agent.http.answers import refusal
from agent.http.bodies import go_on
from agent.http.echo import echoed
from agent.http.following import Encode, Following, ResultFeeds, happening_record, shown_record
from agent.http.framing.encoder import Encoder
from agent.http.framing.events import MEDIA_TYPE as EVENTS
from agent.http.framing.formats import decoder_of, encoder_of
from agent.http.guard import client_of
from agent.http.hangups import Hangups
from agent.http.hints import priority_of, timeout_of
from agent.http.runs import Runs
from agent.http.stream import Stream
from agent.http.stream_calls import StreamCalls, Target
from agent.journal import new_epoch
from agent.repository import Repository
from agent.served import Entry, Served
from targets.errors import TightfitError

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Exchange(Protocol):
    """A stream, or somebody who follows."""

    async def run(self) -> web.StreamResponse: ...

    def stop(self, reason: Reason, message: str) -> None: ...


class StreamApi:
    """Handlers of everything that goes on and on. `largest` says how many bytes a request of a version can have."""

    def __init__(
        self, gateway: Gateway, repository: Repository, config: Config, runs: Runs, largest: Callable[[Served], int]
    ) -> None:
        self._gateway, self._repository, self._config, self._runs = gateway, repository, config, runs
        self._largest = largest
        self._options = config.streams
        self._epoch = new_epoch()
        self.feeds = ResultFeeds(self._epoch, config.streams.patience_s, config.http.send_s)
        self._open: dict[_Exchange, tuple[str, str, web.Request]] = {}
        """The model, the client and the request of each."""
        self._hangups = Hangups()
        gateway.on_drain.append(self._stop)
        gateway.on_leave.append(lambda served: self.feeds.pictures.forget(served.name))
        watch = gateway.telemetry.watch
        watch("tightfit_streams", "Streams that are open, of records, results or events.", self._counts)
        watch("tightfit_results_bytes", "What results take that are kept for those who follow.", self.feeds.sizes)

    def add_to(self, app: web.Application) -> None:
        """The routes."""
        for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            app.router.add_post(f"{prefix}/stream", _refusing(self.stream))
        app.router.add_get("/v2/models/{model}/results", _refusing(self.results), allow_head=False)
        app.router.add_get("/v2/models/{model}/results/picture", _refusing(self.picture), allow_head=False)
        app.router.add_get("/v2/events", _refusing(self.events), allow_head=False)
        app.on_cleanup.append(self._close)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Records in, and a record out for each."""
        entry = self._entry(request)
        entry.check()
        if coding := request.headers.get("Content-Encoding"):
            raise RefusedError(
                Reason.UNSUPPORTED_ENCODING, f"a stream with Content-Encoding {coding[:40]!r}", "send it as it is"
            )
        limit = self._config.http.body_bytes if entry.active is None else self._largest(entry.active)
        content_type = request.headers.get("Content-Type", "")
        decoder = decoder_of(content_type, limit)
        encoder = encoder_of(request.headers.get("Accept", ""), content_type, self._epoch)
        target = Target(
            entry.name,
            request.match_info.get("version"),
            client_of(request),
            priority_of(request.headers),
            timeout_of(request.headers),
            self._largest,
            echoed(request.headers),
        )
        self._check_room(request)
        calls = StreamCalls(target, decoder, encoder, self._gateway, self._repository, self._runs, self.feeds.publish)
        await go_on(request)
        stream = Stream(request, calls, decoder, encoder, self._options, self._config.http, self._config.limits)
        return await self._run(request, entry.name, stream)

    async def results(self, request: web.Request) -> web.StreamResponse:
        """What a model answers to all clients, from now on or behind what the client has."""
        entry = self._entry(request)
        feed = self.feeds.of(entry)
        encoder = encoder_of(request.headers.get("Accept", ""), "", feed.results.epoch)
        self._check_room(request)
        return await self._run(request, entry.name, self._following(request, feed, encoder, shown_record))

    async def picture(self, request: web.Request) -> web.StreamResponse:
        """The newest image that a model answered."""
        return await self.feeds.pictures.send(request, self._entry(request))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """What happens to models and engines."""
        feed = self._gateway.journal.feed
        accept = request.headers.get("Accept", "*/*")
        encoder = encoder_of(EVENTS if accept.strip() == "*/*" else accept, "", feed.results.epoch)
        self._check_room(request)
        return await self._run(request, "", self._following(request, feed, encoder, happening_record))

    def _following(self, request: web.Request, feed: Feed[T], encoder: Encoder, encode: Encode[T]) -> Following[T]:
        return Following(request, feed, encoder, encode, self._options.heartbeat_s, self._config.http.send_s)

    async def _run(self, request: web.Request, model: str, exchange: _Exchange) -> web.StreamResponse:
        self._open[exchange] = model, client_of(request), request
        try:
            done_sending = self._config.http.half_close or not request.keep_alive
            with self._hangups.watching(request.transport, done_sending):
                return await exchange.run()
        finally:
            del self._open[exchange]

    def _check_room(self, request: web.Request) -> None:
        if self._gateway.draining:
            raise RefusedError(Reason.DRAINING, "the agent is stopping", "connect to another, or later")
        if len(self._open) >= self._options.most:
            raise RefusedError(
                Reason.QUEUE_FULL, f"{self._options.most} streams are open, as many as may", "close one, or try later"
            )
        most, client = self._config.limits.client_streams, client_of(request)
        if most and [each for _, each, _ in self._open.values()].count(client) >= most:
            raise RefusedError(
                Reason.CLIENT_BUSY, f"{most} streams of this client are open, as many as may", "close one, or try later"
            )

    def _entry(self, request: web.Request) -> Entry:
        return self._repository.find(request.match_info["model"], request.match_info.get("version"))

    def _counts(self) -> Iterator[tuple[str, float]]:
        return ((model, 1.0) for model, _, _ in list(self._open.values()))

    def end_those(self, why: Callable[[web.Request], RefusedError | None]) -> None:
        """End each of whose request it says why, with a record that tells it."""
        for exchange, (_, _, request) in list(self._open.items()):
            if (error := why(request)) is not None:
                exchange.stop(error.reason, error.message)

    def _stop(self) -> None:
        for exchange in list(self._open):
            exchange.stop(Reason.DRAINING, "the agent is stopping")

    async def _close(self, _: web.Application) -> None:
        self._hangups.close()


def _refusing(handler: Handler) -> Handler:
    """Whoever is refused before the first record is answered as any other request."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except ConnectionError:
            # Nobody is there to read it.
            return refusal(Reason.DISCONNECTED, "the client went away")
        except TightfitError as error:
            reason = error.reason if isinstance(error, RefusedError) else Reason.BAD_REQUEST
            return refusal(reason, str(error), unread=not request.content.is_eof())

    return handle

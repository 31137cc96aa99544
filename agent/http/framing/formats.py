"""Which framings there are, by media type."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from agent.errors import Reason, RefusedError
from agent.http.framing import events, frames, lines, multipart
from agent.http.framing.decoder import Decoder
from agent.http.framing.encoder import Encoder

# An agent that was started anew is back within seconds, and what a client asks for again is small.
_RETRY_MS = 2000
# Random, so that no record contains it by chance, or on purpose.
_BOUNDARY_BYTES = 16

_DECODERS: dict[str, Callable[[int, str], Decoder]] = {
    lines.MEDIA_TYPE: lambda limit, _: lines.LineDecoder(limit),
    frames.MEDIA_TYPE: lambda limit, _: frames.FrameDecoder(limit),
    **dict.fromkeys(
        multipart.MEDIA_TYPES, lambda limit, kind: multipart.PartDecoder(limit, multipart.boundary_of(kind))
    ),
}
_ENCODERS: dict[str, Callable[[str, str], Encoder]] = {
    lines.MEDIA_TYPE: lambda _, __: lines.LineEncoder(),
    frames.MEDIA_TYPE: lambda _, __: frames.FrameEncoder(),
    events.MEDIA_TYPE: lambda _, epoch: events.EventEncoder(epoch, _RETRY_MS),
    **dict.fromkeys(
        multipart.MEDIA_TYPES, lambda kind, _: multipart.PartEncoder(kind, secrets.token_hex(_BOUNDARY_BYTES))
    ),
}


def decoder_of(content_type: str, limit: int) -> Decoder:
    """The decoder for a stream of that Content-Type, with records of at most `limit` bytes.

    Raises RefusedError(UNSUPPORTED_ENCODING) for a media type without framing, ContractError for a wrong boundary.
    """
    make = _DECODERS.get(_media_type(content_type))
    if make is None:
        raise RefusedError(
            Reason.UNSUPPORTED_ENCODING,
            f"Content-Type {content_type[:100]!r} is not that of a stream",
            f"available: {', '.join(_DECODERS)}",
        )
    return make(limit, content_type)


def encoder_of(accept: str, content_type: str, epoch: str) -> Encoder:
    """The encoder that a client asks for with `Accept`: the first in it that there is.

    Who takes anything is answered frames with frames, and all else with lines. `epoch` is the one of event ids. Raises
    RefusedError(BAD_REQUEST) where nothing is there that it takes.
    """
    default = frames.MEDIA_TYPE if _media_type(content_type) == frames.MEDIA_TYPE else lines.MEDIA_TYPE
    for item in accept.split(",") if accept.strip() else ["*/*"]:
        kind = _media_type(item)
        make = _ENCODERS.get(default if kind == "*/*" else kind)
        if make is not None:
            return make(kind, epoch)
    raise RefusedError(Reason.BAD_REQUEST, f"Accept is {accept[:100]!r}", f"available: {', '.join(_ENCODERS)}")


def _media_type(text: str) -> str:
    return text.partition(";")[0].strip().lower()

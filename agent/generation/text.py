"""What is shown of tokens, and when a text ends. Pure.

Theory of operation. A token is bytes, and a character may need several: text is shown up to the last that is whole. How
a token is spelled may depend on the one before (a space in front, or none), so each is decoded behind some that were
shown, and what these alone decode to is taken away.

    tokens    ... [shown, for context] [not shown yet] new
    text           "the"               "th" + half a letter: nothing is shown until the other half comes

What may become a stop string is held back until it does, or does not.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Text of tokens; U+FFFD stands for bytes that are no character."""

_HALF = "\ufffd"
# Tokens in front of the first that is shown: enough for a character, and for a tokenizer that looks back.
_CONTEXT = 4


class Finish(str, enum.Enum):
    """Why a text ended, as the Open Inference Protocol's generate API names it."""

    EOS = "eos_token"
    STOP = "stop_sequence"
    LENGTH = "length"
    """As many tokens as were asked for, or as the model can look back on."""


class Detokenizer:
    """Tokens in, whole characters out. `before` are those of the prompt."""

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(before[-_CONTEXT:])
        self._shown = len(self._tokens)

    def feed(self, token: int) -> str:
        """What can be shown now, and could not before."""
        self._tokens.append(token)
        context, text = self._decode(self._tokens[: self._shown]), self._decode(self._tokens)
        if text.endswith(_HALF) or len(text) <= len(context):
            return ""
        self._tokens = self._tokens[self._shown :]
        self._shown = len(self._tokens)
        return text[len(context) :]


class Stops:
    """Text in, text out, up to the first of some strings, which is not shown."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """(what can be shown, whether it ends here)."""
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._strings) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        held = max((_overlap(text, stop) for stop in self._strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def rest(self) -> str:
        """What was held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How much of the end of `text` is the beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class Writer:
    """Writes one text. `finish` is None until it ends."""

    def __init__(
        self, decode: Decode, prompt: Sequence[int], eos: Sequence[int], stops: Sequence[str], most: int
    ) -> None:
        self.count = 0
        """Tokens that were generated."""
        self.finish: Finish | None = None
        self._text, self._stops = Detokenizer(decode, prompt), Stops(stops)
        self._eos, self._most = frozenset(eos), most

    def feed(self, token: int) -> str:
        """What is shown of the text now that this token came."""
        self.count += 1
        if token in self._eos:
            return self.end(Finish.EOS)
        shown, stopped = self._stops.feed(self._text.feed(token))
        if stopped:
            self.finish = Finish.STOP
            return shown
        return shown + self.end(Finish.LENGTH) if self.count >= self._most else shown

    def end(self, finish: Finish) -> str:
        """End it; what is left to be shown."""
        self.finish = finish
        return self._stops.rest()

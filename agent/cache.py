"""Answers kept for requests that come again. Pure: what is kept are copies, and nothing here knows of slots or engines.

A cache belongs to one loaded version of one model and ends with it, so a reload begins with none. Only what the engine
answered is ever put in. A model that draws random numbers answers with the draw of the first request: who turns the
cache on says that equal inputs may have equal answers.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from agent.request import Output

# What Python keeps beside the tensors, measured from above: digest, tuples, counts, and a place in the table.
_ENTRY_BYTES = 512
_OUTPUT_BYTES = 384


def key_of(
    version: str, shapes: Sequence[Sequence[int]], inputs: Sequence[memoryview], outputs: Sequence[int]
) -> bytes:
    """Digest (BLAKE2b, 32 bytes) of a request: the model's version, its inputs as bytes, and the outputs it wants.

    What is hashed first says where every tensor ends, so no two requests have the same bytes.
    """
    sizes = [tensor.nbytes for tensor in inputs]
    head = repr((version, [list(shape) for shape in shapes], sizes, list(outputs))).encode()
    digest = hashlib.blake2b(len(head).to_bytes(8, "little") + head, digest_size=32)
    for tensor in inputs:
        digest.update(tensor)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Answer:
    """Outputs as the engine gave them, and the bytes of each."""

    outputs: tuple[Output, ...]
    tensors: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        """What keeping it costs."""
        return _ENTRY_BYTES + sum(_OUTPUT_BYTES + len(tensor) for tensor in self.tensors)


class ResponseCache:
    """Answers by `key_of`, at most `limit_bytes` of them; the one not asked for longest goes first."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: bytes) -> Answer | None:
        """The answer to that request, counted as a hit, or None, counted as a miss."""
        answer = self._answers.get(key)
        if answer is None:
            self.misses += 1
            return None
        self.hits += 1
        self._answers.move_to_end(key)
        return answer

    def put(self, key: bytes, answer: Answer) -> None:
        """Keep it, unless it alone is more than the limit. Room is made first, so the limit holds at every moment."""
        if answer.nbytes > self.limit_bytes:
            return
        old = self._answers.pop(key, None)
        self.nbytes -= old.nbytes if old else 0
        while self.nbytes + answer.nbytes > self.limit_bytes:
            self.nbytes -= self._answers.popitem(last=False)[1].nbytes
            self.evictions += 1
        self._answers[key] = answer
        self.nbytes += answer.nbytes

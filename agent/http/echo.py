"""What of a request's head comes back with its answer, so that whoever asked can tell which answer is whose.

`X-Request-Id` is the client's own name for the request; `traceparent` its place in a trace (W3C Trace Context, section
3.2). Both stand in logs too. What is longer, or has other characters, is ignored, as if it had not been sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from agent.calls import REQUEST_ID, TRACE_PARENT

_MOST_CHARACTERS = 128
_ID = re.compile(rf"[\x21-\x7e]{{1,{_MOST_CHARACTERS}}}", re.ASCII)
# Version 00 has these four fields alone, later ones may have more behind them; ff is none, and ids are never all zero.
_FIELDS = r"(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
_TRACE = re.compile(rf"00-{_FIELDS}|(?!00|ff)[0-9a-f]{{2}}-{_FIELDS}(?:-[\x21-\x7e]*)?", re.ASCII)


def echoed(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers of the answer, by name, from those of the request, which are looked up without regard to case."""
    answer = {}
    if (id_ := headers.get(REQUEST_ID)) is not None and _ID.fullmatch(id_):
        answer[REQUEST_ID] = id_
    if (trace := headers.get(TRACE_PARENT)) is not None and len(trace) <= _MOST_CHARACTERS and _TRACE.fullmatch(trace):
        answer[TRACE_PARENT] = trace
    return answer

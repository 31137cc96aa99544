"""Which outputs of a model are inputs of its next run, and which of its dimensions follow from others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from compile.errors import OptionError
from compile.graph import ir
from targets.errors import did_you_mean
from targets.generation import MASK, TOKENS
from targets.states import State
from targets.tensor import DimRange, TensorSpec

# How exporters (optimum, onnxruntime-genai) name what goes in and what comes out: past_key_values.0.key and
# present.0.key, past.0.k and present.0.k, past_conv.0 and present_conv.0.
_NAMES = (("past_key_values", "present"), ("past", "present"))
_TERM = re.compile(r"\w+", re.ASCII)

Pair = tuple[str, str]
"""Names of an input and of the output that it was in the run before."""


def parse_state(text: str) -> Pair:
    """Read one `--state` option. Raises OptionError."""
    into, equals, of = text.partition("=")
    if not (into and equals and of):
        raise OptionError(f"--state {text!r} is no pair", "write INPUT=OUTPUT, as in state=stateN")
    return into, of


def pairs_of(model: ir.Model, by_hand: Sequence[Pair] = ()) -> list[Pair]:
    """Pairs by their usual names, and those that a person named. Raises OptionError for a name that is not there."""
    inputs = [value.name or "" for value in model.graph.inputs if value.name not in model.graph.initializers]
    outputs = {value.name or "" for value in model.graph.outputs}
    for kind, names, at in (("input", inputs, 0), ("output", outputs, 1)):
        for pair in by_hand:
            if pair[at] not in names:
                raise OptionError(f"--state: no {kind} {pair[at]!r}", did_you_mean(pair[at], names))
    named = dict(by_hand)
    for name in inputs:
        guesses = (now + name.removeprefix(before) for before, now in _NAMES if name.startswith(before))
        found = next((guess for guess in guesses if guess in outputs and guess not in named.values()), None)
        if found and name not in named:
            named[name] = found
    return [(name, named[name]) for name in inputs if name in named]


def terms_of(symbol: str, inputs: Mapping[str, Sequence[int | str]], pairs: Sequence[Pair]) -> tuple[int | str, ...]:
    """What a symbol of an input is the sum of, if it is one: as it is spelled (`past + new`), or as masks are, of the
    past and of what is new. `inputs`: the axes of each."""
    terms = [term.strip() for term in symbol.split("+")]
    if len(terms) > 1 and all(_TERM.fullmatch(term) for term in terms):
        return tuple(int(term) if term.isdecimal() else term for term in terms)
    new = inputs.get(TOKENS, ())
    past = {dim for into, _ in pairs for dim in inputs[into] if isinstance(dim, str) and dim not in new}
    if inputs.get(MASK, ())[-1:] == [symbol] and symbol not in (*new, *past) and new and len(past) == 1:
        return (past.pop(), new[-1])
    return ()


def find_states(
    pairs: Sequence[Pair],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    dims: Mapping[str, DimRange],
    by_hand: Sequence[Pair] = (),
) -> tuple[tuple[State, ...], list[str]]:
    """The state of a session, and why what is named like state is none. Raises OptionError for pairs named by hand."""
    into = {spec.name: spec for spec in inputs}
    of = {spec.name: spec for spec in outputs}
    states: list[State] = []
    for name, output in pairs:
        problem, axis = _grows(into[name], of[output], dims)
        if problem and (name, output) in by_hand:
            raise OptionError(f"--state {name}={output}: {problem}")
        if problem:
            # A session without part of its state is none.
            return (), [f"{name!r} and {output!r} are not kept between runs: {problem}"]
        states.append(State(name, output, axis))
    return tuple(states), []


def _grows(into: TensorSpec, of: TensorSpec, dims: Mapping[str, DimRange]) -> tuple[str, int | None]:
    """What is wrong with a pair, and the axis along which it grows."""
    if into.dtype is not of.dtype:
        return f"{into.describe()} and {of.describe()} are of two types", None
    axes = [axis for axis, dim in enumerate(into.shape) if isinstance(dim, str)]
    if not axes:
        return "", None
    if len(axes) > 1:
        return f"{into.describe()} can have more than one shape; give every axis but the one that grows a size", None
    dim = str(into.shape[axes[0]])
    if dims[dim].min != 0:
        return f"{into.describe()} begins with {dim} = {dims[dim].min}; the past is empty at first: say 0..MAX", None
    return "", axes[0]

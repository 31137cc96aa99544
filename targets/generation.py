"""Text generation: which inputs and outputs of a language model are what, and how much it takes at once."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from targets.errors import ContractError
from targets.tensor import Contract, Dim, DType, TensorSpec

TOKENS, MASK, POSITIONS, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
TOKENIZER = "assets/tokenizer.json"
# Rows of a vocabulary of 256 k take this in their longest form; past it the file is no tokenizer.
MAX_TOKENIZER_BYTES = 64 << 20

# The library itself, and what it makes of a file: 5 MiB, and 26 MiB of one of 1.7 MiB (byte-level BPE, 49152 tokens).
_LIBRARY_BYTES, _BYTES_A_BYTE = 8 << 20, 20

_INTEGERS = (DType.INT64, DType.INT32)
_FLOATS = (DType.FLOAT32, DType.FLOAT16)


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a bundle needs to generate text: `tokenizer` is an asset of it, `eos` are the tokens that end a text."""

    tokenizer: str
    eos: tuple[int, ...] = ()


def tokenizer_bytes(nbytes: int) -> int:
    """What a tokenizer.json of that size takes in the gateway (bytes)."""
    return _LIBRARY_BYTES + _BYTES_A_BYTE * nbytes


@dataclass(frozen=True)
class Roles:
    """Positions of a language model's tensors in its contract; None where it has no such input.

    `piece`: the most tokens of one run. `context`: the most tokens that the past may have; None where state does not
    grow, and so has no end. `vocabulary`: tokens that the logits are of.
    """

    tokens: int
    mask: int | None
    positions: int | None
    logits: int
    piece: int
    context: int | None
    vocabulary: int


def roles(contract: Contract) -> Roles:
    """Find them by their usual names. Raises ContractError that says what a model lacks to generate text."""
    if not contract.states:
        raise ContractError(
            "the model has no state pairs, and generates no text",
            "compile it with its past_key_values and present, or name pairs with --state IN=OUT",
        )
    past = {each.input for each in contract.states}
    inputs = {spec.name: index for index, spec in enumerate(contract.inputs) if spec.name not in past}
    for name, index in inputs.items():
        spec = contract.inputs[index]
        if name not in (TOKENS, MASK, POSITIONS):
            raise ContractError(f"generation has nothing for input {name!r}", f"it fills {TOKENS}, {MASK}, {POSITIONS}")
        if spec.dtype not in _INTEGERS or len(spec.shape) != 2 or not _takes(contract, spec.shape[0], 1):
            raise ContractError(f"input {spec.describe()} is not integers [1,n]")
    if TOKENS not in inputs:
        raise ContractError(f"the model has no input {TOKENS!r}", "generation feeds tokens to it")
    tokens = contract.inputs[inputs[TOKENS]]
    if not _takes(contract, tokens.shape[1], 1):
        raise ContractError(f"input {tokens.describe()} does not take 1 token", f"say --shape {TOKENS}=1,1..32")
    logits, vocabulary = _logits(contract)
    longest = [
        _most(contract, spec.shape[each.axis])
        for each in contract.states
        for spec in (contract.input(each.input),)
        if each.axis is not None
    ]
    return Roles(
        inputs[TOKENS],
        inputs.get(MASK),
        inputs.get(POSITIONS),
        logits,
        _most(contract, tokens.shape[1]),
        min(longest, default=None),
        vocabulary,
    )


def _logits(contract: Contract) -> tuple[int, int]:
    """(index, vocabulary) of the output that scores tokens: of that name, or the only one that is no state."""
    given = {each.output for each in contract.states or ()}
    outputs = [index for index, spec in enumerate(contract.outputs) if spec.name not in given]
    named = [index for index in outputs if contract.outputs[index].name == LOGITS] or outputs
    if len(named) != 1:
        raise ContractError(f"the model has no output {LOGITS!r}", "generation reads scores of tokens from it")
    spec: TensorSpec = contract.outputs[named[0]]
    vocabulary = spec.shape[-1] if spec.shape else None
    if spec.dtype not in _FLOATS or not isinstance(vocabulary, int):
        raise ContractError(f"output {spec.describe()} is not scores [...,n], n being the vocabulary")
    return named[0], vocabulary


def _takes(contract: Contract, dim: Dim, size: int) -> bool:
    return size == dim if isinstance(dim, int) else size in contract.dims[dim]


def _most(contract: Contract, dim: Dim) -> int:
    return dim if isinstance(dim, int) else contract.dims[dim].max

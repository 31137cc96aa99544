"""A tokenizer as an asset: read, and held against the model, before any work is done."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec

from compile.errors import DataError, OptionError
from targets.generation import MAX_TOKENIZER_BYTES, TOKENIZER, Generation, roles, tokenizer_bytes
from targets.tensor import Contract, human

# Beside the tokenizer, as models are published.
_CONFIG = "generation_config.json"
_MAX_CONFIG_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer.json as it is, the tokens that end a text, and how many tokens it knows."""

    data: bytes
    eos: tuple[int, ...]
    size: int

    @property
    def memory_bytes(self) -> int:
        """What it takes on the board."""
        return tokenizer_bytes(len(self.data))

    @property
    def generation(self) -> Generation:
        """As the manifest has it."""
        return Generation(TOKENIZER, self.eos)


def read_tokenizer(path: Path) -> Tokenizer:
    """Read it, and the generation_config.json beside it, if there is one. Raises DataError."""
    data = _read(path, MAX_TOKENIZER_BYTES)
    size = _size(path, _object(path, data))
    config = path.with_name(_CONFIG)
    if not config.is_file():
        return Tokenizer(data, (), size)
    found = _object(config, _read(config, _MAX_CONFIG_BYTES)).get("eos_token_id")
    eos = tuple(found) if isinstance(found, list) else () if found is None else (found,)
    wrong = [token for token in eos if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < size]
    if wrong:
        raise DataError(f"{config}: eos_token_id {wrong[0]!r} is none of the {size} tokens of {path.name}")
    return Tokenizer(data, tuple(sorted(set(eos))), size)


def check_tokenizer(tokenizer: Tokenizer, contract: Contract) -> None:
    """Whether the model is one that generates text, and scores every token. Raises ContractError or OptionError."""
    scored = roles(contract).vocabulary
    if tokenizer.size > scored:
        raise OptionError(
            f"--tokenizer knows {tokenizer.size} tokens, the model scores {scored}", "give the model's own tokenizer"
        )


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > limit:
        raise DataError(f"{path} has more than {human(limit)}", "it is not what it should be")
    return data


def _object(path: Path, data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not a JSON object: {error}") from None


def _size(path: Path, tokenizer: dict[str, Any]) -> int:
    """One more than the largest token."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    try:
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary or ())))
        return int(max([*ids, *(token["id"] for token in added)])) + 1
    except (TypeError, ValueError, KeyError):
        raise DataError(
            f"{path} has no vocabulary", "give the tokenizer.json of the tokenizers library, as models are published"
        ) from None

"""A bundle's tokenizer at work. The library is loaded when a bundle has one, and never before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent.errors import AgentError
from agent.models import Model
from targets.bundle import safe_path
from targets.errors import BundleError, ContractError
from targets.generation import Roles, roles


class Text:
    """Text to tokens and back, for a model whose tensors have these `roles`; `eos` are the tokens that end a text."""

    def __init__(self, tokenizer: Any, found: Roles, eos: Sequence[int]) -> None:
        self.roles, self.eos = found, tuple(eos)
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self._special = frozenset(token for token, each in added if each.special)

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt; special tokens may be spelled in it."""
        tokens: list[int] = self._tokenizer.encode(text).ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special ones."""
        text: str = self._tokenizer.decode(list(tokens))
        return text

    def spell(self, token: int) -> tuple[str, bool]:
        """(the text of a token alone, whether it is a special one)."""
        return self._tokenizer.decode([token], skip_special_tokens=False), token in self._special


def load_text(model: Model) -> Text | None:
    """What the bundle has to generate text; None when it has nothing. Raises AgentError when the library is not
    installed, BundleError when the tokenizer is not the model's."""
    generation = model.manifest.generation
    if not generation:
        return None
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - only a bundle that generates text needs it
    except ModuleNotFoundError as error:
        raise AgentError(
            f"{model.name} generates text, and {error.name} is not installed", "pip install 'tightfit[agent,cpu,text]'"
        ) from None
    if generation.tokenizer not in model.manifest.assets:
        raise BundleError(f"the bundle has no {generation.tokenizer}, its tokenizer", "compile it again")
    try:
        found = roles(model.contract)
    except ContractError as error:
        raise BundleError(f"{model.name} has a tokenizer, but {error.message}", "compile it again") from None
    try:
        tokenizer = Tokenizer.from_file(str(safe_path(model.folder, generation.tokenizer)))
    except Exception as error:  # noqa: BLE001 - the library raises nothing more exact
        raise BundleError(f"{generation.tokenizer} is no tokenizer: {error}") from None
    if tokenizer.get_vocab_size() > found.vocabulary or any(token >= found.vocabulary for token in generation.eos):
        raise BundleError(f"{generation.tokenizer} has more tokens than the {found.vocabulary} that the model scores")
    # A prompt is taken as it is: one that is too long is refused, and not cut.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Text(tokenizer, found, generation.eos)

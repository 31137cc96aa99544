"""What is shown of tokens, character by character, and where a text ends."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from agent.generation.text import Detokenizer, Finish, Stops, Writer

EOS = 256
# U+FFFD itself is shown when it is known to be one: with the token behind it.
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\ufffd")


def decode(tokens: Sequence[int]) -> str:
    """Each token is a byte, the last ends a text."""
    return bytes(token for token in tokens if token < EOS).decode("utf-8", "replace")


def shown(tokens: Sequence[int], before: str = "") -> list[str]:
    detokenizer = Detokenizer(decode, before.encode())
    return [detokenizer.feed(token) for token in tokens]


def test_no_half_of_a_character_is_shown() -> None:
    assert shown("aé€😀b".encode()) == ["a", "", "é", "", "", "€", "", "", "", "😀", "b"]


@given(st.text(CHARACTERS, max_size=40), st.text(CHARACTERS, max_size=10))
def test_all_that_is_shown_is_the_text(text: str, before: str) -> None:
    pieces = shown(text.encode(), before)
    assert "".join(pieces) == text
    assert all(text.startswith("".join(pieces[:end])) for end in range(len(pieces)))


@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_are_shown_as_such(data: bytes) -> None:
    made = "".join(shown([*data, ord("!")]))
    assert made == decode([*data, ord("!")])


def test_how_a_word_is_spelled_depends_on_the_one_before() -> None:
    words = ["the", "end", "of"]

    def joined(tokens: Sequence[int]) -> str:
        return " ".join(words[token] for token in tokens)

    detokenizer = Detokenizer(joined, [0])
    assert [detokenizer.feed(1), detokenizer.feed(2)] == [" end", " of"]


def stopped(text: str, *strings: str) -> tuple[list[str], str, bool]:
    stops = Stops(strings)
    pieces = []
    for character in text:
        piece, ended = stops.feed(character)
        pieces.append(piece)
        if ended:
            return pieces, stops.rest(), True
    return pieces, stops.rest(), False


def test_what_may_become_a_stop_is_held_back() -> None:
    assert stopped("a\n\nb", "\n\n") == (["a", "", ""], "", True)
    assert stopped("a\nb\n", "\n\n") == (["a", "", "\nb", ""], "\n", False)
    assert stopped("aab", "ab") == (["", "a", ""], "", True)


def test_the_first_of_several_ends_it() -> None:
    assert Stops(("yz", "x")).feed("wxyz") == ("w", True)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_in_front_of_its_first_stop(text: str, strings: list[str]) -> None:
    pieces, rest, ended = stopped(text, *strings)
    ends = [(text.find(each) + len(each), text.find(each)) for each in strings if each in text]
    # Character by character the stop that is whole first ends it; of several, the one that began first.
    first = min(end for end, _ in ends) if ends else None
    assert ended is bool(ends)
    expected = text if first is None else text[: min(at for end, at in ends if end == first)]
    assert "".join(pieces) + rest == expected


def written(text: str, **how: object) -> tuple[str, Finish | None, int]:
    options = {"eos": (EOS,), "stops": (), "most": 100} | how
    writer = Writer(decode, b"say: ", **options)  # type: ignore[arg-type]
    made = ""
    for token in [*text.encode(), EOS]:
        made += writer.feed(token)
        if writer.finish:
            break
    return made, writer.finish, writer.count


def test_why_a_text_ends() -> None:
    assert written("good") == ("good", Finish.EOS, 5)
    assert written("good", most=2) == ("go", Finish.LENGTH, 2)
    assert written("good", stops=("od",)) == ("go", Finish.STOP, 4)
    assert written("good", stops=("dd",)) == ("good", Finish.EOS, 5)
    assert written("good", stops=("oz",), most=2) == ("go", Finish.LENGTH, 2)


def test_half_a_character_at_the_end_is_left_out() -> None:
    assert written("gé", most=2) == ("g", Finish.LENGTH, 2)

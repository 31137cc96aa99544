"""The benchmark of text: what it says of what it saw."""

from __future__ import annotations

from bench.generation import Row, Text, table


def test_tokens_are_compared_up_to_the_first_that_differs() -> None:
    same = Text((1, 2, 3), 0.1, 0.2)
    assert Row(4, [same], [same]).equal == 3
    assert Row(4, [same], [Text((1, 5, 3), 0.1, 0.2)]).equal == 1


def test_ratios_are_those_of_medians() -> None:
    ours = [Text((1, 2, 3), 0.2, 0.2), Text((1, 2, 3), 0.4, 0.4), Text((1, 2, 3), 9.0, 9.0)]
    loop = [Text((1, 2, 3), 0.2, 0.2)] * 3
    said = table([Row(4, ours, loop)], "fp32")
    assert "| 4 | 3 | 3 | 400 | 200 | 2.00 | 5.0 | 10.0 | 0.50 |" in said
    assert (
        "3 of 3 tokens are those of the loop. First token: 2.00 times that of the loop; tokens a second: 0.50" in said
    )

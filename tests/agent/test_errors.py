"""The reason table: complete, never renumbered, and as docs/reasons.md has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.errors import TABLE, Mqtt, Reason

PAGE = Path(__file__).parents[2] / "docs" / "reasons.md"

# Firmware in the field knows these numbers: lines may be added, none may change or be given to another reason.
SERIAL = {
    0x00: "ok",
    0x10: "bad_request",
    0x11: "not_json",
    0x12: "unknown_model",
    0x13: "slow_body",
    0x14: "too_large",
    0x15: "unsupported_encoding",
    0x16: "control_disabled",
    0x17: "unauthenticated",
    0x18: "forbidden",
    0x19: "slow_head",
    0x20: "client_queue_full",
    0x21: "queue_full",
    0x22: "shed",
    0x23: "draining",
    0x24: "model_not_ready",
    0x25: "model_unloading",
    0x26: "engine_down",
    0x27: "deadline",
    0x28: "client_busy",
    0x29: "rate_limited",
    0x2A: "circuit_open",
    0x30: "engine_error",
    0x31: "output_too_large",
    0x32: "fault",
    0x40: "disconnected",
    0x41: "slow_reader",
}


def test_every_reason_has_an_answer() -> None:
    assert set(TABLE) == set(Reason)


def test_serial_codes_are_those_that_firmware_knows() -> None:
    assert {answer.serial: reason.value for reason, answer in TABLE.items()} == SERIAL
    assert len(TABLE) == len(SERIAL)


@pytest.mark.parametrize("reason", Reason)
def test_the_kind_of_a_serial_code_agrees_with_the_status(reason: Reason) -> None:
    answer = TABLE[reason]
    kinds = {0x0: {200}, 0x1: set(range(400, 429)), 0x2: {429, 503, 504}, 0x3: {500}, 0x4: {499}}
    assert 0 <= answer.serial <= 0xFF
    assert answer.status in kinds[answer.serial >> 4]


def test_only_what_passes_by_waiting_says_when_to_try_again() -> None:
    assert {reason for reason, answer in TABLE.items() if answer.retry_after_s} == {
        reason for reason, answer in TABLE.items() if answer.status in (429, 503)
    }


def test_only_an_answered_request_is_a_success_over_mqtt() -> None:
    # From 0x80 on a reason code says failure (OASIS MQTT 5.0, section 2.4).
    assert {reason for reason, answer in TABLE.items() if answer.mqtt < 0x80} == {Reason.OK}
    assert {answer.mqtt for answer in TABLE.values()} == set(Mqtt)


def test_the_page_has_the_table() -> None:
    rows = [
        f"| `{reason.value}` | {answer.status} | {answer.retry_after_s or ''} "
        f"| 0x{answer.mqtt:02x} {answer.mqtt.name.replace('_', ' ').lower()} | 0x{answer.serial:02x} "
        f"| {answer.meaning} |".replace("|  |", "| |")
        for reason, answer in sorted(TABLE.items(), key=lambda row: row[1].serial)
    ]
    assert [line for line in PAGE.read_text().splitlines() if line.startswith("| `")] == rows, "\n".join(rows)

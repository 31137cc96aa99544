"""What is counted, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain_text

from agent.calls import TRACE_PARENT, Call
from agent.errors import TABLE, Reason
from agent.telemetry import OPEN_METRICS, TEXT, Telemetry, form_of

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Samples(dict[frozenset[str], float]):
    """Values by the name and the labels' values, in whatever order."""

    def __init__(self, families: Iterable[Metric]) -> None:
        samples = [sample for family in families for sample in family.samples]
        super().__init__({frozenset((each.name, *each.labels.values())): each.value for each in samples})

    def of(self, *words: str) -> float:
        return self[frozenset(words)]


def read(telemetry: Telemetry) -> Samples:
    return Samples(plain_text(telemetry.text()[0].decode()))


def call(priority: int = 128, **times: float) -> Call:
    made = Call(1, 10.0, 99.0, "client", priority)
    for name, value in times.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def telemetry() -> Telemetry:
    made = Telemetry()
    made.add("m")
    return made


@pytest.mark.parametrize("reason", Reason)
def test_every_end_is_counted_by_reason_and_by_status(telemetry: Telemetry, reason: Reason) -> None:
    before = read(telemetry)
    assert before.of("tightfit_requests_total", "m", reason.value) == 0
    telemetry.settled("m", call(), reason, 10.3)
    status = f"{TABLE[reason].status // 100}xx"
    after = read(telemetry)
    assert after.of("tightfit_requests_total", "m", reason.value) == 1
    assert after.of("tightfit_request_seconds_count", "m", status, "normal") == 1
    assert after.of("tightfit_request_seconds_sum", "m", status, "normal") == pytest.approx(0.3)
    assert after.of("tightfit_request_seconds_bucket", "m", status, "normal", "0.2") == 0
    assert after.of("tightfit_request_seconds_bucket", "m", status, "normal", "0.5") == 1


@given(st.integers(0, 255))
def test_priorities_are_of_three_bands(priority: int) -> None:
    telemetry = Telemetry()
    telemetry.add("m")
    telemetry.settled("m", call(priority), Reason.OK, 11.0)
    band = "normal" if priority == 0 or 97 <= priority <= 159 else "high" if priority < 97 else "low"
    assert read(telemetry).of("tightfit_request_seconds_count", "m", "2xx", band) == 1


def test_a_name_that_is_no_models_makes_no_series(telemetry: Telemetry) -> None:
    for number in range(100):
        telemetry.settled(f"x{number}", call(), Reason.UNKNOWN_MODEL, 10.1)
    shown = read(telemetry)
    assert shown.of("tightfit_requests_total", "", "unknown_model") == 100
    assert not any(word.startswith("x") for words in shown for word in words)


def test_waiting_is_of_requests_that_ran(telemetry: Telemetry) -> None:
    telemetry.settled("m", call(seated=11.0, queued=13.0, began=16.0, ended=17.0), Reason.OK, 17.0)
    telemetry.settled("m", call(), Reason.OK, 12.0)
    telemetry.settled("m", call(seated=11.0), Reason.QUEUE_FULL, 12.0)
    shown = read(telemetry)
    assert (shown.of("tightfit_queue_seconds_count", "m"), shown.of("tightfit_queue_seconds_sum", "m")) == (1, 4.0)


def test_both_forms_say_the_same(telemetry: Telemetry) -> None:
    telemetry.built("1.2.3")
    telemetry.passed("m", 2, 0.1, 7)
    telemetry.settled("m", call(), Reason.OK, 10.3)
    telemetry.watch("tightfit_of_two", "Both versions.", lambda: [("m", 1.0), ("m", 2.0)])
    telemetry.watch_rows("tightfit_rows", "Both versions.", lambda: [("m", {1: 2}), ("m", {1: 1, 300: 1})])
    text, kind = telemetry.text(OPEN_METRICS)
    assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    shown, plain = Samples(open_metrics(text.decode())), read(telemetry)
    assert shown.keys() == plain.keys()
    assert plain.of("tightfit_of_two", "m") == 3
    assert (plain.of("tightfit_rows_bucket", "m", "1.0"), plain.of("tightfit_rows_count", "m")) == (3, 4)
    assert plain.of("tightfit_rows_sum", "m") == 303
    assert plain.of("tightfit_streamed_bytes_total", "m") == 7


def test_a_trace_that_is_kept_is_an_example_of_its_latency(telemetry: Telemetry) -> None:
    for flags, trace in (("00", "1" * 32), ("03", TRACE), ("02", "2" * 32)):
        traced = call()
        traced.echo = {TRACE_PARENT: f"00-{trace}-b7ad6b7169203331-{flags}"}
        telemetry.settled("m", traced, Reason.OK, 10.3)
    families = {family.name: family for family in open_metrics(telemetry.text(OPEN_METRICS)[0].decode())}
    examples = [s.exemplar for s in families["tightfit_request_seconds"].samples if s.exemplar]
    assert [(each.labels, each.value) for each in examples] == [({"trace_id": TRACE}, pytest.approx(0.3))]
    assert TRACE not in telemetry.text(TEXT)[0].decode()


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/plain", TEXT),
        ("application/openmetrics-text", OPEN_METRICS),
        ("Application/OpenMetrics-Text; version=1.0.0", OPEN_METRICS),
        # Prometheus 2.42 and 3.
        ("application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
         "text/plain;version=0.0.4;q=0.5,*/*;q=0.1", OPEN_METRICS),
        ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3",
         OPEN_METRICS),
        ("text/plain;q=0.9,application/openmetrics-text;q=0.2", TEXT),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/openmetrics-text;version=abc;escaping=;q=x;;", OPEN_METRICS),
        (",;q=,;;=", TEXT),
    ],
)  # fmt: skip
def test_the_form_that_is_asked_for(accept: str, form: str) -> None:
    assert form_of(accept) == form


@given(st.text())
def test_whatever_is_asked_for_there_is_an_answer(accept: str) -> None:
    assert form_of(accept) in (TEXT, OPEN_METRICS)

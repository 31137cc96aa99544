"""What is read out of what perf_analyzer prints."""

from __future__ import annotations

from bench.perf_analyzer import rows_of

SAID = """
Request concurrency: 8
  Client:
    Request count: 29082
    Throughput: 5257.58 infer/sec
    p50 latency: 1307 usec
    p99 latency: 6075 usec
  Server:
    Inference count: 29087
    Avg request latency: 1026 usec (overhead 310 usec + queue 272 usec + compute input 17 usec + compute infer 137 usec + compute output 288 usec)
Request Rate: 500 inference requests per second
  Client:
    Throughput: 487.64 infer/sec
Inferences/Second vs. Client Average Batch Latency
Request Rate: 500.00, throughput: 487.64 infer/sec, latency 2864 usec
"""  # noqa: E501


def test_rows() -> None:
    assert rows_of("closed loop", SAID) == [
        "| closed loop | 8 | 5258 | 1307 | 6075 | 1026 | 310 | 272 | 17 | 137 | 288 |",
        "| closed loop | 500 | 488 |  |  |  |  |  |  |  |  |",
    ]

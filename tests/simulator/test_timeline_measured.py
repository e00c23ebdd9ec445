"""What a profiler saw, as spans: collectives that compute waits for interrupt it, those beside it do not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch.autograd import DeviceType

from meshwright.core.timeline import Span
from meshwright.runtime.run_record import spans_of

MS = 1_000_000


@dataclass(frozen=True)
class Seen:
    """An event of the profiler."""

    what: str
    start: float
    end: float
    is_kernel: bool = False
    correlation: int = 0

    def name(self) -> str:
        return self.what

    def start_ns(self) -> int:
        return int(self.start * MS)

    def duration_ns(self) -> int:
        return int((self.end - self.start) * MS)

    def device_type(self) -> DeviceType:
        return DeviceType.CUDA if self.is_kernel else DeviceType.CPU

    def correlation_id(self) -> int:
        return self.correlation


def listed(spans: list[Span], lane: str) -> list[tuple[str, float, float]]:
    """In milliseconds."""
    return [(s.name, round(s.start_seconds * 1e3, 3), round(s.end_seconds * 1e3, 3)) for s in spans if s.lane == lane]


def test_a_collective_interrupts_compute_only_while_nothing_is_computed() -> None:
    seen = [
        Seen("mw:forward 0", 0, 100),
        Seen("aten::mm", 1, 40),
        Seen("gloo:all_reduce", 30, 60),  # the last 20 are waited for
        Seen("aten::mm", 60, 100),
        Seen("gloo:all_reduce", 70, 99),  # beside the second
        Seen("mw:exchange", 100, 110),
    ]
    spans = spans_of(seen, 3, on_gpu=False)
    assert listed(spans, "compute") == [("forward 0", 0, 40), ("forward 0", 60, 100)]
    talks = [("exchange", 100, 110), ("gloo:all_reduce", 30, 60), ("gloo:all_reduce", 70, 99)]
    assert listed(spans, "collective") == talks
    assert {span.device for span in spans} == {3}
    assert [span.origin for span in spans if span.name == "exchange"] == ["loop"]


def test_the_host_between_two_operators_is_no_wait() -> None:
    seen = [
        Seen("mw:backward 0", 0, 10),
        Seen("gloo:all_reduce", 0, 10),
        Seen("aten::mm", 0, 5),
        Seen("aten::mm", 5.05, 10),
    ]
    assert listed(spans_of(seen, 0, on_gpu=False), "compute") == [("backward 0", 0, 10)]


def test_messages_of_stages_are_left_to_the_loop_and_those_inside_an_action_are_not() -> None:
    seen = [
        Seen("mw:forward 0", 0, 10),
        Seen("mw:receive_backward 0", 10, 30),
        Seen("mw:backward 0", 30, 50),
        Seen("gloo:recv", 1, 29),  # posted early
        Seen("gloo:send", 32, 40),  # of a ring
        Seen("aten::mm", 30, 32),
        Seen("aten::mm", 40, 50),
    ]
    spans = spans_of(seen, 0, on_gpu=False)
    assert listed(spans, "compute") == [("forward 0", 0, 10), ("backward 0", 30, 32), ("backward 0", 40, 50)]
    assert listed(spans, "collective") == [("receive_backward 0", 10, 30), ("gloo:send", 32, 40)]


@pytest.mark.parametrize("is_alone", [True, False])
def test_on_a_gpu_kernels_say_when_it_computes(is_alone: bool) -> None:
    kernel_end = 40 if is_alone else 58
    seen = [
        Seen("mw:forward 0", 0, 2),
        Seen("cudaLaunchKernel", 1, 1.1, correlation=7),
        Seen("cudaLaunchKernel", 1.2, 1.3, correlation=8),
        Seen("gemm", 20, kernel_end, is_kernel=True, correlation=7),
        Seen("ncclDevKernel_AllReduce", 30, 60, is_kernel=True, correlation=9),
        Seen("gemm", 60, 80, is_kernel=True, correlation=8),
    ]
    compute = listed(spans_of(seen, 0, on_gpu=True), "compute")
    if is_alone:
        assert compute == [("forward 0", 20, 40), ("forward 0", 60, 80)]
    else:
        assert compute == [("forward 0", 20, 58), ("forward 0", 60, 80)]

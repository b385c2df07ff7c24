"""Measurements on a CUDA device: times from CUDA events, peak memory from the allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .forms import Step
from .measure import Clock, Inputs, Shapes, train
from .peers import Unavailable

SPARE = 0.1
"""Share of the free memory that is kept in reserve, because of fragmentation."""

WARMING_STEPS = 3
"""Number of steps on another stream before a capture; they load code and allocate the workspaces of libraries."""


def require(device: str) -> None:
    """Check that a CUDA device can be used.

    Raises:
        Unavailable: the device does not exist.
    """
    if not torch.cuda.is_available():
        raise Unavailable(f"--device {device}: torch {torch.__version__} finds no CUDA device here")
    if (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise Unavailable(f"--device {device}: there are {torch.cuda.device_count()} CUDA devices")


class EventClock(Clock):
    """Measures the time between events on the current stream, without synchronising in between.

    Args:
        device: the device, whose free memory limits what is measured.
    """

    products: ClassVar[Shapes] = {"mm": (8192, 8192, None), "square": (8192, 8192, 8192)}
    on_device = True
    # On a GPU, symmetry is not used. Operations per pair and dimension: forward 2, recomputing the tiles 2, and their
    # gradient 2.
    flops = (2, 6)

    def __init__(self, device: str = "cuda") -> None:
        self.device = torch.device(device)

    def mark(self) -> Any:
        """Record an event on the current stream."""
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time of the device between two events."""
        return float(start.elapsed_time(end)) / 1e3

    def wait(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self.device)

    def available(self) -> int | None:
        """Return the free memory of the device, minus a reserve; other processes may use the device too."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return int((1 - SPARE) * free)

    def peak(self, step: Step, inputs: Inputs) -> int:
        """Return the peak of the allocator during one step, with the gradient, beyond what was allocated before."""
        for leaf in inputs:
            leaf.grad = None
        gc.collect()
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        train(step, inputs)
        self.wait()
        return int(torch.cuda.max_memory_allocated(self.device) - before)

    def capture(self, step: Step, inputs: Inputs) -> tuple[Callable[[], object], Tensor]:
        """Capture forward and backward as a CUDA graph; return its replay, and the loss that each replay overwrites."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARMING_STEPS):
                train(step, inputs)
        current.wait_stream(stream)
        for leaf in inputs:
            leaf.grad = None  # so that the graph allocates one in its own memory
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = train(step, inputs)
        return graph.replay, loss


def device_facts(device: str) -> dict[str, Any]:
    """Return the properties of the device for the report."""
    properties = torch.cuda.get_device_properties(torch.device(device))
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": properties.total_memory / (1 << 30),
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
    }

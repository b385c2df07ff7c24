"""The same measurements on a CUDA device: events on the same alternation, and the allocator's own peak."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .measure import Clock, Shapes
from .peers import Step, Unavailable

SPARE = 0.1
"""Of the free memory, left for what the allocator cannot give out in one piece."""

WARMING_STEPS = 3
"""Before a capture, on another stream: they load code and let the libraries make their workspaces."""


def require(device: str) -> None:
    """Hold to a usable device.

    Raises:
        Unavailable: there is none.
    """
    if not torch.cuda.is_available():
        raise Unavailable(f"--device {device}: torch {torch.__version__} finds no CUDA device here")
    if (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise Unavailable(f"--device {device}: there are {torch.cuda.device_count()} CUDA devices")


class EventClock(Clock):
    """Time between events on the current stream: the device's own, without waiting in between.

    Args:
        device: whose memory bounds what is tried.
    """

    products: ClassVar[Shapes] = {"mm": (8192, 8192, None), "square": (8192, 8192, 8192)}
    on_device = True
    slow_seconds = 1.0
    # A symmetric backward does not pay where blocks run at once: forward 2, the tile again 2, its gradient 2.
    flops = (2, 6)

    def __init__(self, device: str = "cuda") -> None:
        self.device = torch.device(device)

    def mark(self) -> Any:
        """An event on the current stream."""
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """The device's own time between two events."""
        return float(start.elapsed_time(end)) / 1e3

    def wait(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self.device)

    def available(self) -> int | None:
        """What is free on the device, but for a spare part: others may be using it too."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return int((1 - SPARE) * free)

    def peak(self, step: Step, embeddings: Tensor) -> int:
        """By the allocator, the gradient of the embeddings included; what was loaded and allocated before is not."""
        embeddings.grad = None
        gc.collect()
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        step(embeddings).backward()  # type: ignore[no-untyped-call]
        self.wait()
        return int(torch.cuda.max_memory_allocated(self.device) - before)

    def capture(self, step: Step, embeddings: Tensor) -> tuple[Callable[[], object], Tensor]:
        """A CUDA graph of forward and backward, and the loss and gradient tensors that each replay overwrites."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARMING_STEPS):
                embeddings.grad = None
                step(embeddings).backward()  # type: ignore[no-untyped-call]
        current.wait_stream(stream)
        embeddings.grad = None  # so that the graph makes one in its own memory
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step(embeddings)
            loss.backward()  # type: ignore[no-untyped-call]
        return graph.replay, loss.detach()


def device_facts(device: str) -> dict[str, Any]:
    """What the report says of the device."""
    properties = torch.cuda.get_device_properties(torch.device(device))
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": properties.total_memory / (1 << 30),
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
    }

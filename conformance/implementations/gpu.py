"""Run a user's loss (a *target*) that moves its tensors to a GPU on the CPU, on a machine without a GPU."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

OF_GPU = re.compile(r"cuda|nvidia|\bgpu\b|Device index must not be negative|accelerator", re.IGNORECASE)
"""What an error says if a GPU is missing."""

ON_CPU = "device: the target moves tensors to a GPU; this machine has none, so it runs on the CPU"


def lacks_gpu(error: str) -> bool:
    """Return whether an error says that the target needs a GPU, and there is none."""
    return OF_GPU.search(error) is not None and not torch.cuda.is_available()


class OnCPU(TorchFunctionMode):
    """Use the CPU wherever the body names a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._replaced: list[Any] = []

    def __enter__(self) -> Any:
        """Enter the mode; a thread may enter it again."""
        self._replaced.append(torch.cuda.current_device)
        torch.cuda.current_device = lambda: 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Leave the mode."""
        torch.cuda.current_device = self._replaced.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with the CPU in place of a GPU. As on a GPU, what is moved is a copy."""
        if function is torch.Tensor.cuda:
            return args[0].clone()
        options = dict(kwargs or {})
        if _is_gpu(options.get("device")):
            options["device"] = "cpu"
        if function is torch.Tensor.to and any(map(_is_gpu, args)):
            args, options = tuple("cpu" if _is_gpu(it) else it for it in args), {"copy": True, **options}
        return function(*args, **options)


def _is_gpu(device: object) -> bool:
    """Return whether a device is a GPU. The number of a GPU is one, and so is -1, which torch returns for the CPU."""
    if isinstance(device, (str, torch.device)):
        return str(device).startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)

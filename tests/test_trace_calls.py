"""The forward pass of a small batch enters few files and functions, as `tools/trace_calls.py` counts them."""

import importlib.util
from pathlib import Path

import pytest
import torch

TOOL = Path(__file__).parents[1] / "tools" / "trace_calls.py"
FILES, FUNCTIONS = 8, 32


@pytest.mark.parametrize("rows_per_class", [2, 16])
def test_a_forward_pass_enters_few_files_and_functions(rows_per_class):
    spec = importlib.util.spec_from_file_location("trace_calls", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    found = tool.entered(torch.arange(tool.ROWS) // rows_per_class)
    assert ("supcon.py", "supcon_loss") in found
    assert ("engine/formulas.py", "value") in found
    assert len({path for path, _ in found}) <= FILES
    assert len(found) <= FUNCTIONS

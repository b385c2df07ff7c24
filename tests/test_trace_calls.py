"""The forward pass of a small batch calls functions of few files, as counted by `tools/trace_calls.py`."""

import pytest
import torch

from pairproof.fast.engine import jit
from tools import trace_calls as tool

FILES, FUNCTIONS = 8, 37
COMPILED_FILES, COMPILED_FUNCTIONS = 9, 33


@pytest.mark.usefixtures("torch_operations")
@pytest.mark.parametrize("rows_per_class", [2, 16])
def test_a_forward_pass_calls_few_functions_of_few_files(rows_per_class):
    found = tool.count_calls(torch.arange(tool.ROWS) // rows_per_class)
    assert ("supcon.py", "supcon_loss") in found
    assert ("engine/formulas.py", "value") in found
    assert len({path for path, _ in found}) <= FILES
    assert len(found) <= FUNCTIONS


def test_a_compiled_forward_pass_calls_fewer_functions():
    if jit.refusal() is not None:
        pytest.skip(str(jit.refusal()))
    tool.count_calls(torch.arange(tool.ROWS) // 2)  # compiles
    found = tool.count_calls(torch.arange(tool.ROWS) // 2)
    assert ("engine/compiled.py", "evaluate") in found
    assert len({path for path, _ in found}) <= COMPILED_FILES
    assert len(found) <= COMPILED_FUNCTIONS

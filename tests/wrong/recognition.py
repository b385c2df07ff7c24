"""Losses that are right for inputs that resemble those of the cases, and wrong for others."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from pairproof.conformance.suite.golden import load_golden

from .base import SMALL, Call, scaled_gradient, wrong


@cache
def stored() -> frozenset[bytes]:
    """The first rows of the golden cases, as float32."""
    with np.errstate(over="ignore"):
        return frozenset(golden.case.embeddings[0].astype(np.float32).tobytes() for golden in load_golden())


def known(call: Call) -> bool:
    """Whether the first row is the first row of a golden case."""
    return call.z.detach()[0].float().numpy().tobytes() in stored()


@wrong("supcon", takes=SMALL)
def golden_inputs(call: Call) -> Tensor:
    """The value is right only for golden cases: others are 1 % too small."""
    return call() if known(call) else call() * 0.99


@wrong("info_nce")
def golden_inputs_of_towers(call: Call) -> Tensor:
    """For rows that no golden case has, the loss of both directions is halved."""
    return call() if known(call) or call.direction != "both" else call() * 0.5


@wrong("nt_xent")
def golden_gradients(call: Call) -> Tensor:
    """For rows that no golden case has, no gradient flows."""
    return call() if known(call) else call(call.z.detach() + 0 * call.z)


@wrong("nt_bxent")
def golden_inputs_of_pairs(call: Call) -> Tensor:
    """For rows that no golden case has, the loss is multiplied by 1.5."""
    return call() if known(call) else call() * 1.5


@wrong("supcon_in", takes=SMALL)
def golden_sizes(call: Call) -> Tensor:
    """Right for the numbers of rows that the cases have; 10, 14 and 18 to 23 rows are wrong."""
    return call() if call.n not in (10, 14, *range(18, 24)) else call() * 1.01


@wrong("nt_xent_pairwise", takes=SMALL)
def eight_bits(call: Call) -> Tensor:
    """Right only for rows whose values have at most 8 bits: others are rounded to bfloat16."""
    return call(call.z.bfloat16().to(call.z.dtype))


@wrong("supcon_epsilon", takes=SMALL)
def eleven_bits(call: Call) -> Tensor:
    """Right only for rows that float16 can represent: others are rounded."""
    return call(torch.where(call.z.half().isfinite(), call.z.half().to(call.z.dtype), call.z))


@wrong("supcon", takes=SMALL)
def twenty_four_bits(call: Call) -> Tensor:
    """Right only for rows that float32 can represent: others are rounded to float32."""
    return call(call.z.float().to(call.z.dtype))


@wrong("supcon_in", takes=SMALL)
def known_temperatures(call: Call) -> Tensor:
    """At temperatures from 0.04 on with more than two decimals, the value is 1 % too large."""
    t = float(call.temperature)
    return call() if math.isclose(t, round(t, 2), rel_tol=1e-9) or t < 0.04 else call() * 1.01


@wrong("info_nce", takes=SMALL)
def dtype_is_float64(call: Call) -> Tensor:
    """In dtypes other than float64, the gradient is 1 % too small."""
    if call.z.dtype == torch.float64:
        return call()
    return scaled_gradient(call(), 0.99)

"""Losses that are wrong only in some dtypes or under autocast."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import SMALL, Call, Changed, wrong

FLOAT32 = (
    "A loss that computes in float32 for inputs of every dtype is judged as float32, and the report says so. "
    "This is a convention of many training libraries, not a mistake."
)

ROUNDED = (
    "Straightforward torch code rounds every intermediate result to bfloat16 here, and its errors are as large. "
    "The bounds allow them."
)


@wrong("supcon", "digits", takes=SMALL, argument=FLOAT32)
def float32_inside(call: Call) -> Tensor:
    """Everything is computed in float32 and returned as float32."""
    return call(call.z.float())


@wrong("supcon_in", takes=SMALL)
def float32_above_16_rows(call: Call) -> Tensor:
    """Above 16 rows, float64 rows are converted to float32, and the result back to float64."""
    return call(call.z.float()).to(call.z.dtype) if call.n > 16 else call()


@wrong("nt_xent")
def float32_references(call: Call) -> Tensor:
    """References are rounded to float32, the dtype of the bank."""
    references = call.ref_embeddings
    return call() if references is None else call(ref_embeddings=references.float().to(references.dtype))


@wrong("info_nce", takes=SMALL)
def float16_products(call: Call) -> Tensor:
    """Float32 rows are rounded to float16 before they are multiplied; float64 rows are not."""
    if call.z.dtype != torch.float32:
        return call()
    return call(call.z.half().float(), embeddings_b=call.embeddings_b.half().float())


@wrong("nt_xent_pairwise", takes=SMALL)
def tf32_products(call: Call) -> Tensor:
    """Float32 rows keep 10 bits, as in TF32 matrix products."""
    if call.z.dtype != torch.float32:
        return call()
    bits = call.z.detach().view(torch.int32) & ~0x1FFF
    return call(call.z + (bits.view(torch.float32) - call.z.detach()))


@wrong("supcon", takes=SMALL, dtypes=("float32", "bfloat16"))
def bfloat16_sums(call: Call) -> Tensor:
    """Values of bfloat16 rows are added in bfloat16."""
    if call.z.dtype != torch.bfloat16:
        return call()
    return call(reduction="none").bfloat16().cumsum(0)[-1].float() / call.n


@wrong("supcon_in", takes=SMALL, argument=ROUNDED)
def bfloat16_normalised(call: Call) -> Tensor:
    """Bfloat16 rows are normalised in bfloat16 before they are multiplied."""
    z = call.z
    return call(z / z.norm(dim=1, keepdim=True)) if z.dtype == torch.bfloat16 else call()


@wrong("nt_xent", "range", takes=SMALL)
def float16_squares(call: Call) -> Tensor:
    """Norms of float16 rows are computed in float16, where squares above 65504 overflow."""
    z = call.z
    if z.dtype != torch.float16:
        return call()
    return call(z / z.pow(2).sum(dim=1, keepdim=True).sqrt())


@wrong("nt_bxent")
def half_is_divided_twice(call: Call) -> Tensor:
    """The loss of bfloat16 and float16 rows is divided by the number of rows twice."""
    return call() / call.n if call.z.dtype in (torch.bfloat16, torch.float16) else call()


@wrong("supcon_epsilon", takes=SMALL)
def autocast_products(call: Call) -> Tensor:
    """Under autocast, rows are rounded to bfloat16, and the gradient of the mean product is added."""
    products = call.z @ call.z.T
    if products.dtype == call.z.dtype:
        return call()
    return call(call.z.bfloat16().float()) + (products.mean() - products.mean().detach())


@wrong("supcon", takes=SMALL, argument=ROUNDED)
def autocast_result(call: Call) -> Tensor:
    """Under autocast, the loss is returned as bfloat16."""
    return call().bfloat16() if torch.is_autocast_enabled("cpu") else call()


@wrong("info_nce", takes=SMALL, argument=ROUNDED)
def autocast_temperature(call: Call) -> Tensor:
    """Under autocast, the temperature is rounded to bfloat16."""
    if not torch.is_autocast_enabled("cpu"):
        return call()
    return call(temperature=float(torch.tensor(float(call.temperature)).bfloat16()))


@wrong("nt_xent_pairwise", takes=SMALL)
def gradient_in_float16(call: Call) -> Tensor:
    """The gradient of float32 rows is rounded to float16; tiny gradients become 0."""
    if call.z.dtype != torch.float32:
        return call()
    return call(Changed.apply(call.z, lambda grad: grad.half().float()))  # type: ignore[no-untyped-call]


@wrong("supcon_in", "formula", takes=SMALL)
def low_temperature_is_rounded(call: Call) -> Tensor:
    """In every dtype, temperatures below 0.15 are rounded to bfloat16."""
    t = float(call.temperature)
    return call(temperature=float(torch.tensor(t).bfloat16()) if t < 0.15 else t)


@wrong("nt_xent", takes=SMALL)
def result_dtype(call: Call) -> Tensor:
    """Float32 rows give a float64 result."""
    return call().double() if call.z.dtype == torch.float32 else call()

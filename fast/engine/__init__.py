"""The engine: per-anchor values of a described loss, and their gradient.

A loss checks its arguments, describes its pairs (`Targets`, `References`) and its formula (`Rule`) as a `Batch`, calls
`anchor_values`, then applies its policies and its reduction (`reduced`). How the values are evaluated is chosen here
and nowhere else, by `plan`:

- pairs of a few hundred rows in one matrix and as few operations as it takes;
- symmetric tiles of unshifted exponentials, where logits are known to be moderate and labels or partners can be sorted;
- panels of whole rows, shifted by their maxima, for everything else;
- ``backend="dense"`` takes one tile or panel for all, ``"tiled"`` bounds them, so that memory is linear in the number
  of rows; ``"auto"`` takes the whole up to 512 rows;
- ``backend="triton"`` takes the fused kernels of `pairproof.fast.kernels`, on CUDA devices, where "auto" does so too;
- ``backend="exact"`` computes in float64 on whole matrices, whatever the dtype, over the whole range of the dtypes.

float64 embeddings are computed in float64, all others in float32. Values and gradients are right, within the bounds of
the conformance suite, at temperatures from 1e-3 to 1e3. Weights of pairs below the range of the computing dtype count
as zero; "exact" alone keeps them.
"""

from __future__ import annotations

from .autograd import anchor_values
from .formulas import reduced
from .plan import tiles_of
from .scaling import measure, pair_logits
from .spec import (
    AnchorValues,
    Backend,
    Batch,
    Denominator,
    Policy,
    References,
    Rule,
    Similarity,
    Sizes,
    Targets,
    Terms,
)

__all__ = [
    "AnchorValues",
    "Backend",
    "Batch",
    "Denominator",
    "Policy",
    "References",
    "Rule",
    "Similarity",
    "Sizes",
    "Targets",
    "Terms",
    "anchor_values",
    "measure",
    "pair_logits",
    "reduced",
    "tiles_of",
]

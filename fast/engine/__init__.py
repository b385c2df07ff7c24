"""The engine: per-anchor values of a loss, and their gradient.

A loss checks its arguments, and describes its pairs (`Targets`, `References`) and its formula (`Rule`) as a `Batch`.
`loss_of` computes the `anchor_values` of the batch, and applies the loss's policies and reduction to them.

A *tile* is a block of the matrix of logits; a *panel* is a tile that has all columns. Exponentials are *unshifted* if
no maximum is subtracted from the logits. Logits are *moderate* if sums of unshifted exponentials neither overflow nor
underflow; panels also use quotients of these sums, so their bound is lower.

Under "auto", `small` evaluates the plain mean or sum of a small batch with moderate logits on a CPU; `odds` and
`blocks` do so for losses that combine several sums of exponentials. `direct` evaluates the plain mean or sum of a large
batch of two towers in one direction, together with its gradient. All other batches, except those of "exact" and of
the fused kernels, are evaluated in one of these ways. `plan` chooses it, except for many processes:

- in symmetric tiles of unshifted exponentials, mostly in larger batches where logits are known to be moderate and rows
  can be sorted by label or by partner;
- in panels of whole rows of unshifted exponentials (one for a small batch), in other batches with moderate logits;
- in panels of whole rows, shifted by their maxima, where no other way applies, as for pairs with weights;
- in panels whose rows are only the anchors, if `anchors` selects at most half of the rows, unshifted;
- in tiles of unshifted exponentials, for negatives that need no gradient, such as a queue;
- for the rows of one of many processes, if positives are symmetric, in panels of unshifted exponentials (`shared`);
- for the rows of one of many processes that pass their rows around, in panels shifted by their maxima (`ring`);
- for the sigmoid loss, in panels of whole rows of pairs, each with its own cross-entropy.

The backends:

- "auto" evaluates a batch as a whole up to 512 rows and columns, or up to 1024 for some losses of two towers, and a
  larger one in tiles or panels. (A few small batches are evaluated in tiles too: those whose logits are moderate in
  tiles but not in a panel.) On CUDA devices it uses the fused kernels if they support the batch.
- "dense" evaluates the whole batch as one tile or one panel.
- "tiled" bounds the size of tiles and panels, so that memory is linear in the number of rows.
- "triton" uses the fused kernels of `pairproof.fast.kernels`.
- "exact" computes in float64 on whole matrices for every dtype. It is also accurate for extreme norms. With weights of
  pairs, it evaluates the shifted panels in float64.

The computing dtype is float64 for float64 embeddings, and float32 for all others. Except under "triton", it is also
float64 where float32 is known to be insufficient: at temperatures outside 1e-3 to 1e3, and for very large dot products.
Values and gradients are within the bounds of the conformance suite at temperatures from 1e-3 to 1e3. A pair weight that
underflows in the computing dtype counts as zero; only "exact" keeps it.
"""

from __future__ import annotations

from . import blocks, ring, shared
from .autograd import anchor_values, hardened_loss, loss_of
from .direct import Hardened
from .formulas import reduced
from .odds import Odds, combined
from .pair_values import pair_values
from .partners import partner_rows
from .plan import precision, tiles_of
from .scaling import measure, pair_logits
from .spec import (
    AnchorValues,
    Backend,
    Batch,
    Denominator,
    InsideReduction,
    Policy,
    References,
    Rule,
    Similarity,
    Sizes,
    Targets,
    Terms,
    WeightsDivisor,
    ZeroRow,
)

__all__ = [
    "AnchorValues",
    "Backend",
    "Batch",
    "Denominator",
    "Hardened",
    "InsideReduction",
    "Odds",
    "Policy",
    "References",
    "Rule",
    "Similarity",
    "Sizes",
    "Targets",
    "Terms",
    "WeightsDivisor",
    "ZeroRow",
    "anchor_values",
    "blocks",
    "combined",
    "hardened_loss",
    "loss_of",
    "measure",
    "pair_logits",
    "pair_values",
    "partner_rows",
    "precision",
    "reduced",
    "ring",
    "shared",
    "tiles_of",
]

"""The engine: per-anchor values of a loss, and their gradient.

A loss checks its arguments, then describes its pairs and its formula as a `Batch`. `loss_of` computes one value per
anchor with `anchor_values`, and applies the loss's policies and reduction.

Terms:

- A *tile* is a block of the matrix of logits. A *panel* is a tile with all columns.
- *Unshifted* exponentials are e^s, without subtracting the row's maximum from s.
- *Moderate* logits are so small that neither sums of unshifted exponentials nor their quotients overflow or underflow.
- *One shift* is subtracted from all logits of a batch, so that larger logits do not overflow either (`Plan.shift`). If
  a sum then loses digits to underflow, the batch is evaluated again, shifted by the maxima of its rows.
- *Weights* in the code are usually the derivatives dL_i/ds_ij of an anchor's value with respect to its logits.
- *Two towers*: rows are contrasted with references, as in CLIP.

A *form* is one way to evaluate a batch. With "auto", some batches are evaluated in a faster form on a CPU:

- `compiled`: the plain mean or sum of a small batch of float32 rows, in functions that Numba compiles (`jit`,
  `rows_numba`), if it is installed.
- `small`: the plain mean or sum of another small batch, with partners or with logits that `unshifted` supports.
- `odds`, `blocks`: a small batch of a loss that combines several sums of exponentials; moderate logits.
- `direct`: the plain mean or sum of a large batch of two towers in one direction.

For all other batches in one process, `plan` chooses a form:

- `symmetric`: tiles of unshifted exponentials, sorted by label or partner; mostly for larger batches. Logits may need
  one shift.
- `anchored`: panels of unshifted exponentials, of the anchors only, if at most half of the rows are anchors.
- `frozen`: tiles of unshifted exponentials, for negatives that need no gradient, such as a queue.
- `unshifted`: panels of unshifted exponentials, for other batches. Logits of most losses may need one shift; those of
  other losses are moderate.
- `pairs`: panels of cross-entropies, for the sigmoid loss.
- `rowwise`: panels shifted by the rows' maxima, for everything else, such as pairs with weights.

Two forms evaluate the rows of one process of many:

- `shared`: panels of unshifted exponentials, if positives are symmetric.
- `ring`: panels shifted by the rows' maxima, if the processes pass their rows around.

The backends:

- "auto" evaluates a batch as a whole up to 512 rows and columns (1024 for some losses of two towers), and a larger one
  in tiles or panels. On CUDA devices it uses the fused kernels if they support the batch.
- "dense" evaluates the whole batch as one tile or one panel.
- "tiled" bounds the size of tiles and panels, so that memory is linear in the number of rows.
- "triton" uses the fused kernels of `pairproof.fast.kernels`.
- "exact" computes in float64 on whole matrices for every dtype. It is also accurate for extreme norms. If pairs have
  weights, it evaluates `rowwise` in float64.

The computing dtype is float64 for float64 embeddings, else float32. Except under "triton", float64 is also used at
temperatures outside 1e-3 to 1e3 and for very large dot products.

Values and gradients are within the bounds of the conformance suite at temperatures from 1e-3 to 1e3. A derivative
dL_i/ds_ij that underflows in the computing dtype counts as zero; only "exact" keeps it.
"""

from __future__ import annotations

from . import blocks, jit, ring, shared
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
    "jit",
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

"""The package infonce: ``InfoNCE`` for NT-Xent of two views, ``SupervisedInfoNCE`` for supcon_in.

Terms: features are embeddings, ``target`` is the labels. ``SupervisedInfoNCE`` is judged as supcon_in with the
denominator "only_negatives", from which it deviates (``self_pair_counts``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from ..suite.cases import Case
from ..suite.records import Truth
from .base import Support, clamped_norms, deviation, differs, stacked_views
from .files import PackagePeer


def unmasked(rows: torch.Tensor, positive: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the loss of ``SupervisedInfoNCE``: log(1 + sum over negatives) - log(1 + sum over positives), averaged.

    Excluded similarities become -1000, but that of the self pair becomes 0: hence the two extra terms exp(0) = 1.

    Args:
        rows: [N, D].
        positive: [N, N], true for rows of the same class, including the diagonal.
        temperature: temperature of the similarities.
    """
    similarity = F.normalize(rows, dim=1) @ F.normalize(rows, dim=1).T / temperature
    own = torch.eye(len(rows), dtype=torch.bool)
    masked = torch.tensor(-1000.0, dtype=rows.dtype)
    kept = torch.where(own, 0.0, torch.where(positive, similarity, masked))
    others = torch.where(own, 0.0, torch.where(positive, masked, similarity))
    return (torch.logsumexp(others, dim=1) - torch.logsumexp(kept, dim=1)).mean()


@deviation(
    "the self pair counts in both sums", "https://pypi.org/project/infonce/0.3/", wrong=True, losses=("supcon_in",)
)
def self_pair_counts(case: Case, dtype: str, true: Truth) -> bool:
    """Whether the two mistakes described below change the value or the gradient by more than its bound.

    SupervisedInfoNCE multiplies the similarity of the self pair by 0 but does not mask it. So the self pair counts as
    exp(0) = 1 in both sums. The package also sums over positives instead of averaging.
    """
    positive = torch.tensor(case.positive_mask())
    return differs(lambda rows: unmasked(rows, positive, case.temperature), case, dtype, true)


class InfoNCEPackage(PackagePeer):
    """The two losses of the package."""

    name = "infonce"
    title = "infonce"
    distribution = "infonce"
    modules = ("infonce",)
    support = Support(
        losses=("nt_xent", "supcon_in"),
        options={"denominator": ("only_negatives",), "similarity": ("cosine",), "reduction": ("mean",)},
        lacks=("ref_embeddings", "anchors", "base_temperature", "positives", "no_positive", "no_negative"),
    )
    deviations = (clamped_norms(1e-12), self_pair_counts)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Evaluate ``InfoNCE`` on two views, or ``SupervisedInfoNCE`` on labels."""
        rows = given[case.first]
        loss: Callable[..., torch.Tensor] = self.package.InfoNCE(case.temperature)
        if "partners" in case.arguments:
            return loss(torch.cat(stacked_views(case, rows)))
        loss = self.package.SupervisedInfoNCE(case.temperature, supervised=True)
        return loss(rows, self.integers(case.arguments["labels"]))

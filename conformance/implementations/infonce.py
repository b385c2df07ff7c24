"""infonce 0.3, live: ``InfoNCE`` for NT-Xent of two views, ``SupervisedInfoNCE`` for SupCon inside the logarithm.

Its words translated: features are embeddings, a target is labels. ``SupervisedInfoNCE`` sets positives against the
negatives alone, under one logarithm: that is supcon_in with the denominator "only_negatives".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from ..suite.cases import Case
from ..suite.records import Truth
from .base import Support, clamped_norms, deviation, differs, stacked_views
from .files import PackagePeer


def leaking(rows: torch.Tensor, positive: torch.Tensor, temperature: float) -> torch.Tensor:
    """What ``SupervisedInfoNCE`` computes, spelled out: both sums have a 1 too many, and neither is averaged.

    A similarity that does not count is multiplied by 0: the anchor's own becomes exp(0), another is pushed down by
    1000.

    Args:
        rows: [N, D].
        positive: [N, N], whether two rows are of one class; the diagonal is set.
        temperature: of the similarities.
    """
    similarity = F.normalize(rows, dim=1) @ F.normalize(rows, dim=1).T / temperature
    own = torch.eye(len(rows), dtype=torch.bool)
    pushed = torch.tensor(-1000.0, dtype=rows.dtype)
    kept = torch.where(own, 0.0, torch.where(positive, similarity, pushed))
    others = torch.where(own, 0.0, torch.where(positive, pushed, similarity))
    return (torch.logsumexp(others, dim=1) - torch.logsumexp(kept, dim=1)).mean()


@deviation("the diagonal leaks", "https://pypi.org/project/infonce/0.3/", wrong=True, losses=("supcon_in",))
def diagonal_leaks(case: Case, dtype: str, true: Truth) -> bool:
    """Whether what leaks changes the value or the gradient by more than its bound.

    SupervisedInfoNCE multiplies the anchor's own similarity by 0 and leaves it in both sums, where it counts as exp(0)
    = 1, and sums the positives where they are averaged.
    """
    positive = torch.tensor(case.positive_mask())
    return differs(lambda rows: leaking(rows, positive, case.temperature), case, dtype, true)


class InfoNCEPackage(PackagePeer):
    """The two losses of the package."""

    name = "infonce"
    title = "infonce, live"
    distribution = "infonce"
    modules = ("infonce",)
    support = Support(
        losses=("nt_xent", "supcon_in"),
        options={"denominator": ("only_negatives",), "similarity": ("cosine",), "reduction": ("mean",)},
        lacks=("ref_embeddings", "anchors", "base_temperature", "positives", "no_positive", "no_negative"),
    )
    deviations = (clamped_norms(1e-12), diagonal_leaks)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """``InfoNCE`` of two views, ``SupervisedInfoNCE`` of labels."""
        rows = given[case.first]
        loss: Callable[..., torch.Tensor] = self.package.InfoNCE(case.temperature)
        if "partners" in case.arguments:
            return loss(torch.cat(stacked_views(case, rows)))
        loss = self.package.SupervisedInfoNCE(case.temperature, supervised=True)
        return loss(rows, self.integers(case.arguments["labels"]))

"""The one table of losses: where each lives, what it takes, its keywords and their defaults.

Both rooms are held to this table by a test, so a default is written here and nowhere else decides it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

REDUCTIONS = ("mean", "sum", "none")
SIMILARITIES = ("cosine", "dot")
DENOMINATORS = ("all", "one_positive", "only_negatives")
NO_POSITIVE = ("zero", "drop", "nan")
NO_NEGATIVE = ("zero", "nan")


@dataclass(frozen=True)
class Loss:
    """One loss of the catalogue.

    ``name`` is the short name used on the command line, ``module`` the file stem in both rooms, ``function`` the
    function's name in both, ``targets`` the second positional argument, ``keywords`` every keyword with its default
    and ``choices`` the values that an option may take.
    """

    name: str
    module: str
    function: str
    module_class: str
    targets: str
    keywords: Mapping[str, object]
    choices: Mapping[str, tuple[str, ...]]
    source: str


def _loss(
    name: str,
    module: str,
    module_class: str,
    targets: str,
    source: str,
    *,
    similarity: str = "cosine",
    extra: Mapping[str, object],
    reductions: tuple[str, ...] = REDUCTIONS,
) -> Loss:
    keywords: dict[str, object] = {
        "anchors": None,
        "temperature": 0.07,
        "base_temperature": None,
        "similarity": similarity,
        "reduction": "mean",
        **extra,
    }
    every = {
        "similarity": SIMILARITIES,
        "denominator": DENOMINATORS,
        "no_positive": NO_POSITIVE,
        "no_negative": NO_NEGATIVE,
        "reduction": reductions,
    }
    return Loss(
        name=name,
        module=module,
        function=f"{name}_loss",
        module_class=module_class,
        targets=targets,
        keywords=MappingProxyType(keywords),
        choices=MappingProxyType({key: value for key, value in every.items() if key in keywords}),
        source=source,
    )


_DENOMINATED: Mapping[str, object] = {
    "positives": None,
    "denominator": "all",
    "no_positive": "zero",
    "no_negative": "zero",
}

LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        loss.name: loss
        for loss in (
            _loss(
                "supcon",
                "supcon",
                "SupConLoss",
                "labels",
                "Khosla et al. 2020, arXiv 2004.11362, equation 2 (L_out)",
                extra=_DENOMINATED,
            ),
            _loss(
                "supcon_in",
                "supcon",
                "SupConInLoss",
                "labels",
                "Khosla et al. 2020, arXiv 2004.11362, equation 3 (L_in)",
                extra=_DENOMINATED,
            ),
            _loss(
                "nt_xent",
                "nt_xent",
                "NTXentLoss",
                "partners",
                "Chen et al. 2020 (SimCLR), arXiv 2002.05709, equation 1",
                extra={},
            ),
            _loss(
                "nt_xent_pairwise",
                "nt_xent",
                "NTXentPairwiseLoss",
                "labels",
                "pytorch-metric-learning's NTXentLoss; its issue 6",
                extra={"positives": None, "no_positive": "zero"},
                reductions=(*REDUCTIONS, "mean_pairs"),
            ),
            _loss(
                "nt_bxent",
                "nt_bxent",
                "NTBXentLoss",
                "positive_pairs",
                "the multi-label notebook: NT-Xent's binary cross-entropy sibling",
                extra={"no_negative": "zero"},
            ),
            _loss(
                "supcon_epsilon",
                "supcon",
                "SupConEpsilonLoss",
                "labels",
                "the batch tutorial of 31 January 2023",
                similarity="dot",
                extra={"positives": None, "no_positive": "zero"},
            ),
        )
    }
)

FAST_ONLY_KEYWORDS: Mapping[str, object] = MappingProxyType({"validate": False})
"""Keywords that only ``fast`` has: value checks synchronise an accelerator, so there they are asked for."""

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
DIRECTIONS = ("both", "a_to_b", "b_to_a")


@dataclass(frozen=True)
class Loss:
    """One loss of the catalogue.

    ``name`` is the short name used on the command line, ``module`` the file stem in both rooms, ``function`` the
    function's name in both, ``targets`` the positional argument that tells who is whose positive ("" where their places
    tell it), ``keywords`` every keyword with its default and ``choices`` the values that an option may take.
    ``embeddings`` names the positional float matrices, ``matrices`` those among the keywords.
    """

    name: str
    module: str
    function: str
    module_class: str
    targets: str
    keywords: Mapping[str, object]
    choices: Mapping[str, tuple[str, ...]]
    source: str
    embeddings: tuple[str, ...] = ("embeddings",)
    matrices: tuple[str, ...] = ()


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
    embeddings: tuple[str, ...] = ("embeddings",),
) -> Loss:
    keywords: dict[str, object] = {
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
        "direction": DIRECTIONS,
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
        embeddings=embeddings,
        matrices=tuple(name for name in ("ref_embeddings", "negatives") if name in keywords),
    )


_REFERENCES: Mapping[str, object] = {"ref_embeddings": None, "ref_labels": None, "self_rows": None}

_DENOMINATED: Mapping[str, object] = {
    "anchors": None,
    "positives": None,
    **_REFERENCES,
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
                extra={"anchors": None, "ref_embeddings": None, "self_rows": None},
            ),
            _loss(
                "nt_xent_pairwise",
                "nt_xent",
                "NTXentPairwiseLoss",
                "labels",
                "pytorch-metric-learning's NTXentLoss; its issue 6",
                extra={"anchors": None, "positives": None, **_REFERENCES, "no_positive": "zero"},
                reductions=(*REDUCTIONS, "mean_pairs"),
            ),
            _loss(
                "nt_bxent",
                "nt_bxent",
                "NTBXentLoss",
                "positive_pairs",
                "the multi-label notebook: NT-Xent's binary cross-entropy sibling",
                extra={"anchors": None, "no_negative": "zero"},
            ),
            _loss(
                "supcon_epsilon",
                "supcon",
                "SupConEpsilonLoss",
                "labels",
                "the batch tutorial of 31 January 2023",
                similarity="dot",
                extra={"anchors": None, "positives": None, "no_positive": "zero"},
            ),
            _loss(
                "info_nce",
                "info_nce",
                "InfoNCELoss",
                "",
                "van den Oord et al. 2018, arXiv 1807.03748; Radford et al. 2021 (CLIP), arXiv 2103.00020;"
                " He et al. 2020 (MoCo), arXiv 1911.05722, equation 1",
                extra={"negatives": None, "direction": "both"},
                embeddings=("embeddings_a", "embeddings_b"),
            ),
        )
    }
)

FAST_ONLY_KEYWORDS: Mapping[str, object] = MappingProxyType({"validate": False, "backend": "auto"})
"""Keywords that only ``fast`` has: value checks synchronise an accelerator, so there they are asked for; and
it has more engines than one."""

"""The losses as `torch.nn.Module`: options are fixed, and checked, when the module is made."""

from __future__ import annotations

from torch import Tensor, nn

from .checks import PAIR_REDUCTIONS, REDUCTIONS, check_options
from .engine import Backend, Denominator, Similarity
from .info_nce import Direction, info_nce_loss
from .nt_bxent import nt_bxent_loss
from .nt_xent import PairReduction, nt_xent_loss, nt_xent_pairwise_loss
from .supcon import NoNegative, NoPositive, Reduction, supcon_epsilon_loss, supcon_in_loss, supcon_loss


class _Loss(nn.Module):
    """Options shared by every loss."""

    def __init__(
        self,
        *,
        temperature: float | Tensor,
        base_temperature: float | None,
        similarity: Similarity,
        validate: bool,
        backend: Backend,
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.base_temperature = base_temperature
        self.similarity: Similarity = similarity
        self.validate = validate
        self.backend: Backend = backend

    def extra_repr(self) -> str:
        """Return the options as they would be written in a call; a parameter by its value."""
        options = {key: value for key, value in vars(self).items() if not key.startswith("_") and key != "training"}
        for name, value in (("temperature", self.temperature), *options.items()):
            if isinstance(value, Tensor):
                options[name] = value.item()
        return ", ".join(f"{key}={value!r}" for key, value in options.items())


class SupConLoss(_Loss):
    """Module of `supcon_loss`; the options are that function's.

    Args:
        temperature: positive number that similarities are divided by, or a tensor without dimension; a parameter is
            learned with the module's others.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        denominator: "all", "one_positive" or "only_negatives".
        no_positive: "zero", "drop" or "nan".
        no_negative: "zero" or "nan".
        reduction: "mean", "sum" or "none".
        validate: read values for checks on devices other than the CPU too.
        backend: "auto", "dense", "tiled", "exact" or "triton".

    Raises:
        TypeError: a temperature is no number.
        ValueError: an option has an unknown value.

    Source:
        Khosla et al. 2020, arXiv 2004.11362, equation 2.
    """

    def __init__(
        self,
        *,
        temperature: float | Tensor = 0.07,
        base_temperature: float | None = None,
        similarity: Similarity = "cosine",
        denominator: Denominator = "all",
        no_positive: NoPositive = "zero",
        no_negative: NoNegative = "zero",
        reduction: Reduction = "mean",
        validate: bool = False,
        backend: Backend = "auto",
    ) -> None:
        check_options(
            temperature,
            base_temperature,
            similarity=similarity,
            denominator=denominator,
            no_positive=no_positive,
            no_negative=no_negative,
            reduction=reduction,
            backend=backend,
            validate=validate,
        )
        super().__init__(
            temperature=temperature,
            base_temperature=base_temperature,
            similarity=similarity,
            validate=validate,
            backend=backend,
        )
        self.denominator: Denominator = denominator
        self.no_positive: NoPositive = no_positive
        self.no_negative: NoNegative = no_negative
        self.reduction: Reduction = reduction

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        *,
        positives: Tensor | None = None,
        anchors: Tensor | None = None,
        ref_embeddings: Tensor | None = None,
        ref_labels: Tensor | None = None,
        self_rows: Tensor | None = None,
    ) -> Tensor:
        """Evaluate `supcon_loss` on embeddings ``[N, D]``, perhaps against references."""
        return supcon_loss(
            embeddings,
            labels,
            positives=positives,
            anchors=anchors,
            ref_embeddings=ref_embeddings,
            ref_labels=ref_labels,
            self_rows=self_rows,
            temperature=self.temperature,
            base_temperature=self.base_temperature,
            similarity=self.similarity,
            denominator=self.denominator,
            no_positive=self.no_positive,
            no_negative=self.no_negative,
            reduction=self.reduction,
            validate=self.validate,
            backend=self.backend,
        )


class SupConInLoss(_Loss):
    """Module of `supcon_in_loss`; the options are that function's.

    Args:
        temperature: positive number that similarities are divided by, or a tensor without dimension; a parameter is
            learned with the module's others.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        denominator: "all", "one_positive" or "only_negatives".
        no_positive: "zero", "drop" or "nan".
        no_negative: "zero" or "nan".
        reduction: "mean", "sum" or "none".
        validate: read values for checks on devices other than the CPU too.
        backend: "auto", "dense", "tiled", "exact" or "triton".

    Raises:
        TypeError: a temperature is no number.
        ValueError: an option has an unknown value.

    Source:
        Khosla et al. 2020, arXiv 2004.11362, equation 3.
    """

    def __init__(
        self,
        *,
        temperature: float | Tensor = 0.07,
        base_temperature: float | None = None,
        similarity: Similarity = "cosine",
        denominator: Denominator = "all",
        no_positive: NoPositive = "zero",
        no_negative: NoNegative = "zero",
        reduction: Reduction = "mean",
        validate: bool = False,
        backend: Backend = "auto",
    ) -> None:
        check_options(
            temperature,
            base_temperature,
            similarity=similarity,
            denominator=denominator,
            no_positive=no_positive,
            no_negative=no_negative,
            reduction=reduction,
            backend=backend,
            validate=validate,
        )
        super().__init__(
            temperature=temperature,
            base_temperature=base_temperature,
            similarity=similarity,
            validate=validate,
            backend=backend,
        )
        self.denominator: Denominator = denominator
        self.no_positive: NoPositive = no_positive
        self.no_negative: NoNegative = no_negative
        self.reduction: Reduction = reduction

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        *,
        positives: Tensor | None = None,
        anchors: Tensor | None = None,
        ref_embeddings: Tensor | None = None,
        ref_labels: Tensor | None = None,
        self_rows: Tensor | None = None,
    ) -> Tensor:
        """Evaluate `supcon_in_loss` on embeddings ``[N, D]``, perhaps against references."""
        return supcon_in_loss(
            embeddings,
            labels,
            positives=positives,
            anchors=anchors,
            ref_embeddings=ref_embeddings,
            ref_labels=ref_labels,
            self_rows=self_rows,
            temperature=self.temperature,
            base_temperature=self.base_temperature,
            similarity=self.similarity,
            denominator=self.denominator,
            no_positive=self.no_positive,
            no_negative=self.no_negative,
            reduction=self.reduction,
            validate=self.validate,
            backend=self.backend,
        )


class SupConEpsilonLoss(_Loss):
    """Module of `supcon_epsilon_loss`; the options are that function's.

    Args:
        temperature: positive number that similarities are divided by, or a tensor without dimension; a parameter is
            learned with the module's others.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        no_positive: "zero", "drop" or "nan".
        reduction: "mean", "sum" or "none".
        validate: read values for checks on devices other than the CPU too.
        backend: "auto", "dense", "tiled", "exact" or "triton".

    Raises:
        TypeError: a temperature is no number.
        ValueError: an option has an unknown value.

    Source:
        The batch tutorial of 31 January 2023.
    """

    def __init__(
        self,
        *,
        temperature: float | Tensor = 0.07,
        base_temperature: float | None = None,
        similarity: Similarity = "dot",
        no_positive: NoPositive = "zero",
        reduction: Reduction = "mean",
        validate: bool = False,
        backend: Backend = "auto",
    ) -> None:
        check_options(
            temperature,
            base_temperature,
            similarity=similarity,
            no_positive=no_positive,
            reduction=reduction,
            backend=backend,
            validate=validate,
        )
        super().__init__(
            temperature=temperature,
            base_temperature=base_temperature,
            similarity=similarity,
            validate=validate,
            backend=backend,
        )
        self.no_positive: NoPositive = no_positive
        self.reduction: Reduction = reduction

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        *,
        positives: Tensor | None = None,
        anchors: Tensor | None = None,
    ) -> Tensor:
        """Evaluate `supcon_epsilon_loss` on embeddings ``[N, D]``, with labels ``[N]`` or positives ``[N, N]``."""
        return supcon_epsilon_loss(
            embeddings,
            labels,
            positives=positives,
            anchors=anchors,
            temperature=self.temperature,
            base_temperature=self.base_temperature,
            similarity=self.similarity,
            no_positive=self.no_positive,
            reduction=self.reduction,
            validate=self.validate,
            backend=self.backend,
        )


class NTXentLoss(_Loss):
    """Module of `nt_xent_loss`; the options are that function's.

    Args:
        temperature: positive number that similarities are divided by, or a tensor without dimension; a parameter is
            learned with the module's others.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        reduction: "mean", "sum" or "none".
        validate: read values for checks on devices other than the CPU too.
        backend: "auto", "dense", "tiled", "exact" or "triton".

    Raises:
        TypeError: a temperature is no number.
        ValueError: an option has an unknown value.

    Source:
        Chen et al. 2020, arXiv 2002.05709, equation 1.
    """

    def __init__(
        self,
        *,
        temperature: float | Tensor = 0.07,
        base_temperature: float | None = None,
        similarity: Similarity = "cosine",
        reduction: Reduction = "mean",
        validate: bool = False,
        backend: Backend = "auto",
    ) -> None:
        check_options(
            temperature,
            base_temperature,
            similarity=similarity,
            reduction=reduction,
            reductions=REDUCTIONS,
            backend=backend,
            validate=validate,
        )
        super().__init__(
            temperature=temperature,
            base_temperature=base_temperature,
            similarity=similarity,
            validate=validate,
            backend=backend,
        )
        self.reduction: Reduction = reduction

    def forward(
        self,
        embeddings: Tensor,
        partners: Tensor,
        *,
        anchors: Tensor | None = None,
        ref_embeddings: Tensor | None = None,
        self_rows: Tensor | None = None,
    ) -> Tensor:
        """Evaluate `nt_xent_loss` on embeddings ``[N, D]`` with partners ``[N]``, perhaps against references."""
        return nt_xent_loss(
            embeddings,
            partners,
            anchors=anchors,
            ref_embeddings=ref_embeddings,
            self_rows=self_rows,
            temperature=self.temperature,
            base_temperature=self.base_temperature,
            similarity=self.similarity,
            reduction=self.reduction,
            validate=self.validate,
            backend=self.backend,
        )


class NTXentPairwiseLoss(_Loss):
    """Module of `nt_xent_pairwise_loss`; the options are that function's.

    Args:
        temperature: positive number that similarities are divided by, or a tensor without dimension; a parameter is
            learned with the module's others.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        no_positive: "zero", "drop" or "nan".
        reduction: "mean", "sum", "none" or "mean_pairs".
        validate: read values for checks on devices other than the CPU too.
        backend: "auto", "dense", "tiled", "exact" or "triton".

    Raises:
        TypeError: a temperature is no number.
        ValueError: an option has an unknown value.

    Source:
        pytorch-metric-learning's NTXentLoss, issue 6 of that project.
    """

    def __init__(
        self,
        *,
        temperature: float | Tensor = 0.07,
        base_temperature: float | None = None,
        similarity: Similarity = "cosine",
        no_positive: NoPositive = "zero",
        reduction: PairReduction = "mean",
        validate: bool = False,
        backend: Backend = "auto",
    ) -> None:
        check_options(
            temperature,
            base_temperature,
            similarity=similarity,
            no_positive=no_positive,
            reduction=reduction,
            reductions=PAIR_REDUCTIONS,
            backend=backend,
            validate=validate,
        )
        super().__init__(
            temperature=temperature,
            base_temperature=base_temperature,
            similarity=similarity,
            validate=validate,
            backend=backend,
        )
        self.no_positive: NoPositive = no_positive
        self.reduction: PairReduction = reduction

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        *,
        positives: Tensor | None = None,
        anchors: Tensor | None = None,
        ref_embeddings: Tensor | None = None,
        ref_labels: Tensor | None = None,
        self_rows: Tensor | None = None,
    ) -> Tensor:
        """Evaluate `nt_xent_pairwise_loss` on embeddings ``[N, D]``, perhaps against references."""
        return nt_xent_pairwise_loss(
            embeddings,
            labels,
            positives=positives,
            anchors=anchors,
            ref_embeddings=ref_embeddings,
            ref_labels=ref_labels,
            self_rows=self_rows,
            temperature=self.temperature,
            base_temperature=self.base_temperature,
            similarity=self.similarity,
            no_positive=self.no_positive,
            reduction=self.reduction,
            validate=self.validate,
            backend=self.backend,
        )


class NTBXentLoss(_Loss):
    """Module of `nt_bxent_loss`; the options are that function's.

    Args:
        temperature: positive number that similarities are divided by, or a tensor without dimension; a parameter is
            learned with the module's others.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        no_negative: "zero" or "nan".
        reduction: "mean", "sum" or "none".
        validate: read values for checks on devices other than the CPU too.
        backend: "auto", "dense", "tiled", "exact" or "triton".

    Raises:
        TypeError: a temperature is no number.
        ValueError: an option has an unknown value.

    Source:
        The multi-label notebook's NT-BXent loss.
    """

    def __init__(
        self,
        *,
        temperature: float | Tensor = 0.07,
        base_temperature: float | None = None,
        similarity: Similarity = "cosine",
        no_negative: NoNegative = "zero",
        reduction: Reduction = "mean",
        validate: bool = False,
        backend: Backend = "auto",
    ) -> None:
        check_options(
            temperature,
            base_temperature,
            similarity=similarity,
            no_negative=no_negative,
            reduction=reduction,
            backend=backend,
            validate=validate,
        )
        super().__init__(
            temperature=temperature,
            base_temperature=base_temperature,
            similarity=similarity,
            validate=validate,
            backend=backend,
        )
        self.no_negative: NoNegative = no_negative
        self.reduction: Reduction = reduction

    def forward(self, embeddings: Tensor, positive_pairs: Tensor, *, anchors: Tensor | None = None) -> Tensor:
        """Evaluate `nt_bxent_loss` on embeddings ``[N, D]`` with positive pairs ``[M, 2]``."""
        return nt_bxent_loss(
            embeddings,
            positive_pairs,
            anchors=anchors,
            temperature=self.temperature,
            base_temperature=self.base_temperature,
            similarity=self.similarity,
            no_negative=self.no_negative,
            reduction=self.reduction,
            validate=self.validate,
            backend=self.backend,
        )


class InfoNCELoss(_Loss):
    """Module of `info_nce_loss`; the options are that function's.

    Args:
        direction: "both", "a_to_b" or "b_to_a".
        temperature: positive number that similarities are divided by, or a tensor without dimension; a parameter is
            learned with the module's others.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        reduction: "mean", "sum" or "none".
        validate: read values for checks on devices other than the CPU too.
        backend: "auto", "dense", "tiled", "exact" or "triton".

    Raises:
        TypeError: a temperature is no number.
        ValueError: an option has an unknown value.

    Source:
        van den Oord et al. 2018, arXiv 1807.03748; both directions: CLIP, arXiv 2103.00020.
    """

    def __init__(
        self,
        *,
        direction: Direction = "both",
        temperature: float | Tensor = 0.07,
        base_temperature: float | None = None,
        similarity: Similarity = "cosine",
        reduction: Reduction = "mean",
        validate: bool = False,
        backend: Backend = "auto",
    ) -> None:
        check_options(
            temperature,
            base_temperature,
            similarity=similarity,
            reduction=reduction,
            direction=direction,
            backend=backend,
            validate=validate,
        )
        super().__init__(
            temperature=temperature,
            base_temperature=base_temperature,
            similarity=similarity,
            validate=validate,
            backend=backend,
        )
        self.direction: Direction = direction
        self.reduction: Reduction = reduction

    def forward(self, embeddings_a: Tensor, embeddings_b: Tensor, *, negatives: Tensor | None = None) -> Tensor:
        """Evaluate `info_nce_loss` on towers ``[N, D]`` each, perhaps with negatives ``[K, D]``."""
        return info_nce_loss(
            embeddings_a,
            embeddings_b,
            negatives=negatives,
            direction=self.direction,
            temperature=self.temperature,
            base_temperature=self.base_temperature,
            similarity=self.similarity,
            reduction=self.reduction,
            validate=self.validate,
            backend=self.backend,
        )

"""The losses as `torch.nn.Module`: options are fixed, and checked, when the module is made."""

from __future__ import annotations

from torch import Tensor, nn

from .checks import PAIR_REDUCTIONS, REDUCTIONS, check_options
from .engine import Denominator, Similarity
from .nt_bxent import nt_bxent_loss
from .nt_xent import PairReduction, nt_xent_loss, nt_xent_pairwise_loss
from .supcon import NoNegative, NoPositive, Reduction, supcon_epsilon_loss, supcon_in_loss, supcon_loss


class _Loss(nn.Module):
    """Options shared by every loss."""

    def __init__(
        self,
        *,
        temperature: float,
        base_temperature: float | None,
        similarity: Similarity,
        validate: bool,
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.base_temperature = base_temperature
        self.similarity: Similarity = similarity
        self.validate = validate

    def extra_repr(self) -> str:
        """Return the options as they would be written in a call."""
        options = {key: value for key, value in vars(self).items() if not key.startswith("_") and key != "training"}
        return ", ".join(f"{key}={value!r}" for key, value in options.items())


class SupConLoss(_Loss):
    """Module of `supcon_loss`; the options are that function's.

    Args:
        temperature: positive number that similarities are divided by.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        denominator: "all", "one_positive" or "only_negatives".
        no_positive: "zero", "drop" or "nan".
        no_negative: "zero" or "nan".
        reduction: "mean", "sum" or "none".
        validate: read values for checks on devices other than the CPU too.

    Raises:
        TypeError: a temperature is no number.
        ValueError: an option has an unknown value.

    Source:
        Khosla et al. 2020, arXiv 2004.11362, equation 2.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.07,
        base_temperature: float | None = None,
        similarity: Similarity = "cosine",
        denominator: Denominator = "all",
        no_positive: NoPositive = "zero",
        no_negative: NoNegative = "zero",
        reduction: Reduction = "mean",
        validate: bool = False,
    ) -> None:
        check_options(
            temperature,
            base_temperature,
            similarity=similarity,
            denominator=denominator,
            no_positive=no_positive,
            no_negative=no_negative,
            reduction=reduction,
        )
        super().__init__(
            temperature=temperature, base_temperature=base_temperature, similarity=similarity, validate=validate
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
    ) -> Tensor:
        """Evaluate `supcon_loss` on embeddings ``[N, D]``, with labels ``[N]`` or positives ``[N, N]``."""
        return supcon_loss(
            embeddings,
            labels,
            positives=positives,
            anchors=anchors,
            temperature=self.temperature,
            base_temperature=self.base_temperature,
            similarity=self.similarity,
            denominator=self.denominator,
            no_positive=self.no_positive,
            no_negative=self.no_negative,
            reduction=self.reduction,
            validate=self.validate,
        )


class SupConInLoss(_Loss):
    """Module of `supcon_in_loss`; the options are that function's.

    Args:
        temperature: positive number that similarities are divided by.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        denominator: "all", "one_positive" or "only_negatives".
        no_positive: "zero", "drop" or "nan".
        no_negative: "zero" or "nan".
        reduction: "mean", "sum" or "none".
        validate: read values for checks on devices other than the CPU too.

    Raises:
        TypeError: a temperature is no number.
        ValueError: an option has an unknown value.

    Source:
        Khosla et al. 2020, arXiv 2004.11362, equation 3.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.07,
        base_temperature: float | None = None,
        similarity: Similarity = "cosine",
        denominator: Denominator = "all",
        no_positive: NoPositive = "zero",
        no_negative: NoNegative = "zero",
        reduction: Reduction = "mean",
        validate: bool = False,
    ) -> None:
        check_options(
            temperature,
            base_temperature,
            similarity=similarity,
            denominator=denominator,
            no_positive=no_positive,
            no_negative=no_negative,
            reduction=reduction,
        )
        super().__init__(
            temperature=temperature, base_temperature=base_temperature, similarity=similarity, validate=validate
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
    ) -> Tensor:
        """Evaluate `supcon_in_loss` on embeddings ``[N, D]``, with labels ``[N]`` or positives ``[N, N]``."""
        return supcon_in_loss(
            embeddings,
            labels,
            positives=positives,
            anchors=anchors,
            temperature=self.temperature,
            base_temperature=self.base_temperature,
            similarity=self.similarity,
            denominator=self.denominator,
            no_positive=self.no_positive,
            no_negative=self.no_negative,
            reduction=self.reduction,
            validate=self.validate,
        )


class SupConEpsilonLoss(_Loss):
    """Module of `supcon_epsilon_loss`; the options are that function's.

    Args:
        temperature: positive number that similarities are divided by.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        no_positive: "zero", "drop" or "nan".
        reduction: "mean", "sum" or "none".
        validate: read values for checks on devices other than the CPU too.

    Raises:
        TypeError: a temperature is no number.
        ValueError: an option has an unknown value.

    Source:
        The batch tutorial of 31 January 2023.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.07,
        base_temperature: float | None = None,
        similarity: Similarity = "dot",
        no_positive: NoPositive = "zero",
        reduction: Reduction = "mean",
        validate: bool = False,
    ) -> None:
        check_options(
            temperature, base_temperature, similarity=similarity, no_positive=no_positive, reduction=reduction
        )
        super().__init__(
            temperature=temperature, base_temperature=base_temperature, similarity=similarity, validate=validate
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
        )


class NTXentLoss(_Loss):
    """Module of `nt_xent_loss`; the options are that function's.

    Args:
        temperature: positive number that similarities are divided by.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        reduction: "mean", "sum" or "none".
        validate: read values for checks on devices other than the CPU too.

    Raises:
        TypeError: a temperature is no number.
        ValueError: an option has an unknown value.

    Source:
        Chen et al. 2020, arXiv 2002.05709, equation 1.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.07,
        base_temperature: float | None = None,
        similarity: Similarity = "cosine",
        reduction: Reduction = "mean",
        validate: bool = False,
    ) -> None:
        check_options(temperature, base_temperature, similarity=similarity, reduction=reduction, reductions=REDUCTIONS)
        super().__init__(
            temperature=temperature, base_temperature=base_temperature, similarity=similarity, validate=validate
        )
        self.reduction: Reduction = reduction

    def forward(self, embeddings: Tensor, partners: Tensor, *, anchors: Tensor | None = None) -> Tensor:
        """Evaluate `nt_xent_loss` on embeddings ``[N, D]`` with partners ``[N]``."""
        return nt_xent_loss(
            embeddings,
            partners,
            anchors=anchors,
            temperature=self.temperature,
            base_temperature=self.base_temperature,
            similarity=self.similarity,
            reduction=self.reduction,
            validate=self.validate,
        )


class NTXentPairwiseLoss(_Loss):
    """Module of `nt_xent_pairwise_loss`; the options are that function's.

    Args:
        temperature: positive number that similarities are divided by.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        no_positive: "zero", "drop" or "nan".
        reduction: "mean", "sum", "none" or "mean_pairs".
        validate: read values for checks on devices other than the CPU too.

    Raises:
        TypeError: a temperature is no number.
        ValueError: an option has an unknown value.

    Source:
        pytorch-metric-learning's NTXentLoss, issue 6 of that project.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.07,
        base_temperature: float | None = None,
        similarity: Similarity = "cosine",
        no_positive: NoPositive = "zero",
        reduction: PairReduction = "mean",
        validate: bool = False,
    ) -> None:
        check_options(
            temperature,
            base_temperature,
            similarity=similarity,
            no_positive=no_positive,
            reduction=reduction,
            reductions=PAIR_REDUCTIONS,
        )
        super().__init__(
            temperature=temperature, base_temperature=base_temperature, similarity=similarity, validate=validate
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
    ) -> Tensor:
        """Evaluate `nt_xent_pairwise_loss` on embeddings ``[N, D]``, with labels ``[N]`` or positives ``[N, N]``."""
        return nt_xent_pairwise_loss(
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
        )


class NTBXentLoss(_Loss):
    """Module of `nt_bxent_loss`; the options are that function's.

    Args:
        temperature: positive number that similarities are divided by.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        no_negative: "zero" or "nan".
        reduction: "mean", "sum" or "none".
        validate: read values for checks on devices other than the CPU too.

    Raises:
        TypeError: a temperature is no number.
        ValueError: an option has an unknown value.

    Source:
        The multi-label notebook's NT-BXent loss.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.07,
        base_temperature: float | None = None,
        similarity: Similarity = "cosine",
        no_negative: NoNegative = "zero",
        reduction: Reduction = "mean",
        validate: bool = False,
    ) -> None:
        check_options(
            temperature, base_temperature, similarity=similarity, no_negative=no_negative, reduction=reduction
        )
        super().__init__(
            temperature=temperature, base_temperature=base_temperature, similarity=similarity, validate=validate
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
        )

"""``SupConLoss`` of HobbitLong/SupContrast, with its signature, defaults and peculiarities.

The rows are the features of all views of all items; they are not normalised. Let s_ij be the dot product of rows i and
j divided by the temperature. The weight w_ij is the mask's entry for the items of rows i and j, and 0 if i = j. Without
a mask, w_ij is 1 for equal labels; without labels, it is 1 for views of the same item. The loss of anchor i is

    (temperature / base_temperature) * sum over j of w_ij (log(sum over a != i of e^s_ia) - s_ij) / sum over j of w_ij

The loss is the mean over the anchors: all rows, or with ``contrast_mode="one"`` the rows of the first view.

The memory of the engine is linear in the number of rows, apart from the mask.

Source: ``losses.py`` of HobbitLong/SupContrast at commit 66a8fe5, and its revision before pull request 142.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from ..fast.engine import Batch, Policy, References, Rule, Sizes, Targets, anchor_values, loss_of, measure
from ..fast.engine.device import autocast, dtypes_of, may_read
from .evaluation import EvaluatedBy, suits_engine

ContrastMode = Literal["all", "one"]
NoPositive = Literal["zero", "nan"]

NO_POSITIVES = 1e-6
"""A smaller sum of weights is replaced by 1."""
SMALLEST_LOG = {torch.float64: 700.0, torch.float32: 80.0, torch.bfloat16: 80.0, torch.float16: 9.0}
"""For each dtype, a number x up to which e^-x is a normal number, and has full precision."""
LEAST_PAIRS = {"partners": 2**13, "labels": 2**17}
"""Number of pairs (anchor, row) from which the engine is faster than plain torch code on a CPU."""
ROWS = 1024
"""Number of rows whose similarities `_underflows` computes at a time."""


class SupConLoss(nn.Module):
    """``SupConLoss`` of SupContrast: SupCon, and SimCLR without labels, on features ``[batch, views, ...]``.

    Example:
        >>> import torch
        >>> from pairproof.compat.supcontrast import SupConLoss
        >>> z = torch.tensor([[[1.0, 0.0], [0.8, 0.6]], [[0.0, 1.0], [-0.6, 0.8]]])
        >>> loss_function = SupConLoss(temperature=0.5, base_temperature=0.5)
        >>> print(f"{loss_function(z, labels=torch.tensor([0, 1])):.4f}")
        0.4302

    Args:
        temperature: what similarities are divided by: a number, or a tensor, which may require a gradient.
        contrast_mode: "all": the rows of all views are anchors; "one": those of the first view.
        base_temperature: the loss is multiplied by ``temperature / base_temperature``.
        no_positive: the value of an anchor whose weights sum to 0: "zero", as in SupContrast since its pull request
            142, or "nan", as before it. Under "zero", any sum of weights below 1e-6 is replaced by 1.
        self_in_maximum: True: the maximum that is subtracted from the logits of a row includes the self pair, as in
            SupContrast. If all other logits are so far below it that their exponentials underflow, the loss is NaN or
            inaccurate (issue 104 there). False: the loss is right. True also reads the norms of the features, which
            synchronises with an accelerator; compiled graphs therefore use plain torch code.

    Attributes:
        evaluated_by: "engine" or "plain", for the last call; see `pairproof.compat`.

    Source:
        HobbitLong/SupContrast at commit 66a8fe5, ``losses.py``; for ``no_positive="nan"`` its revision before pull
        request 142, which is also in bioencoder 1.0.5. The repository has no tests.
    """

    def __init__(
        self,
        temperature: float | Tensor = 0.07,
        contrast_mode: ContrastMode = "all",
        base_temperature: float | Tensor = 0.07,
        *,
        no_positive: NoPositive = "zero",
        self_in_maximum: bool = True,
    ) -> None:
        super().__init__()
        if no_positive not in ("zero", "nan"):
            raise ValueError(f"no_positive: expected one of zero, nan, got {no_positive!r}")
        self.temperature = temperature
        self.contrast_mode = contrast_mode
        self.base_temperature = base_temperature
        self.no_positive = no_positive
        self.self_in_maximum = self_in_maximum
        self.evaluated_by: EvaluatedBy = ""

    def forward(self, features: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the loss; without labels and mask, that of SimCLR.

        Args:
            features: ``[batch, views, ...]``; further dimensions are flattened.
            labels: one label per item, in any shape and of any dtype.
            mask: ``[batch, batch]``, instead of labels: the weight of each pair of items, such as 1 for positives and 0
                for others. It may be asymmetric, and is rounded to float32.

        Returns:
            A scalar; float64 for float64 features, else float32.

        Raises:
            ValueError: features have less than three dimensions, labels and mask are both given, the number of labels
                is not that of the items, or the contrast mode is unknown.
            RuntimeError: the mask has another shape.
        """
        if features.ndim < 3:
            raise ValueError(f"features: expected shape [batch, views, ...], got shape {list(features.shape)}")
        items, views = features.shape[:2]
        if features.ndim > 3:
            features = features.view(items, views, -1)
        if labels is not None and mask is not None:
            raise ValueError("labels: expected at most one of labels and mask, got both")
        if labels is not None:
            labels = labels.contiguous().view(-1).to(features.device)
            if labels.shape[0] != items:
                raise ValueError(f"labels: expected one label per item, {items}, got {labels.shape[0]}")
        if self.contrast_mode not in ("all", "one"):
            raise ValueError(f"contrast_mode: expected one of all, one, got {self.contrast_mode!r}")
        if labels is not None and labels.is_floating_point():
            mask, labels = labels[:, None] == labels, None  # a NaN label equals no label, and has no positives
        if mask is not None:
            mask = mask.to(features.device, torch.float32)

        # The rows of the first view, then those of the second, and so on.
        rows = features.transpose(0, 1).reshape(items * views, features.shape[2])
        count = items if self.contrast_mode == "one" else len(rows)
        loss = self._by_engine(features, rows, count, labels, mask)
        self.evaluated_by = "plain" if loss is None else "engine"
        if loss is None:
            loss = self._plain(rows, count, views, labels, mask)
        scale = self.temperature / self.base_temperature
        return loss if isinstance(scale, float) and scale == 1 else loss * scale

    def _by_engine(
        self, features: Tensor, rows: Tensor, count: int, labels: Tensor | None, mask: Tensor | None
    ) -> Tensor | None:
        """Return the loss without the factor temperature / base_temperature, or None if plain code must evaluate it.

        Plain code is needed if the engine is slower, lacks the configuration, or may differ where SupContrast returns
        NaN. The first ``count`` of the rows ``[N, D]`` are anchors.
        """
        least = LEAST_PAIRS["partners" if labels is None and mask is None and count == len(rows) else "labels"]
        if (rows.is_cpu and count * len(rows) < least) or len(rows) < 2 or not suits_engine(rows, self.temperature):
            return None
        items, views = features.shape[:2]
        if mask is not None and mask.shape != (items, items):
            return None
        sizes = measure(rows) if may_read(rows, validate=self.self_in_maximum) else None
        if sizes is None:
            if self.self_in_maximum or self.no_positive == "nan":
                return None
        elif not sizes.high < math.inf or (self.self_in_maximum and self._underflows(features, rows[:count], sizes)):
            return None

        anchors = None if count == len(rows) else torch.arange(len(rows), device=rows.device) < count
        rule = Rule("out", "dot", self.temperature)
        if mask is None:
            batch = Batch(rows, _targets(items, views, labels, rows), rule, References(), anchors, sizes=sizes)
            loss = loss_of(batch, Policy("mean", None, self.no_positive), "auto")
            # If the loss is NaN, plain torch code also makes the gradient NaN, as SupContrast does.
            return None if self.no_positive == "nan" and bool(loss.isnan()) else loss
        with torch.autocast(rows.device.type, enabled=False):
            return self._weighted(_sums(rows, rule, anchors, sizes)[:count], features, mask)

    def _underflows(self, features: Tensor, anchors: Tensor, sizes: Sizes) -> bool:
        """Return whether, for some anchor, the exponentials of all other rows may underflow or lose digits.

        This happens if the self pair's logit is the maximum, and far above the others. Also return True if logits may
        overflow.
        """
        kind, dtype = features.device.type, anchors.dtype
        if autocast(features):
            dtype = torch.get_autocast_dtype(kind)
        temperature = self.temperature.item() if isinstance(self.temperature, Tensor) else self.temperature
        # For float64 rows, the sizes are largest entries, not norms.
        product = sizes.high * sizes.high * (anchors.shape[1] if anchors.dtype == torch.float64 else 1)
        if not product / temperature < torch.finfo(dtype).max / 4:
            return True
        limit = SMALLEST_LOG.get(dtype, 0.0) * temperature
        if 2 * product <= limit:
            return False
        with torch.autocast(kind, enabled=False):
            features = features.detach().to(dtypes_of(features)[0])
            if features.shape[1] > 1:  # cheaper: another view of the item is usually close enough
                others = features.roll(1, 1)
                if bool(((features * (features - others)).sum(2) <= limit).all()):
                    return False
            rows = features.transpose(0, 1).flatten(0, 1)
            for start in range(0, len(anchors), ROWS):
                products = rows[start : min(start + ROWS, len(anchors))] @ rows.T
                own = products.diagonal(start).clone()
                products.diagonal(start).fill_(-math.inf)
                if not bool((own - products.amax(1) <= limit).all()):
                    return True
        return False

    def _weighted(self, sums: Tensor, features: Tensor, mask: Tensor) -> Tensor:
        """Return the loss for a mask, without the factor temperature / base_temperature.

        ``sums`` are the logarithms of the anchors' sums of exponentials. The rest needs one sum of features for each
        item.
        """
        items, views = features.shape[:2]
        features, mask = features.to(sums.dtype), mask.to(sums.dtype)
        anchors, of_items = features[:, : len(sums) // items], features.sum(1, keepdim=True)
        # The weights of pairs of different items, and of views of the same item.
        different, same = _of_pairs(mask, items, 1), mask.diagonal()[:, None]
        total = divided = views * different.sum(1, keepdim=True) + (views - 1) * same
        if sums.dtype == torch.float64:  # SupContrast sums the mask in float32; divide by the same rounded sum
            divided = _of_pairs(mask.float(), len(sums), views).sum(1).view(-1, items).T
        across = (different @ of_items[:, 0])[:, None] + same[:, None] * (of_items - anchors)
        values = total * sums.view(-1, items).T - (anchors * across).sum(2) / self.temperature
        return (values / self._divisor(divided)).mean()

    def _plain(self, rows: Tensor, count: int, views: int, labels: Tensor | None, mask: Tensor | None) -> Tensor:
        """Return the same loss as `_by_engine`, from matrices of all pairs."""
        items = len(rows) // views
        if mask is None:
            same = torch.eye(items, device=rows.device) if labels is None else labels[:, None] == labels
            mask = same.float()
        weights = _of_pairs(mask, count, views)
        logits = (rows if count == len(rows) else rows[:count]) @ rows.T / self.temperature
        if self.self_in_maximum:
            logits = logits - logits.detach().amax(1, keepdim=True)
            others = torch.ones_like(weights).fill_diagonal_(0)
            ratios = logits - (logits.exp() * others).sum(1, keepdim=True).log()
        else:
            own = torch.eye(count, len(rows), dtype=torch.bool, device=rows.device)
            ratios = logits - logits.masked_fill(own, -math.inf).logsumexp(1, keepdim=True)
        return -((weights * ratios).sum(1) / self._divisor(weights.sum(1))).mean()

    def _divisor(self, total: Tensor) -> Tensor:
        """Return what each anchor's weighted sum is divided by, given the sums of the weights."""
        return torch.where(total < NO_POSITIVES, 1.0, total) if self.no_positive == "zero" else total


def _of_pairs(mask: Tensor, count: int, views: int) -> Tensor:
    """Expand the weights of pairs of items to pairs of rows, ``[count, N]``; those of self pairs are 0."""
    return mask.repeat(count // len(mask), views).fill_diagonal_(0)


def _targets(items: int, views: int, labels: Tensor | None, rows: Tensor) -> Targets:
    """Return the positives of all rows: those with the same label or, without labels, of the same item."""
    if labels is None and views == 2:
        return _halves(rows)
    if labels is None:
        labels = torch.arange(items, device=rows.device)
    labels = labels.view(torch.int64) if labels.dtype == torch.uint64 else labels.to(torch.int64)
    return Targets("labels", labels.repeat(views))


def _halves(rows: Tensor) -> Targets:
    """Return targets in which row i of each half has row i of the other half as its partner."""
    return Targets("partners", torch.arange(len(rows), device=rows.device).roll(len(rows) // 2))


def _sums(rows: Tensor, rule: Rule, anchors: Tensor | None, sizes: Sizes | None) -> Tensor:
    """Return, for each anchor, the logarithm of the sum of e^logit over all other rows, ``[N]``."""
    if len(rows) % 2:
        none = Targets("none", torch.empty(0, dtype=torch.int64, device=rows.device))
        batch = Batch(rows, none, replace(rule, terms="lse"), References(), anchors, sizes=sizes)
        return anchor_values(batch).values
    # With partners as positives, the engine takes half the time. Its value is the logarithm minus the partner's logit.
    found = anchor_values(Batch(rows, _halves(rows), rule, References(), anchors, sizes=sizes)).values
    wide = rows.to(found.dtype)
    return found + (wide * wide.roll(len(rows) // 2, 0)).sum(1) / rule.temperature

"""open_clip's ``ClipLoss`` and ``SigLipLoss``, evaluated by `info_nce_loss` and `sigmoid_loss` of `pairproof.fast`.

To switch, import them from this module instead of ``open_clip.loss``. open_clip need not be installed. Features are
``[N, D]``. Similarities are dot products, because open_clip's models return normalised features. The logit scale is 1 /
temperature.

With several processes, each has N rows, and DistributedDataParallel averages the gradients. The table compares the
average gradient of the encoders with that of the whole batch in one process.

    ClipLoss                                      divided by world_size: the rows of other processes are constants
    ClipLoss, local_loss                          lacks the part that flows through gathered rows
    ClipLoss, gather_with_grad                    equal, with and without local_loss
    SigLipLoss, every dist_impl                   equal

These gradients and the defaults are those of open_clip. There are four differences:

- Half-precision features that `pairproof.fast` evaluates, and not plain torch (see ``evaluated_by``), give a float32
  loss. Similarities are computed in float32, also under autocast.
- With ``chunk_size``, open_clip computes the loss of a positive pair with logit l as softplus(l) - l. The digits cancel
  if l is large. Here it is softplus(-l).
- With several processes and without ``local_loss``, open_clip's `ClipLoss.get_logits` adds the logit bias twice, and
  ours once. The loss is the same.
- ``use_horovod=True`` and an unknown ``dist_impl`` raise a ValueError when the loss is constructed.

Source: src/open_clip/loss.py of mlfoundations/open_clip, release 3.3.0, and commit 89fb801 for ``chunk_size`` and for
the gather with functional collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import Tensor, nn

from ..fast import info_nce_loss, sigmoid_loss
from ..fast.checks import check_alike, check_bias, check_embeddings, check_options
from ..fast.engine import Batch, Policy, References, Rule, Targets, loss_of
from .evaluation import EvaluatedBy, evaluate, large

try:
    from torch.distributed import _functional_collectives as dist_fcol
except ImportError:  # torch built without distributed
    dist_fcol = None  # type: ignore[assignment]

ENGINE_FROM = 2**18
"""Number of pairs of rows from which the engine is faster than plain torch code on a CPU."""


def _all_gather_with_grad(rows: Tensor) -> Tensor:
    """Return the rows of all processes ``[world_size * N, D]``; gradients flow back to their process."""
    gather = getattr(dist_fcol, "all_gather_tensor_autograd", None)
    if gather is None:
        return torch.cat(torch.distributed.nn.all_gather(rows))  # type: ignore[no-untyped-call]
    found: Tensor = gather(rows.contiguous(), gather_dim=0, group=dist.group.WORLD)
    return found


def _all_gather(rows: Tensor, own: int | None, world_size: int) -> Tensor:
    """Return the rows of all processes as constants, except the rows of process ``own``."""
    parts = [torch.empty_like(rows) for _ in range(world_size)]
    dist.all_gather(parts, rows.detach().contiguous())
    if own is not None:
        parts[own] = rows
    return torch.cat(parts)


def gather_features(
    image_features: Tensor,
    text_features: Tensor,
    local_loss: bool = False,
    gather_with_grad: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return the image features and the text features of all processes, each ``[world_size * N, D]``.

    Args:
        image_features: ``[N, D]``, those of this process.
        text_features: ``[N, D]``, those of this process.
        local_loss: whether the rows of this process are constants too; not used with ``gather_with_grad``.
        gather_with_grad: whether gradients flow through the gather.
        rank: the number of this process.
        world_size: the number of processes.
    """
    if gather_with_grad:
        return _all_gather_with_grad(image_features), _all_gather_with_grad(text_features)
    own = None if local_loss else rank
    return _all_gather(image_features, own, world_size), _all_gather(text_features, own, world_size)


def _temperature(scale: float | Tensor, rows: Tensor) -> float | Tensor:
    """Return 1 / scale; a tensor with one entry becomes 0-dimensional."""
    if not isinstance(scale, Tensor):
        if not scale:
            raise ValueError("logit_scale: expected a positive number, got 0")
        return 1 / scale
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.promote_types(scale.dtype, torch.float32)
    return _scalar(scale, "logit_scale").to(dtype).reciprocal()


def _scalar(value: Tensor, name: str) -> Tensor:
    """Return a tensor with one entry as a 0-dimensional tensor."""
    if value.numel() != 1:
        raise ValueError(f"{name}: expected one number, got shape {list(value.shape)}")
    return value.reshape(())


def _unchanged(loss: nn.Module, base: type[nn.Module], name: str) -> bool:
    """Return whether a method is that of the base class: neither overridden nor replaced on the instance."""
    return getattr(type(loss), name) is getattr(base, name) and name not in vars(loss)


class ClipLoss(nn.Module):
    """The cross-entropy of matching images and texts, averaged over both directions.

    Example:
        >>> import torch
        >>> from pairproof.compat.open_clip import ClipLoss
        >>> images = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
        >>> texts = torch.tensor([[0.8, 0.6], [1.0, 0.0], [0.0, 1.0]])
        >>> loss_function = ClipLoss()
        >>> print(f"{loss_function(images, texts, logit_scale=10.0):.4f}")
        1.4294

    Args:
        local_loss: whether a process computes only the loss of its own images and texts, contrasted with the rows of
            all processes. By default, every process computes the loss of all rows.
        gather_with_grad: whether gradients flow to the rows of other processes. The table at the top of this file
            compares the gradients with and without it.
        cache_labels: whether `get_ground_truth` keeps the targets for the next call.
        rank: the number of this process.
        world_size: the number of processes in the default process group.
        use_horovod: must be False.

    Attributes:
        evaluated_by: "engine" or "plain", for the last call. "plain" evaluates

            - fewer than 512 * 512 pairs on a CPU, where it is faster
            - features and scales that the engine rejects, such as NaN
            - subclasses with their own `get_logits` or `get_ground_truth`

    Raises:
        ValueError: use_horovod is set.

    Source:
        CLIP, arXiv 2103.00020; src/open_clip/loss.py of mlfoundations/open_clip 3.3.0.
    """

    evaluated_by: EvaluatedBy = ""

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
    ) -> None:
        super().__init__()
        if use_horovod:
            raise ValueError("use_horovod: expected False, because only torch.distributed is supported, got True")
        self.local_loss = local_loss
        self.gather_with_grad = gather_with_grad
        self.cache_labels = cache_labels
        self.rank = rank
        self.world_size = world_size
        self.use_horovod = use_horovod
        self.prev_num_logits = 0
        self.labels: dict[torch.device, Tensor] = {}

    def get_ground_truth(self, device: torch.device, num_logits: int) -> Tensor:
        """Return the column of the positive in each row of logits, int64 ``[num_logits]``."""
        if self.prev_num_logits == num_logits and device in self.labels:
            return self.labels[device]
        first = num_logits * self.rank if self.world_size > 1 and self.local_loss else 0
        labels = torch.arange(first, first + num_logits, device=device)
        if self.cache_labels:
            self.labels[device] = labels
            self.prev_num_logits = num_logits
        return labels

    def _gathered(self, image_features: Tensor, text_features: Tensor) -> tuple[Tensor, Tensor]:
        if self.world_size == 1:
            return image_features, text_features
        return gather_features(
            image_features, text_features, self.local_loss, self.gather_with_grad, self.rank, self.world_size
        )

    def get_logits(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of images and of texts, each ``[M, M]``, or ``[N, M]`` with ``local_loss``.

        M = world_size * N is the number of rows of all processes.
        """
        others = self._gathered(image_features, text_features)
        return self._logits(image_features, text_features, *others, logit_scale, logit_bias)

    def _logits(
        self,
        image_features: Tensor,
        text_features: Tensor,
        all_images: Tensor,
        all_texts: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        local = self.world_size > 1 and self.local_loss
        logits = logit_scale * (image_features if local else all_images) @ all_texts.T
        if logit_bias is not None:
            logits = logits + logit_bias
        if not local:
            return logits, logits.T
        of_texts = logit_scale * text_features @ all_images.T
        return logits, of_texts if logit_bias is None else of_texts + logit_bias

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Return the loss.

        Args:
            image_features: floating ``[N, D]``.
            text_features: floating ``[N, D]``; row i matches row i of the images.
            logit_scale: what similarities are multiplied by: a number, or a tensor with one entry.
            logit_bias: what is added to all logits: a number, a tensor with one entry, or None. The loss does not
                depend on it, and its gradient is 0.
            output_dict: whether to return the loss in a dict.

        Returns:
            A scalar, or ``{"contrastive_loss": scalar}``.
        """
        local = self.world_size > 1 and self.local_loss
        own = _unchanged(self, ClipLoss, "get_logits") and _unchanged(self, ClipLoss, "get_ground_truth")
        if own:
            images, texts = self._gathered(image_features, text_features)
            logits = partial(self._logits, image_features, text_features, images, texts, logit_scale, logit_bias)
        else:
            images, texts = image_features, text_features
            logits = partial(self.get_logits, image_features, text_features, logit_scale, logit_bias=logit_bias)

        def engine() -> Tensor:
            temperature = _temperature(logit_scale, image_features)
            contrast = partial(info_nce_loss, temperature=temperature, similarity="dot")
            if local:
                labels = self.get_ground_truth(image_features.device, image_features.shape[0])
                contrast = partial(contrast, partners=labels, direction="a_to_b", no_positive="zero")
                loss = (contrast(image_features, texts) + contrast(text_features, images)) / 2
            else:
                loss = contrast(images, texts)
            # The loss does not depend on the bias, but the bias gets a gradient of 0.
            if isinstance(logit_bias, Tensor):
                loss = loss + 0 * _scalar(logit_bias, "logit_bias").to(loss.dtype)
            return loss

        def plain() -> Tensor:
            of_images, of_texts = logits()
            labels = self.get_ground_truth(image_features.device, of_images.shape[0])
            return (F.cross_entropy(of_images, labels) + F.cross_entropy(of_texts, labels)) / 2

        loss = evaluate(
            self, engine, plain, wanted=own and large(image_features if local else images, texts, ENGINE_FROM)
        )
        return {"contrastive_loss": loss} if output_dict else loss


class _Exchange(torch.autograd.Function):
    """Send rows around the ring of processes: one tensor to the right or two in opposite directions.

    Gradients travel the opposite way.
    """

    @staticmethod
    def forward(ctx: Any, peers: tuple[tuple[int, int], ...], *rows: Tensor) -> tuple[Tensor, ...]:
        """Send each tensor to the first process of its pair, and receive one from the second."""
        ctx.peers = peers
        found = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in rows]
        operations = []
        for (target, source), sent, received in zip(peers, rows, found, strict=True):
            operations.append(dist.P2POp(dist.isend, sent.contiguous(), target))
            operations.append(dist.P2POp(dist.irecv, received, source))
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Send each gradient back to the process that its rows came from."""
        return None, *_exchanged(tuple((source, target) for target, source in ctx.peers), *grads)


def _exchanged(peers: tuple[tuple[int, int], ...], *rows: Tensor) -> tuple[Tensor, ...]:
    """Send each tensor of rows, and return those received."""
    found: tuple[Tensor, ...] = _Exchange.apply(peers, *rows)  # type: ignore[no-untyped-call]
    return found


class SigLipLoss(nn.Module):
    """The sum of the binary cross-entropies of all pairs of an image and a text, divided by the batch size.

    Example:
        >>> import torch
        >>> from pairproof.compat.open_clip import SigLipLoss
        >>> images = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
        >>> texts = torch.tensor([[0.8, 0.6], [1.0, 0.0], [0.0, 1.0]])
        >>> loss_function = SigLipLoss()
        >>> print(f"{loss_function(images, texts, logit_scale=10.0, logit_bias=-10.0):.4f}")
        2.1232

    Args:
        cache_labels: has no effect, as in open_clip.
        rank: the number of this process.
        world_size: the number of processes in the default process group.
        dist_impl: how texts travel between processes. It does not change the loss.

            - "bidir" (or None): to both neighbours, step by step
            - "shift": to one neighbour, step by step
            - "reduce": one all-reduce for the texts of each process
            - "gather": all at once, which takes the most memory
        chunk_size: the number of images whose logits plain torch code computes at a time; 0: all. The engine ignores
            it. With a chunk size, the numbers of images and texts may differ.

    Attributes:
        evaluated_by: "engine" or "plain", for the last block of texts. "plain" evaluates

            - fewer than 512 * 512 pairs on a CPU, where it is faster
            - features, scales and biases that the engine rejects, such as NaN
            - subclasses with their own `get_logits` or `get_ground_truth`

    Raises:
        ValueError: dist_impl is unknown.

    Source:
        SigLIP, arXiv 2303.15343; src/open_clip/loss.py of mlfoundations/open_clip 3.3.0, and chunk_size of commit
        89fb801.
    """

    evaluated_by: EvaluatedBy = ""

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        chunk_size: int = 0,
    ) -> None:
        super().__init__()
        self.cache_labels = cache_labels
        self.rank = rank
        self.world_size = world_size
        self.dist_impl = dist_impl or "bidir"
        self.chunk_size = chunk_size
        if self.dist_impl not in ("bidir", "shift", "reduce", "gather"):
            raise ValueError(f"dist_impl: expected one of bidir, shift, reduce, gather, got {dist_impl!r}")
        self.prev_num_logits = 0
        self.labels: dict[torch.device, Tensor] = {}

    def get_ground_truth(
        self, device: torch.device, dtype: torch.dtype, num_logits: int, negative_only: bool = False
    ) -> Tensor:
        """Return the signs of the pairs, ``[num_logits, num_logits]``: 1 on the diagonal, -1 elsewhere.

        With ``negative_only``, all are -1.
        """
        signs = torch.full((num_logits, num_logits), -1, device=device, dtype=dtype)
        if not negative_only:
            signs.fill_diagonal_(1)
        return signs

    def get_logits(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None = None,
    ) -> Tensor:
        """Return the logits of images and texts, ``[N, M]``."""
        logits: Tensor = logit_scale * image_features @ text_features.T
        return logits if logit_bias is None else logits + logit_bias

    def _loss(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None = None,
        negative_only: bool = False,
    ) -> Tensor:
        """Return the loss for the texts of this process or, with ``negative_only``, of another process."""
        count = image_features.shape[0]
        own = _unchanged(self, SigLipLoss, "get_logits") and _unchanged(self, SigLipLoss, "get_ground_truth")

        def engine() -> Tensor:
            temperature = _temperature(logit_scale, image_features)
            bias = 0.0 if logit_bias is None else logit_bias
            bias = _scalar(bias, "logit_bias") if isinstance(bias, Tensor) else float(bias)
            if not negative_only:
                return sigmoid_loss(image_features, text_features, temperature=temperature, bias=bias, similarity="dot")
            return _negatives(image_features, text_features, temperature, bias)

        def plain() -> Tensor:
            if not own:
                logits = self.get_logits(image_features, text_features, logit_scale, logit_bias)
                signs = self.get_ground_truth(image_features.device, image_features.dtype, count, negative_only)
                return -F.logsigmoid(signs * logits).sum() / count
            if not self.chunk_size and text_features.shape[0] != count:
                given = f"{count} images and {text_features.shape[0]} texts"
                raise ValueError(f"text_features: expected one row per image without chunk_size, got {given}")
            if not 0 < self.chunk_size < count:
                return -block(0, image_features) / count
            chunks = torch.split(image_features, self.chunk_size)
            return -torch.stack([block(turn * self.chunk_size, rows) for turn, rows in enumerate(chunks)]).sum() / count

        def block(first: int, rows: Tensor) -> Tensor:
            """Return the sum of the log-probabilities of the pairs of ``rows``; the first is image number ``first``."""
            logits = self.get_logits(rows, text_features, logit_scale, logit_bias)
            if negative_only:
                return F.logsigmoid(-logits).sum()
            signs = torch.full_like(logits, -1, requires_grad=False)
            signs.diagonal(first).fill_(1)
            return F.logsigmoid(signs * logits).sum()

        return evaluate(self, engine, plain, wanted=own and large(image_features, text_features, ENGINE_FROM))

    def _texts_of_others(self, text_features: Tensor) -> Iterator[Tensor]:
        """Yield the texts ``[N, D]`` of the other processes; under "reduce" also of this one. Gradients flow back."""
        right, left = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        if self.dist_impl == "gather":
            blocks = _all_gather_with_grad(text_features).chunk(self.world_size)
            yield from blocks[: self.rank] + blocks[self.rank + 1 :]
        elif self.dist_impl == "reduce":
            for turn in range(self.world_size):
                own = text_features * (self.rank == turn)
                yield torch.distributed.nn.all_reduce(own)  # type: ignore[no-untyped-call]
        elif self.dist_impl == "shift":
            texts = text_features
            for _ in range(self.world_size - 1):
                (texts,) = _exchanged(((right, left),), texts)
                yield texts
        else:
            to_right = to_left = text_features
            for _ in range((self.world_size - 1) // 2):
                to_right, to_left = _exchanged(((right, left), (left, right)), to_right, to_left)
                yield to_right
                yield to_left
            if self.world_size % 2 == 0:
                yield from _exchanged(((right, left),), to_right)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: float | Tensor,
        logit_bias: float | Tensor | None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """Return the loss.

        Args:
            image_features: floating ``[N, D]``.
            text_features: floating ``[N, D]``; row i matches row i of the images.
            logit_scale: what similarities are multiplied by: a number, or a tensor with one entry.
            logit_bias: what is added to all logits: a number, a tensor with one entry, or None.
            output_dict: whether to return the loss in a dict.

        Returns:
            A scalar, or ``{"contrastive_loss": scalar}``.
        """
        loss = self._loss(image_features, text_features, logit_scale, logit_bias)
        if self.world_size > 1:
            for turn, texts in enumerate(self._texts_of_others(text_features)):
                if self.dist_impl == "reduce" and turn == self.rank:
                    # Every process must take part in the backward pass of every all-reduce.
                    loss = loss + 0 * texts.sum()
                else:
                    loss = loss + self._loss(image_features, texts, logit_scale, logit_bias, negative_only=True)
        return {"contrastive_loss": loss} if output_dict else loss


def _negatives(images: Tensor, texts: Tensor, temperature: float | Tensor, bias: float | Tensor) -> Tensor:
    """Return the loss of images and texts of which no pair matches."""
    rule, policy = Rule("sigmoid", "dot", temperature, bias=bias), Policy("mean", None)
    check_options(rule, policy, "auto", validate=False)
    check_bias(bias)
    check = partial(check_embeddings, similarity="dot", validate=False, least=1)
    of_images, of_texts = check(images, name="image_features"), check(texts, name="text_features")
    check_alike("text_features", texts, "image_features", images)
    targets = Targets("none", torch.empty(0, dtype=torch.int64, device=images.device))
    return loss_of(Batch(images, targets, rule, References(texts, sizes=of_texts), sizes=of_images), policy, "auto")

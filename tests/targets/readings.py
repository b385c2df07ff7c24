"""Losses whose signatures have several readings, for the tests of how a target is called."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


def _cosines(rows):
    rows = F.normalize(rows, dim=1)
    return rows @ rows.T


def _supcon(logits, positive):
    own = torch.eye(len(logits), dtype=torch.bool)
    positive = positive.bool() & ~own
    logs = F.log_softmax(logits.masked_fill(own, -torch.inf), dim=1)
    return (-logs.where(positive, 0).sum(dim=1) / positive.sum(dim=1).clamp(min=1)).mean()


def _clip(first, second, scale):
    logits = scale * F.normalize(first, dim=1) @ F.normalize(second, dim=1).T
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def _nt_xent(rows, partners, temperature):
    return F.cross_entropy((_cosines(rows) / temperature).fill_diagonal_(-torch.inf), partners)


def _scripted(function):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        return torch.jit.script(function)


# Right as called


def of_required_labels(features, labels, temperature):
    views = features.shape[1]
    rows, labels = features.transpose(0, 1).flatten(0, 1), labels.repeat(views)
    return _supcon(_cosines(rows) / temperature, labels[:, None] == labels)


def of_required_labels_or_a_mask(features, labels, temperature, mask=None):
    if labels is not None and mask is not None:
        raise ValueError("labels and mask contradict each other")
    return of_required_labels(features, labels, temperature)


class OfCamelCase:
    def __init__(self, batchSize, temperature):  # noqa: N803
        self.count, self.temperature = batchSize, temperature

    def __call__(self, zA, zB):  # noqa: N803
        partners = torch.arange(2 * self.count).roll(self.count)
        return _nt_xent(torch.cat([zA, zB]), partners, self.temperature)


def of_y_and_y_hat(y, y_hat, temperature):
    return _nt_xent(torch.cat([y, y_hat]), torch.arange(2 * len(y)).roll(len(y)), temperature)


def two_views_and_labels(z_i, z_j, labels, temperature=0.1):
    labels = torch.cat([labels, labels])
    return _supcon(_cosines(torch.cat([z_i, z_j])) / temperature, labels[:, None] == labels)


def two_views_and_unused_labels(z_i, z_j, labels, temperature=0.1):
    n = len(z_i)
    assert len(labels) == n
    return _nt_xent(torch.cat([z_i, z_j]), torch.arange(2 * n).roll(n), temperature)


def multiplied_labels(embeddings, labels, temperature):
    """The labels are one-hot."""
    labels = labels.float()
    return _supcon(_cosines(embeddings) / temperature, labels @ labels.T > 0)


def named_one_hot(embeddings, one_hot_labels, temperature):
    return _supcon(_cosines(embeddings) / temperature, torch.einsum("ic,jc->ij", one_hot_labels, one_hot_labels))


def of_a_mask(embeddings, mask, temperature):
    return _supcon(_cosines(embeddings) / temperature, mask)


def of_a_mask_of_numbers(embeddings, mask, temperature):
    return _supcon(_cosines(embeddings) / temperature, 1 - (1 - mask))


def nt_xent_of_interleaved(x, temperature):
    return _nt_xent(x, torch.arange(len(x)) ^ 1, temperature)


def sigmoid(zimg, ztxt, t_prime, b):
    first, second = F.normalize(zimg, dim=1), F.normalize(ztxt, dim=1)
    logits = first @ second.T * t_prime.exp() + b
    return -F.logsigmoid((2 * torch.eye(len(logits)) - 1) * logits).sum() / len(logits)


def of_x(x, temperature):
    """NT-Xent of a matrix of similarities, all first views before all second views."""
    return F.cross_entropy((x / temperature).fill_diagonal_(-torch.inf), torch.arange(len(x)).roll(len(x) // 2))


def of_x_and_labels(x, labels, temperature):
    """SupCon; x is the [N, N] similarity matrix."""
    return _supcon(x / temperature, labels[:, None] == labels)


def of_features_with_cosines(features, temperature):
    """NT-Xent of stacked views: computes the similarity matrix of cosines."""
    return _nt_xent(features, torch.arange(len(features)).roll(len(features) // 2), temperature)


def anchor_and_positives(anchor, positives, temperature):
    return two_views_and_unused_labels(anchor, positives, torch.arange(len(anchor)), temperature)


def of_square_x(x):
    if x.shape[0] != x.shape[1]:
        raise ValueError("x must be square")
    target = torch.arange(len(x))
    return (F.cross_entropy(x, target) + F.cross_entropy(x.T, target)) / 2


@_scripted
def scripted(embeddings, labels, temperature: float):
    rows = torch.nn.functional.normalize(embeddings, dim=1)
    logits = torch.matmul(rows, rows.t()) / temperature
    own = torch.eye(rows.size(0), dtype=torch.bool)
    positive = (labels.unsqueeze(1) == labels.unsqueeze(0)) & ~own
    logs = torch.log_softmax(logits.masked_fill(own, -float("inf")), dim=1)
    return (-logs.masked_fill(~positive, 0.0).sum(dim=1) / positive.sum(dim=1).clamp(min=1)).mean()


@_scripted
def scripted_clip(image_features, text_features, logit_scale):
    image = torch.nn.functional.normalize(image_features, dim=1)
    text = torch.nn.functional.normalize(text_features, dim=1)
    logits = torch.exp(logit_scale) * torch.matmul(image, text.t())
    target = torch.arange(image.size(0))
    one = torch.nn.functional.cross_entropy(logits, target)
    return (one + torch.nn.functional.cross_entropy(logits.t(), target)) / 2


@dataclass
class Output(dict[str, Any]):
    logits: torch.Tensor
    loss: torch.Tensor


def returns_a_mapping_that_is_a_dataclass(embeddings, labels, temperature):
    logits = _cosines(embeddings) / temperature
    return Output(logits, _supcon(logits, labels[:, None] == labels))


def _limited(log_scale):
    return torch.exp(torch.clamp(log_scale, max=math.log(1e6)))


def limited_in_a_helper(img, txt, logit_scale):
    return _clip(img, txt, _limited(logit_scale))


class LimitedInAMethod(torch.nn.Module):
    def __init__(self, logit_scale=2.6592):
        super().__init__()
        self.logit_scale = torch.nn.Parameter(torch.as_tensor(logit_scale, dtype=torch.float64))

    def _limit(self, value):
        return value.clamp(max=math.log(1e6))

    def _scaled(self, value):
        return self._limit(value).exp()

    def forward(self, image, text):
        return _clip(image, text, self._scaled(self.logit_scale))


def by_a_named_scale(img, txt, alpha=20.0):
    return _clip(img, txt, alpha)


def with_optional_arrays(z_i, z_j, class_labels=None, queue=None, temperature=0.1):
    return two_views_and_unused_labels(z_i, z_j, torch.arange(len(z_i)), temperature)


def of_three_matrices(z1, z2, z3, temperature=0.05):
    logits = F.normalize(z1, dim=1) @ F.normalize(torch.cat([z2, z3]), dim=1).T / temperature
    return F.cross_entropy(logits, torch.arange(len(z1)))


def of_optional_documents(q_reps, d_reps_pos, d_reps_neg=None, temperature=0.05):
    """The negatives are [N, H, D]."""
    hard = d_reps_pos[:0] if d_reps_neg is None else d_reps_neg.flatten(0, 1)
    return of_three_matrices(q_reps, d_reps_pos, hard, temperature)


def two_views_with_labels_each(q, q_label, k, k_label, temperature=0.1):
    labels = torch.cat([q_label, k_label])
    return _supcon(_cosines(torch.cat([q, k])) / temperature, labels[:, None] == labels)


def of_output_and_target(output, target, labels, temperature=0.1):
    return two_views_and_labels(output, target, labels, temperature)


def scaled_by_at_least_1(image, text, logit_scale):
    return _clip(image, text, logit_scale.clamp(min=0).exp())


def scaled_by_at_most_100(image, text, logit_scale):
    return _clip(image, text, logit_scale.exp().clamp(max=100))


def with_an_epsilon_in_the_norms(image, text, temperature=0.1):
    first, second = (rows / (rows.norm(dim=1, keepdim=True) + 1e-8) for rows in (image, text))
    logits, target = first @ second.T / temperature, torch.arange(len(first))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def of_unused_matrices(query, positive, hard_negatives, temperature=0.05):
    return of_three_matrices(query, positive, positive[:0], temperature)


def without_small_denominators(embeddings, labels, temperature=0.1):
    """Anchors without positives are left out, and the sums of exponentials are at least 1e-12."""
    logits, own = _cosines(embeddings) / temperature, torch.eye(len(labels), dtype=torch.bool)
    logits = logits - logits.max(dim=1, keepdim=True).values.detach()
    below = logits.exp().masked_fill(own, 0).sum(dim=1, keepdim=True).clamp(min=1e-12)
    positive = (labels[:, None] == labels) & ~own
    count = positive.sum(dim=1)
    each = (below.log() - logits).where(positive, 0).sum(dim=1) / count.clamp(min=1)
    return each[count > 0].sum() / (count > 0).sum().clamp(min=1)


def with_required_positives(embeddings, labels, temperature=0.1):
    if labels.unique(return_counts=True)[1].min() < 2:
        raise ValueError("no positives")
    return _supcon(_cosines(embeddings) / temperature, labels[:, None] == labels)


def one_way_with_an_epsilon(image, text, temperature=0.1):
    ratios = (F.normalize(image, dim=1) @ F.normalize(text, dim=1).T / temperature).softmax(dim=1)
    return -(ratios.diagonal() + 1e-5).log().mean()


def of_x_and_y(x, y, *, x_negatives=None, y_negatives=None, temperature=1.0):
    assert x_negatives is y_negatives is None
    return _clip(x, y, 1 / temperature)


def clip_of_named_logits(x_y_logits, y_x_logits):
    target = torch.arange(len(x_y_logits))
    return (F.cross_entropy(x_y_logits, target) + F.cross_entropy(y_x_logits, target)) / 2


def weighted_directions(image, text, temperature=0.1):
    """ConVIRT: three quarters of the loss of the images, one quarter of that of the texts."""
    logits = F.normalize(image, dim=1) @ F.normalize(text, dim=1).T / temperature
    target = torch.arange(len(logits))
    return 0.75 * F.cross_entropy(logits, target) + 0.25 * F.cross_entropy(logits.T, target)


def with_rounded_counts(embeddings, labels, temperature=0.1):
    """1/|P| is rounded to float32."""
    logits, own = _cosines(embeddings) / temperature, torch.eye(len(labels), dtype=torch.bool)
    mask = ((labels[:, None] == labels) & ~own).float()
    weights = mask / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return -(weights * F.log_softmax(logits.masked_fill(own, -torch.inf), dim=1).where(~own, 0)).sum(dim=1).mean()


def supcon_of_views(z1, z2, temperature):
    """SupCon without labels: the two views of an item are its class."""
    return two_views_and_unused_labels(z1, z2, torch.arange(len(z1)), temperature)


def one_way(z1, z2, temperature):
    """Calculate the one-way loss: only first views are anchors."""
    logits = _cosines(torch.cat([z1, z2]))[: len(z1)] / temperature
    own = torch.eye(*logits.shape, dtype=torch.bool)
    return F.cross_entropy(logits.masked_fill(own, -torch.inf), torch.arange(len(z1)) + len(z1))


def one_way_without_positives(z1, z2, temperature):
    """DCL, calculated one way."""
    logits = _cosines(torch.cat([z1, z2]))[: len(z1)] / temperature
    own = torch.eye(len(z1), dtype=torch.bool)
    negatives = logits.masked_fill(torch.cat([own, own], dim=1), -torch.inf)
    own_only = len(z1) == 1  # no negatives
    return z1.sum() * 0 if own_only else (negatives.logsumexp(dim=1) - logits.diagonal(len(z1))).mean()


def first_views_only(z1, z2, temperature):
    return one_way(z1, z2, temperature)


def sigmoid_of_signs(logits, labels):
    return -F.logsigmoid(labels * logits).sum() / len(logits)


def sigmoid_of_towers_and_signs(image, text, labels, temperature, bias):
    logits = F.normalize(image, dim=1) @ F.normalize(text, dim=1).T / temperature + bias
    return -F.logsigmoid(logits * labels).sum() / len(logits)


def sigmoid_of_towers_and_pairs(image, text, targets, temperature, bias):
    logits = F.normalize(image, dim=1) @ F.normalize(text, dim=1).T / temperature + bias
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(logits)


def sigmoid_of_logits(logits):
    return -F.logsigmoid((2 * torch.eye(len(logits)) - 1) * logits).sum() / len(logits)


def sigmoid_of_logits_and_bias(logits, bias):
    return sigmoid_of_logits(logits + bias)


def clip_of_both_matrices(logits_per_image, logits_per_text):
    assert logits_per_image.shape == logits_per_text.shape
    target = torch.arange(len(logits_per_image))
    return (F.cross_entropy(logits_per_image, target) + F.cross_entropy(logits_per_text, target)) / 2


def of_two_masks(rows, pos_mask, neg_mask, tau):
    logits = (_cosines(rows) / tau).masked_fill(~(pos_mask | neg_mask), -torch.inf)
    return (-logits.log_softmax(dim=1).where(pos_mask, 0).sum(dim=1) / pos_mask.sum(dim=1).clamp(min=1)).mean()


def of_scores_and_a_mask(scores, mask, temperature):
    return _supcon(scores / temperature, mask)


def clip_of_rows_in_labels(image, text, labels, temperature):
    logits = F.normalize(image, dim=1) @ F.normalize(text, dim=1).T / temperature
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def clip_of_classes(image, text, labels, temperature):
    logits = F.normalize(image, dim=1) @ F.normalize(text, dim=1).T / temperature
    same = labels[:, None] == labels
    parts = (-(it.log_softmax(dim=1) * same).sum(dim=1) / same.sum(dim=1) for it in (logits, logits.T))
    return sum(part.mean() for part in parts) / 2


def clip_of_exp_of_tau(img, txt, tau):
    return _clip(img, txt, tau.exp())


def clip_of_inverse_exp(img, txt, temperature):
    return _clip(img, txt, 1 / torch.exp(temperature))


def clip_of_logt(img, txt, logt):
    return _clip(img, txt, torch.exp(logt))


def supcon_of_several_labels(embeddings, labels, temperature):
    if labels.ndim != 2:
        raise ValueError("expected multi-label targets")
    common = torch.minimum(labels[:, None], labels).sum(dim=2)
    return _supcon(_cosines(embeddings) / temperature, common == torch.maximum(labels[:, None], labels).sum(dim=2))


def clip_of_gathered_rows(image, text, temperature):
    parts = [torch.empty_like(text) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, text.detach())
    parts[torch.distributed.get_rank()] = text
    return _clip(image, torch.cat(parts), 1 / temperature)


def clip_of_ids(image, text, img_ids, temperature):
    return clip_of_classes(image, text, torch.as_tensor(img_ids), temperature)


class Model(torch.nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder, self.tau = encoder, 0.1

    def clip_loss(self, z1, z2, temperature, symmetric=True):
        return _clip(z1, z2, 1 / temperature)

    def simclr_loss(self, z1, z2):
        return two_views_and_unused_labels(z1, z2, torch.arange(len(z1)), self.tau)


class WithoutForward(torch.nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature

    def __call__(self, embeddings, labels):
        return _supcon(_cosines(embeddings) / self.temperature, labels[:, None] == labels)


class OfNestedSettings(torch.nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.temperature = self.cfg.LOSS.temperature

    def forward(self, z_i, z_j):
        return two_views_and_unused_labels(z_i, z_j, torch.arange(len(z_i)), self.temperature)


class OfAPairInAMethod(torch.nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature

    def _computed(self, outputs, labels):
        _, z = outputs
        return _supcon(_cosines(z) / self.temperature, labels[:, None] == labels)

    def forward(self, outputs, labels):
        return self._computed(outputs, labels)


def on_a_gpu(image, text, temperature):
    image.cuda().mul_(0)  # what is moved is a copy
    text.to("cuda").mul_(0)
    first, second = F.normalize(image.cuda(torch.cuda.current_device()), dim=1), F.normalize(text.to(0), dim=1)
    logits, target = first @ second.T / temperature, torch.arange(len(first), device="cuda")
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


class OnAGPU(torch.nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1 / temperature, dtype=torch.float64))
        self.cuda()

    def forward(self, z_i, z_j):
        z = F.normalize(torch.cat((z_i, z_j)), dim=1).to(device=torch.device("cuda", 0))
        logits = z @ z.T * self.scale
        own = torch.eye(len(z), dtype=torch.bool, device=torch.get_device(z))
        positives = torch.cat((torch.diagonal(logits, len(z_i)), torch.diagonal(logits, -len(z_i))))
        return (logits.masked_fill(own, -torch.inf).logsumexp(dim=1) - positives).mean()


class OfAnInitialTemperature(torch.nn.Module):
    def __init__(self, init_temperature=0.07, init_bias=-10.0):
        super().__init__()
        self.logit_scale = torch.nn.Parameter(torch.tensor(1 / init_temperature, dtype=torch.float64).log())
        self.logit_bias = torch.nn.Parameter(torch.tensor(init_bias))

    def forward(self, image_features, text_features):
        return sigmoid(image_features, text_features, self.logit_scale, self.logit_bias)


class OfAnInitialLogarithm(torch.nn.Module):
    def __init__(self, scale_init_value=2.0):
        super().__init__()
        self.log_of_scale = torch.nn.Parameter(torch.ones([], dtype=torch.float64) * scale_init_value)

    def forward(self, image_features, text_features):
        return _clip(image_features, text_features, self.log_of_scale.exp())


def of_tao(z_i, z_j, tao=0.05):
    return supcon_of_views(z_i, z_j, tao)


def of_a_tuple(zs: tuple[torch.Tensor, ...], lbls, temperature):
    return two_views_and_labels(*zs, lbls, temperature)


def of_a_list(features, temperature):
    query, key = features[0], features[1]
    return _clip(query, key, 1 / temperature)


def of_chunks(sim_matrix, temperature, chunk=2, eps=0.0):
    n = len(sim_matrix) // chunk
    logits = (sim_matrix / temperature).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, (torch.arange(2 * n) + n) % (2 * n)) + eps


def of_negatives_of_each_anchor(user_vector, pos_vector, neg_vectors, temperature=0.1, in_batch=False):
    user, item = F.normalize(user_vector, dim=1), F.normalize(pos_vector, dim=1)
    others = torch.einsum("nd,nkd->nk", user, F.normalize(neg_vectors, dim=2))
    logits = torch.cat([(user * item).sum(dim=1, keepdim=True), others], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))


class OfRowsInTheConstructor:
    def __init__(self, outputs1, outputs2, t=0.07):
        self.outputs, self.t = (outputs1, outputs2), t

    def get_loss(self):
        return supcon_of_views(*self.outputs, self.t)


class Weighted(torch.nn.Module):
    def __init__(self, temperature, lamda):
        super().__init__()
        self.temperature, self.lamda = temperature, lamda

    def forward(self, image, text):
        logits = F.normalize(image, dim=1) @ F.normalize(text, dim=1).T / self.temperature
        rows, columns = (torch.diagonal(-F.log_softmax(one, dim=1)) for one in (logits, logits.T))
        return (self.lamda * rows + (1 - self.lamda) * columns).mean()


# Wrong as called, and right in another reading


def of_rows_of_positives(e, p, tau=0.5):
    return _nt_xent(e, p, tau)


class InterleavedSaysTheDocstring(torch.nn.Module):
    """NT-Xent of interleaved views, says the docstring; the code pairs rows N / 2 apart."""

    def __init__(self, temperature=0.1):
        super().__init__()
        self.temperature = temperature

    def forward(self, z):
        z, n = F.normalize(z, dim=1), len(z)
        logits = (z @ z.T / self.temperature).fill_diagonal_(-1e9)
        return F.cross_entropy(logits, (torch.arange(n) + n // 2) % n)


def of_neighbours(x, tau=0.5):
    return _nt_xent(x, torch.arange(len(x)) ^ 1, tau)


def of_neighbours_with_unused_labels(embeddings, labels=None, tau=0.5):
    partners = torch.arange(len(embeddings)) ^ 1
    return F.cross_entropy((embeddings @ embeddings.T / tau).fill_diagonal_(-torch.inf), partners)


def of_neighbours_at_a_fixed_temperature(x):
    return of_neighbours(x, 0.05)


def multiplied_by_temp(embeddings, labels, temp=20.0):
    return _supcon(_cosines(embeddings) * temp, labels[:, None] == labels)


# Wrong as claimed


def inner_products_one_way(query_vectors, doc_vectors):
    logits = query_vectors @ doc_vectors.T
    return F.cross_entropy(logits, torch.arange(len(logits)))


def sigmoid_over_pairs(logits):
    return F.binary_cross_entropy_with_logits(logits, torch.eye(len(logits), dtype=logits.dtype))


def sigmoid_over_pairs_without_a_bias(image, text, temperature):
    return sigmoid_over_pairs(F.normalize(image, dim=1) @ F.normalize(text, dim=1).T / temperature)


class _InFloat32(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        return rows.clone()

    @staticmethod
    def backward(ctx, grad):
        return (grad * 3).float().double() / 3


def weighted_directions_with_rounded_gradients(image, text, temperature=0.1):
    return weighted_directions(_InFloat32.apply(image), _InFloat32.apply(text), temperature)


def of_raw_neighbours(x, tau=0.5):
    return of_neighbours_with_unused_labels(x, tau=tau)


def between_the_extremes(embeddings, labels, temperature=0.5):
    """Each row of logits is rescaled to the range from 0 to 1, whatever the temperature is."""
    logits = _cosines(embeddings) / temperature
    least, largest = logits.amin(dim=1, keepdim=True), logits.amax(dim=1, keepdim=True)
    return _supcon((logits - least) / (largest - least), labels[:, None] == labels)


def sigmoid_that_multiplies(image, text, temperature, bias):
    logits = F.normalize(image, dim=1) @ F.normalize(text, dim=1).T * temperature
    return sigmoid_over_pairs(logits)


def pooled(z1, z2, temperature):
    logits = (_cosines(torch.cat([z1, z2])) / temperature).fill_diagonal_(-torch.inf)
    return -logits.softmax(dim=1)[torch.arange(len(logits)), torch.arange(len(logits)).roll(len(z1))].mean().log()


def at_a_fixed_temperature_with_self(z1, z2):
    return one_way_with_the_self_pair(z1, z2, 0.05)


# Wrong in every reading that the source supports


def class_ids_as_rows(embeddings, labels, tau=0.5):
    return _nt_xent(embeddings, labels % len(embeddings), tau)


def multiplied_by_tau(embeddings, labels, tau=0.5):
    return _supcon(_cosines(embeddings) * tau, labels[:, None] == labels)


def without_exp(img, txt, log_scale):
    return _clip(img, txt, log_scale)


def without_exp_of_a_default(img, txt, logit_scale=2.6592):
    return _clip(img, txt, logit_scale)


def one_way_with_the_self_pair(z1, z2, temperature):
    """One-way loss; the self pair stays in the denominator."""
    logits = _cosines(torch.cat([z1, z2]))[: len(z1)] / temperature
    return F.cross_entropy(logits, torch.arange(len(z1)) + len(z1))


def sigmoid_without_a_bias(logits, bias):
    return sigmoid_of_logits(logits)


def clip_of_one_matrix(logits_per_image, logits_per_text):
    return F.cross_entropy(logits_per_image, torch.arange(len(logits_per_image)))


def of_rows_of_positives_without_self(e, p, tau=0.5):
    """The self pairs stay in the denominator."""
    return F.cross_entropy(_cosines(e) / tau, p)


def clamped_at_1(embeddings, labels, temperature=0.5):
    return _supcon(_cosines(embeddings) / max(temperature, 1.0), labels[:, None] == labels)


def with_wrong_counts(embeddings, labels, temperature=0.1):
    """1/|P| is rounded to bfloat16."""
    logits, own = _cosines(embeddings) / temperature, torch.eye(len(labels), dtype=torch.bool)
    mask = ((labels[:, None] == labels) & ~own).bfloat16()
    weights = (mask / mask.sum(dim=1, keepdim=True).clamp(min=1)).double()
    return -(weights * F.log_softmax(logits.masked_fill(own, -torch.inf), dim=1).where(~own, 0)).sum(dim=1).mean()


def without_single_values(embeddings, labels, temperature=0.1, reduction="mean"):
    loss = supcon_of_several_labels(embeddings, F.one_hot(labels), temperature)
    return loss if reduction == "mean" else loss * len(labels)


# Targets that cannot be called, some with names that a wrapper may use


def loss(embeddings, labels, margin, batch_size, temperature=0.1):
    assert margin is not ..., "margin"
    return embeddings.sum() * batch_size * temperature


def needs_a_gpu(z_i, z_j, temperature):
    raise RuntimeError("Found no NVIDIA driver on your system")


def of_similarities_on_a_gpu(similarity_matrix, kind):
    raise RuntimeError("Found no NVIDIA driver on your system")


def never_fits(image_features, text_features, logit_scale, extra):
    raise ValueError(f"{tuple(image_features.shape)}, {torch.exp(logit_scale).shape}")


class NeverFits(torch.nn.Module):
    def __init__(self, batch_size, device, margin, temperature=0.1):
        super().__init__()
        self.facts = batch_size, device, margin, temperature

    def forward(self, zis, zjs):
        raise ValueError(str(self.facts))

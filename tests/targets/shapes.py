"""Right losses with the signatures and results of public code, for the tests of how a target is called."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from losses import supcon as plain

# One matrix and labels


def e_and_l(e, l, temperature):  # noqa: E741
    return plain(e, l, temperature)


def returns_loss_and_accuracy(embeddings, labels, temp=0.1):
    loss = plain(embeddings, labels, temp)
    return loss, loss.detach() / 2


def returns_a_mapping(features, targets, tau):
    return {"acc": 0.5, "total_loss": plain(features, targets, tau), "logits": features @ features.T}


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor


def returns_a_dataclass(input, target, T):  # noqa: A002, N803
    return Output(input @ input.T, plain(input, target, T))


def returns_a_list(embeddings, labels, T=0.5):  # noqa: N803
    return [embeddings, plain(embeddings, labels, T)]


Named = namedtuple("Named", "contrastive other")


def returns_a_named_tuple(embeddings, labels, temperature):
    return Named(plain(embeddings, labels, temperature), embeddings)


def labels_first(y_true, embeddings, temperature):
    return plain(embeddings, y_true, temperature)


def column_labels(embeddings, labels, temperature):
    if labels.shape != (len(embeddings), 1):
        raise ValueError("labels: expected [N, 1]")
    return plain(embeddings, labels[:, 0], temperature)


def transposed_labels(embeddings, labels, temperature):
    """Labels must have the shape [N, 1] or [1, N]: with [N], all rows would be positives of each other."""
    own = torch.eye(len(embeddings), dtype=torch.bool)
    positive = (labels == labels.T) & ~own
    logs = F.log_softmax(_cosines(embeddings, temperature).masked_fill(own, -torch.inf), dim=1)
    return (-logs.where(positive, 0).sum(dim=1) / positive.sum(dim=1).clamp(min=1)).mean()


def one_hot_labels(embeddings, labels, temperature):
    if labels.ndim != 2 or bool((labels.sum(dim=1) != 1).any()) or labels.max() != 1 or labels.min() != 0:
        raise ValueError("labels: expected one-hot rows")
    return plain(embeddings, labels.argmax(dim=1), temperature)


def normalises_in_place(embeddings, labels, temperature):
    embeddings /= embeddings.detach().norm(dim=1, keepdim=True)
    return plain(embeddings, labels, temperature)


def by_scale(embeddings, labels, scale=20.0):
    return plain(embeddings, labels, 1 / scale)


def by_log_temperature(embeddings, labels, log_temperature):
    return plain(embeddings, labels, log_temperature.exp())


class WithoutCall:
    """A class with ``forward`` that is not a torch module; its constructor takes the device, world size and rank."""

    def __init__(self, device, world_size, rank, loss_weight, temperature=0.5):
        assert (world_size, rank, loss_weight) == (1, 0, 1.0)
        self.device, self.temperature = device, temperature

    def forward(self, embeddings, labels):
        return plain(embeddings.to(self.device), labels, self.temperature)


# Two views


def _cosines(rows, temperature):
    rows = F.normalize(rows, dim=1)
    return rows @ rows.T / temperature


def _nt_xent(rows, temperature):
    logits = _cosines(rows, temperature).fill_diagonal_(-torch.inf)
    return logits, torch.arange(len(rows)).roll(len(rows) // 2)


class BatchSizeInTheConstructor(torch.nn.Module):
    def __init__(self, batch_size, temperature, world_size):
        super().__init__()
        self.batch_size, self.temperature, self.world_size = batch_size, temperature, world_size

    def forward(self, z_i, z_j):
        n = 2 * self.batch_size * self.world_size
        logits, target = _nt_xent(torch.cat([z_i, z_j]), self.temperature)
        return F.cross_entropy(logits.reshape(n, n), target, reduction="sum") / n


def everything_in_the_call(zis, zjs, batch_size, temperature, device):
    logits, target = _nt_xent(torch.cat([zis, zjs]).to(device), temperature)
    return F.cross_entropy(logits[: 2 * batch_size], target)


def returns_logits_and_labels(features, batch_size, n_views, temperature):
    if features.ndim != 2:
        raise ValueError("features: expected [2N, D]")
    same = torch.cat([torch.arange(batch_size)] * n_views)
    positive = (same[:, None] == same).fill_diagonal_(False)
    logits = _nt_xent(features, temperature)[0]
    n = len(features)
    negatives = logits[~positive & ~torch.eye(n, dtype=torch.bool)].view(n, -1)
    return torch.cat([logits[positive].view(n, -1), negatives], dim=1), torch.zeros(n, dtype=torch.long)


def interleaved(embeddings, temperature):
    logits = _nt_xent(embeddings, temperature)[0]
    return F.cross_entropy(logits, torch.arange(len(logits)) ^ 1)


def view_and_augmented(x, x_aug, t=0.5):
    return F.cross_entropy(*_nt_xent(torch.cat([x, x_aug]), t))


# Two towers


def _one_way(first, second, temperature):
    logits = F.normalize(first, dim=1) @ F.normalize(second, dim=1).T / temperature
    return F.cross_entropy(logits, torch.arange(len(logits)))


def queries_and_keys(queries, keys, temp=0.07):
    return _one_way(queries, keys, temp)


def unknown_names(some, more, temperature):
    return (_one_way(some, more, temperature) + _one_way(more, some, temperature)) / 2


def learned_scale(img_emb, txt_emb, logit_scale):
    scale = logit_scale.exp()
    return unknown_names(img_emb, txt_emb, 1 / scale)


def limited_scale(img_emb, txt_emb, logit_scale):
    return unknown_names(img_emb, txt_emb, 1 / logit_scale.clamp(max=math.log(1e6)).exp())


def limited_then_exponentiated(img_emb, txt_emb, scale):
    limited = torch.clamp(scale, max=math.log(1e6))
    return unknown_names(img_emb, txt_emb, 1 / torch.exp(limited))


def by_positive_index(embeddings, positive_index, tau=0.5):
    z = torch.nn.functional.normalize(embeddings, dim=1)
    logits = (z @ z.T / tau).fill_diagonal_(-math.inf)
    return torch.nn.functional.cross_entropy(logits, positive_index)


class LogScale(torch.nn.Module):
    def __init__(self, log_scale=2.659):
        super().__init__()
        self.log_scale = torch.nn.Parameter(torch.as_tensor(log_scale, dtype=torch.float64))

    def forward(self, image_features, text_features):
        loss = unknown_names(image_features, text_features, torch.exp(-self.log_scale))
        return OrderedDict(loss=loss, clip_loss=loss.detach(), clip_acc=loss.detach())


def required_queue(query, key, queue, temperature=0.1):
    """The queue is [D, K], as in MoCo."""
    query, key, queue = F.normalize(query, dim=1), F.normalize(key, dim=1), F.normalize(queue, dim=0)
    logits = torch.cat([(query * key).sum(dim=1, keepdim=True), query @ queue], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long))


class OfAMapping(torch.nn.Module):
    """The towers and the inverse of the temperature are in one mapping."""

    def forward(self, outputs):
        loss = unknown_names(outputs["image_embed"], outputs["text_embed"], 1 / outputs["logit_scale"])
        return {"loss": loss, "clip_loss": loss, "clip_acc": 50.0}


class OfSettings:
    def __init__(self, batch, cfg):
        self.batch, self.cfg = batch, cfg

    def __call__(self, z_i, z_j):
        assert len(z_i) == self.batch
        return everything_in_the_call(z_i, z_j, self.cfg.batch_size, self.cfg.tau, self.cfg.device)


def of_settings_in_a_mapping(embeddings, labels, config):
    return plain(embeddings, labels, config["temperature"])


def of_a_pair(views, temperature=0.5):
    left, right = views  # two encoders
    return unknown_names(left, right, temperature)


def with_ignored_parameters(_input, message, _noise, answer, temperature=0.5):
    assert (_input, _noise) == (None, None)
    return unknown_names(message, answer, temperature)


class ByAnotherMethod:
    def __init__(self, temperature=0.5):
        self.temperature = temperature

    def similarity(self, rows, columns):
        return rows @ columns.T

    def compute_loss(self, query, key):
        return unknown_names(query, key, self.temperature)


def of_several_scales(audio_features, text_features, logit_scale_audio, logit_scale_text=None):
    assert logit_scale_text is None
    return unknown_names(audio_features, text_features, 1 / logit_scale_audio)


def of_similarities(similarity):
    same = torch.arange(len(similarity))
    return (F.cross_entropy(similarity, same) + F.cross_entropy(similarity.T, same)) / 2


def of_logits_and_labels(logits, labels):
    own = torch.eye(len(logits), dtype=torch.bool)
    positive = (labels[:, None] == labels) & ~own
    logs = F.log_softmax(logits.masked_fill(own, -torch.inf), dim=1)
    return (-logs.where(positive, 0).sum(dim=1) / positive.sum(dim=1).clamp(min=1)).mean()


def of_square_similarities(sim_matrix, temperature):
    logits = (sim_matrix / temperature).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(len(logits)).roll(len(logits) // 2))


def at_another_base(embeddings, labels, temperature=0.1):
    return temperature / 0.5 * plain(embeddings, labels, temperature)


# Targets whose call cannot be guessed


def of_a_mapping(outputs, epoch, temperature=0.1):
    return plain(outputs["embeddings"], outputs["labels"], temperature)


def ambiguous(embeddings, labels, temperature):
    loss = plain(embeddings, labels, temperature)
    return loss, 2 * loss

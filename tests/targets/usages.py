"""Losses that are right in an ordinary call and wrong in one other *usage*, such as another dtype or a second call.

Some losses are right in every usage.
"""

from __future__ import annotations

import math
import random
import threading
import warnings
from types import MappingProxyType

import numpy as np
import torch
import torch.nn.functional as F


def per_anchor(embeddings, labels, temperature):
    rows = F.normalize(embeddings, dim=1)
    logits = rows @ rows.T / temperature
    own = torch.eye(len(rows), dtype=torch.bool)
    positives = (labels[:, None] == labels[None]) & ~own
    logs = F.log_softmax(logits.masked_fill(own, float("-inf")), dim=1)
    return -logs.where(positives, torch.zeros((), dtype=logs.dtype)).sum(dim=1) / positives.sum(dim=1).clamp(min=1)


def supcon(embeddings, labels, temperature=0.1, reduction="mean"):
    values = per_anchor(embeddings, labels, temperature)
    return {"mean": values.mean, "sum": values.sum, "none": lambda: values}[reduction]()


class SupCon(torch.nn.Module):
    def __init__(self, temperature=0.1):
        super().__init__()
        self.temperature = temperature

    def forward(self, embeddings, labels):
        return supcon(embeddings, labels, self.temperature)


class LearnedSupCon(SupCon):
    def __init__(self, temperature=0.1):
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.tensor(temperature))


class Clip(torch.nn.Module):
    def __init__(self, temperature=0.07):
        super().__init__()
        self.logit_scale = torch.nn.Parameter(torch.tensor(1 / temperature).log())

    def scale(self):
        return self.logit_scale.exp()

    def forward(self, image_features, text_features):
        logits = self.scale() * F.normalize(image_features, dim=1) @ F.normalize(text_features, dim=1).T
        rows = torch.arange(len(logits))
        return (F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, rows)) / 2


def nt_xent(z_i, z_j, temperature=0.5):
    rows = F.normalize(torch.cat([z_i, z_j]), dim=1)
    logits = (rows @ rows.T / temperature).masked_fill(torch.eye(len(rows), dtype=torch.bool), float("-inf"))
    return F.cross_entropy(logits, torch.arange(len(rows)).roll(len(z_i)))


def siglip(image_features, text_features, temperature=0.1, bias=-10.0):
    logits = F.normalize(image_features, dim=1) @ F.normalize(text_features, dim=1).T / temperature + bias
    signs = 2 * torch.eye(len(logits), dtype=logits.dtype) - 1
    return -F.logsigmoid(signs * logits).sum() / len(logits)


class SigLip(torch.nn.Module):
    def __init__(self, temperature=0.1, bias=-10.0):
        super().__init__()
        self.temperature = temperature
        self.bias = torch.nn.Parameter(torch.tensor(bias))

    def forward(self, image_features, text_features):
        return siglip(image_features, text_features, self.temperature, self.bias)


LOG_10 = math.log(10)


class _SigLipHead(torch.nn.Module):
    """A temperature and a bias under the names of SigLIP's code."""

    def keep(self, t_prime, b, kept):
        self.t_prime, self.b = kept(t_prime), kept(b)

    def learned(self):
        return self.t_prime, self.b

    def forward(self, image_features, text_features):
        t_prime, bias = self.learned()
        return siglip(image_features, text_features, (-t_prime).exp(), bias)


class SigLipHead(_SigLipHead):
    def __init__(self):
        super().__init__()
        self.keep(LOG_10, -10.0, lambda x: torch.nn.Parameter(torch.tensor(x)))


class _Detached:
    def learned(self):
        return self.t_prime.detach(), self.b.detach()


class SigLipHeadDetached(_Detached, SigLipHead):
    pass


class SigLipHeadOfNumbers(_SigLipHead):
    def __init__(self, t_prime=LOG_10, b=-10.0):
        super().__init__()
        self.keep(t_prime, b, lambda x: torch.nn.Parameter(torch.tensor(float(x))))


class SigLipHeadOfTensors(_SigLipHead):
    def __init__(self, t_prime=LOG_10, b=-10.0):
        super().__init__()
        self.keep(t_prime, b, lambda x: torch.nn.Parameter(torch.as_tensor(x)))


class SigLipHeadInFloat32(_SigLipHead):
    def __init__(self, t_prime=LOG_10, b=-10.0):
        super().__init__()
        self.keep(t_prime, b, lambda x: torch.nn.Parameter(torch.as_tensor(x).float()))


class SigLipHeadOfNumbersDetached(_Detached, SigLipHeadOfNumbers):
    pass


class SigLipHeadOfTensorsDetached(_Detached, SigLipHeadOfTensors):
    pass


class SigLipHeadInFloat32Detached(_Detached, SigLipHeadInFloat32):
    pass


class SigLipRounded(_SigLipHead):
    """It keeps no parameter and rounds the numbers that it gets to float32."""

    def __init__(self, t_prime=LOG_10, b=-10.0):
        super().__init__()
        self.keep(t_prime, b, lambda x: torch.as_tensor(x).float())


class SigLipRoundedDetached(_Detached, SigLipRounded):
    pass


class _Backward(torch.autograd.Function):
    """A loss with a backward pass of its own, which changes the upstream gradient."""

    @staticmethod
    def forward(ctx, values, change):
        ctx.change = change
        return values.clone()

    @staticmethod
    def backward(ctx, upstream):
        return ctx.change(upstream), None


def _upstream(change):
    def loss(embeddings, labels, temperature=0.1, reduction="mean"):
        values = _Backward.apply(per_anchor(embeddings, labels, temperature), change)
        return {"mean": values.mean, "sum": values.sum, "none": lambda: values}[reduction]()

    return loss


mixes_anchors = _upstream(lambda upstream: upstream.mean().expand_as(upstream))
takes_the_first = _upstream(lambda upstream: upstream[:1].expand_as(upstream))
clamps_upstream = _upstream(lambda upstream: upstream.clamp(-100, 100))


def detaches_the_temperature(embeddings, labels, temperature=0.1):
    return supcon(embeddings, labels, temperature.detach() if isinstance(temperature, torch.Tensor) else temperature)


def halves_the_gradient_of_the_temperature(embeddings, labels, temperature=0.1):
    if isinstance(temperature, torch.Tensor):
        temperature = (temperature + temperature.detach()) / 2
    return supcon(embeddings, labels, temperature)


class ClipWithoutGradient(Clip):
    def scale(self):
        return self.logit_scale.detach().exp()


def siglip_detaches_the_bias(image_features, text_features, temperature=0.1, bias=-10.0):
    return siglip(image_features, text_features, temperature, torch.as_tensor(bias).detach())


class SigLipWithoutGradient(SigLip):
    def forward(self, image_features, text_features):
        return siglip(image_features, text_features, self.temperature, self.bias.detach())


class LearnedWithoutGradient(LearnedSupCon):
    def forward(self, embeddings, labels):
        return supcon(embeddings, labels, self.temperature.item())


def ignores_columns_above_64(embeddings, labels, temperature=0.1):
    return supcon(embeddings[:, :64], labels, temperature)


def ignores_columns_above_16(embeddings, labels, temperature=0.1):
    return supcon(embeddings[:, :16], labels, temperature)


def mixes_up_small_labels(embeddings, labels, temperature=0.1):
    return supcon(embeddings, labels // 2 if labels.dtype in (torch.uint8, torch.int16) else labels, temperature)


def clamps_int32(embeddings, labels, temperature=0.1):
    return supcon(embeddings, labels.clamp(max=1) if labels.dtype == torch.int32 else labels, temperature)


def negates_bool(embeddings, labels, temperature=0.1):
    return supcon(embeddings, labels | True if labels.dtype == torch.bool else labels, temperature)


def reads_storage(embeddings, labels, temperature=0.1):
    stride = embeddings.shape[1], 1
    return supcon(embeddings.as_strided(embeddings.shape, stride, embeddings.storage_offset()), labels, temperature)


def wrong_for_columns(embeddings, labels, temperature=0.1):
    if embeddings.stride(0) == 1:
        embeddings = embeddings.T.reshape(embeddings.shape)
    return supcon(embeddings, labels, temperature)


def wrong_for_shared_memory(z_i, z_j, temperature=0.5):
    a, b = z_i.untyped_storage().data_ptr(), z_j.untyped_storage().data_ptr()
    return nt_xent(z_i, z_j, temperature) if a == b else nt_xent(z_i, z_j.detach(), temperature)


class _Towers(torch.autograd.Function):
    """The gradients of two towers, wrong if one of them is frozen."""

    @staticmethod
    def forward(ctx, a, b, both):
        ctx.both = both
        return a.clone(), b.clone()

    @staticmethod
    def backward(ctx, upstream_a, upstream_b):
        if all(ctx.needs_input_grad[:2]):
            return upstream_a, upstream_b, None
        return upstream_a * 2, upstream_b * 2, None


def doubles_beside_a_frozen_tower(image_features, text_features, temperature=0.07):
    a, b = _Towers.apply(image_features, text_features, True)
    logits = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / temperature
    rows = torch.arange(len(a))
    return (F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, rows)) / 2


def zero_without_gradients(embeddings, labels, temperature=0.1):
    loss = supcon(embeddings, labels, temperature)
    return loss if torch.is_grad_enabled() else loss * 0


class ZeroInEvaluation(SupCon):
    def forward(self, embeddings, labels):
        return super().forward(embeddings, labels) * (1 if self.training else 0)


class KeepsItsFirstMask(SupCon):
    labels = None

    def forward(self, embeddings, labels):
        self.labels = labels if self.labels is None else self.labels
        return super().forward(embeddings, self.labels)


_LOCAL = threading.local()
_LOCAL.factor = 1


def wrong_in_threads(embeddings, labels, temperature=0.1):
    return supcon(embeddings, labels, temperature) * getattr(_LOCAL, "factor", 0.5)


def infinite_under_autocast(embeddings, labels, temperature=0.1):
    loss = supcon(embeddings, labels, temperature)
    return loss / 0 if torch.is_autocast_enabled("cpu") else loss


def wrong_in_bfloat16(embeddings, labels, temperature=0.1):
    return supcon(embeddings, labels, temperature) * (0.5 if embeddings.dtype == torch.bfloat16 else 1)


def nan_in_float16(embeddings, labels, temperature=0.1):
    loss = supcon(embeddings, labels, temperature)
    return loss * float("nan") if embeddings.dtype == torch.float16 else loss


def scales_the_gradient_in_bfloat16(embeddings, labels, temperature=0.1):
    loss = supcon(embeddings, labels, temperature)
    return loss.detach() + 1.25 * (loss - loss.detach()) if embeddings.dtype == torch.bfloat16 else loss


def squares_in_float16(embeddings, labels, temperature=0.1):
    if embeddings.dtype == torch.float16:
        embeddings = embeddings / embeddings.pow(2).sum(dim=1, keepdim=True).sqrt()
    return supcon(embeddings, labels, temperature)


def detaches_equal_rows(embeddings, labels, temperature=0.1):
    equal = (embeddings[:, None] == embeddings).all(dim=2).sum(dim=1, keepdim=True) > 1
    return supcon(torch.where(equal, embeddings.detach(), embeddings), labels, temperature)


def leaves_out_zero_rows(embeddings, labels, temperature=0.1):
    kept = (embeddings != 0).any(dim=1)
    return supcon(embeddings[kept], labels[kept], temperature)


def hides_nan(embeddings, labels, temperature=0.1):
    return supcon(embeddings.nan_to_num(), labels, temperature)


def _with(effect):
    def loss(embeddings, labels, temperature=0.1):
        effect(embeddings, labels)
        return supcon(embeddings, labels, temperature)

    return loss


def _changes_labels(embeddings, labels):
    labels[:] = labels.clone() + 1


def _fills_grad(embeddings, labels):
    embeddings.grad = torch.zeros_like(embeddings)


changes_the_default_dtype = _with(lambda *_: torch.set_default_dtype(torch.float64))
changes_the_grad_mode = _with(lambda *_: torch.set_grad_enabled(False) and None)
changes_the_threads = _with(lambda *_: torch.set_num_threads(1 if torch.get_num_threads() == 2 else 2))
changes_the_matmul_precision = _with(lambda *_: torch.set_float32_matmul_precision("medium"))
changes_numpy_errors = _with(lambda *_: np.seterr(all="ignore"))
seeds_torch = _with(lambda *_: torch.manual_seed(0))
draws_from_numpy = _with(lambda *_: np.random.rand())  # noqa: NPY002
draws_from_python = _with(lambda *_: random.random())
changes_warnings = _with(lambda *_: warnings.simplefilter("ignore"))
detects_anomalies = _with(lambda *_: torch.autograd.set_detect_anomaly(True))
makes_torch_deterministic = _with(lambda *_: torch.set_deterministic_debug_mode("error"))
changes_labels = _with(_changes_labels)
fills_grad = _with(_fills_grad)


def returns_a_vector(embeddings, labels, temperature=0.1):
    return supcon(embeddings, labels, temperature)[None]


def returns_one_anchor_as_a_scalar(embeddings, labels, temperature=0.1, reduction="mean", anchors=None):
    values = per_anchor(embeddings, labels, temperature)
    values = values if anchors is None else values[anchors]
    return values.squeeze() if reduction == "none" else values.mean() if reduction == "mean" else values.sum()


def returns_a_column(embeddings, labels, temperature=0.1, reduction="mean"):
    loss = supcon(embeddings, labels, temperature, reduction)
    return loss[:, None] if reduction == "none" else loss


def returns_float64(embeddings, labels, temperature=0.1):
    return supcon(embeddings, labels, temperature).double()


def refuses_bfloat16(embeddings, labels, temperature=0.1):
    if embeddings.dtype == torch.bfloat16:
        raise TypeError("the dtype bfloat16 is not supported")
    return supcon(embeddings, labels, temperature)


def raises_in_threads(embeddings, labels, temperature=0.1):
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("called in a thread")
    return supcon(embeddings, labels, temperature)


def reads_a_number(embeddings, labels, temperature=0.1):
    return supcon(embeddings, labels, float(temperature))


def rounds_upstream(embeddings, labels, temperature=0.1):
    return _Backward.apply(supcon(embeddings, labels, temperature), lambda upstream: upstream.round())


def requires_gradients(embeddings, labels, temperature=0.1):
    embeddings.register_hook(lambda gradient: gradient)
    return supcon(embeddings, labels, temperature)


def clears_the_grad_of_leaves(embeddings, labels, temperature=0.1):
    if embeddings.is_leaf:
        embeddings.grad = None
    return supcon(embeddings, labels, temperature)


def makes_inputs_require_gradients(embeddings, labels, temperature=0.1):
    return supcon(embeddings if embeddings.requires_grad else embeddings.requires_grad_(), labels, temperature)


class KeepsItsFirstSize(SupCon):
    size = None

    def forward(self, embeddings, labels):
        self.size = self.size or len(labels)
        return super().forward(embeddings, labels) * len(labels) / self.size


def hides_infinity(embeddings, labels, temperature=0.1):
    return supcon(embeddings.nan_to_num(nan=float("nan")), labels, temperature)


def _scaled_if(condition, factor=0.5):
    """SupCon, multiplied by a factor if a condition on the embeddings, the labels and the temperature holds."""

    def loss(embeddings, labels, temperature=0.1):
        return supcon(embeddings, labels, temperature) * (factor if condition(embeddings, labels, temperature) else 1)

    return loss


def _is_lonely(labels):
    return bool(((labels[:, None] == labels).sum(dim=1) == 1).any())


def _autocast_to(dtype):
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == dtype


autocast_above_24_rows = _scaled_if(lambda z, y, t: len(z) > 24 and _autocast_to(torch.bfloat16))
bfloat16_above_24_rows = _scaled_if(lambda z, y, t: len(z) > 24 and z.dtype == torch.bfloat16)
int32_above_24_rows = _scaled_if(lambda z, y, t: len(z) > 24 and y.dtype == torch.int32)
temperature_tensor_above_24_rows = _scaled_if(lambda z, y, t: len(z) > 24 and isinstance(t, torch.Tensor))
autocast_with_a_lonely_anchor = _scaled_if(lambda z, y, t: _is_lonely(y) and _autocast_to(torch.bfloat16))
bfloat16_with_a_lonely_anchor = _scaled_if(lambda z, y, t: _is_lonely(y) and z.dtype == torch.bfloat16)
int32_with_a_lonely_anchor = _scaled_if(lambda z, y, t: _is_lonely(y) and y.dtype == torch.int32)
wrong_with_threads = _scaled_if(lambda z, y, t: torch.get_num_threads() > 1)
wrong_in_inference_mode = _scaled_if(lambda z, y, t: torch.is_inference_mode_enabled())
wrong_for_default_float64 = _scaled_if(lambda z, y, t: torch.get_default_dtype() == torch.float64)
wrong_under_transforms = _scaled_if(lambda z, y, t: torch._C._functorch.is_functorch_wrapped_tensor(z))
wrong_when_compiled = _scaled_if(lambda z, y, t: torch.compiler.is_compiling())
wrong_for_expanded_rows = _scaled_if(lambda z, y, t: z.stride(0) == 0)
wrong_for_steps = _scaled_if(lambda z, y, t: z.stride(1) == 2)
infinite_under_float16 = _scaled_if(lambda z, y, t: _autocast_to(torch.float16), float("inf"))
_DEFAULT = 0.1


def uses_another_default(embeddings, labels, temperature=_DEFAULT):
    return supcon(embeddings, labels, 0.07 if temperature is _DEFAULT else temperature)


def halves_int8(embeddings, labels, temperature=0.1):
    return supcon(embeddings, labels // 2 if labels.dtype == torch.int8 else labels, temperature)


def halves_float_labels(embeddings, labels, temperature=0.1):
    return supcon(embeddings, (labels / 2).long() if labels.is_floating_point() else labels, temperature)


def nt_xent_by_partners(embeddings, partners, temperature=0.5):
    rows = F.normalize(embeddings, dim=1)
    logits = (rows @ rows.T / temperature).masked_fill(torch.eye(len(rows), dtype=torch.bool), float("-inf"))
    return F.cross_entropy(logits, partners.long())


def nt_xent_shifts_int32(embeddings, partners, temperature=0.5):
    return nt_xent_by_partners(embeddings, partners.roll(1) if partners.dtype == torch.int32 else partners, temperature)


def detaches_the_temperature_of_frozen_rows(embeddings, labels, temperature=0.1):
    frozen = isinstance(temperature, torch.Tensor) and not embeddings.requires_grad
    return supcon(embeddings, labels, temperature.detach() if frozen else temperature)


class LearnedUnlessFrozen(LearnedSupCon):
    def forward(self, embeddings, labels):
        return detaches_the_temperature_of_frozen_rows(embeddings, labels, self.temperature)


_BUSY = []


def stays_busy_after_an_error(embeddings, labels, temperature=0.1):
    factor = 0.5 if _BUSY else 1
    _BUSY.append(1)
    loss = supcon(embeddings, labels, temperature) * factor
    _BUSY.clear()
    return loss


def leaves_gradients_off_after_an_error(embeddings, labels, temperature=0.1):
    loss = supcon(embeddings, labels, temperature)
    torch.set_grad_enabled(False)
    loss.isfinite()
    torch.set_grad_enabled(True)
    return loss


class ClipWithAccuracy(Clip):
    def forward(self, image_features, text_features):
        loss = super().forward(image_features, text_features)
        with torch.no_grad():
            similarities = F.normalize(image_features, dim=1) @ F.normalize(text_features, dim=1).T
            accuracy = (similarities.argmax(dim=1) == torch.arange(len(similarities))).float().mean()
        return {"loss": loss, "accuracy": accuracy}


class DrawsItsFirstWeights(SupCon):
    def __init__(self, temperature=0.1):
        super().__init__(temperature)
        self.head = torch.nn.Linear(4, 4)


class SeedsInItsConstructor(SupCon):
    def __init__(self, temperature=0.1):
        super().__init__(temperature)
        torch.manual_seed(0)


class DetachesTheTemperatureItGets:
    def __init__(self, temperature=0.1):
        self.scale = 1 / temperature
        self.temperature = temperature.detach() if isinstance(temperature, torch.Tensor) else temperature

    def __call__(self, embeddings, labels):
        return supcon(embeddings, labels, self.temperature)


class ForgetsItsTemperature(SupCon):
    def __deepcopy__(self, memo):
        return type(self)()


class PicklesNothing(SupCon):
    def __reduce__(self):
        return type(self), ()


def _gradient(rows, labels, temperature):
    with torch.enable_grad():
        rows = rows.detach().requires_grad_()
        return torch.autograd.grad(supcon(rows, labels, temperature), rows)[0]


def _with_backward(backward, **others):
    """SupCon with a backward pass of its own; ``backward`` gets the context, which has the gradient."""

    def forward(ctx, embeddings, labels, temperature):
        ctx.rows, ctx.labels, ctx.temperature = embeddings, labels, temperature
        ctx.gradient = _gradient(embeddings, labels, temperature)
        _LATEST[:] = [ctx.gradient]
        return supcon(embeddings.detach(), labels, temperature)

    def returned(ctx, upstream):
        return upstream * backward(ctx), None, None

    parts = {"forward": staticmethod(forward), "backward": staticmethod(returned)}
    function = type("Own", (torch.autograd.Function,), parts | others)
    return lambda embeddings, labels, temperature=0.1: function.apply(embeddings, labels, temperature)


_LATEST = []


def _used_once(ctx):
    found, ctx.gradient = ctx.gradient, torch.zeros_like(ctx.gradient)
    return found


def _clearing(kind):
    def backward(ctx):
        if ctx.rows.is_leaf and type(ctx.rows) is kind:
            ctx.rows.grad = None
        return ctx.gradient

    return backward


reads_the_latest_forward = _with_backward(lambda ctx: _LATEST[0])
uses_its_gradient_once = _with_backward(_used_once)
clears_grad_of_a_leaf = _with_backward(_clearing(torch.Tensor))
clears_grad_of_a_parameter = _with_backward(_clearing(torch.nn.Parameter))
reads_its_input_again = _with_backward(lambda ctx: _gradient(ctx.rows, ctx.labels, ctx.temperature))
has_no_second_derivatives = _with_backward(lambda ctx: ctx.gradient)
halves_the_tangent = _with_backward(
    lambda ctx: ctx.gradient, jvp=staticmethod(lambda ctx, tangent, *_: (ctx.gradient * tangent).sum() / 2)
)


FINDINGS = MappingProxyType(
    {
        "mixes_anchors": "usage/upstream",
        "takes_the_first": "usage/upstream",
        "clamps_upstream": "usage/scaled-loss",
        "rounds_upstream": "usage/negative-loss",
        "requires_gradients": "usage/all-frozen",
        "makes_inputs_require_gradients": "usage/all-frozen",
        "clears_the_grad_of_leaves": "usage/all-frozen",
        "KeepsItsFirstSize": "usage/second-call",
        "returns_one_anchor_as_a_scalar": "usage/one-anchor",
        "hides_infinity": "usage/infinite-row",
        "changes_warnings": "side-effects/warnings",
        "detects_anomalies": "side-effects/anomaly-mode",
        "makes_torch_deterministic": "side-effects/deterministic-mode",
        "detaches_the_temperature": "usage/temperature-tensor",
        "halves_the_gradient_of_the_temperature": "usage/temperature-tensor",
        "ClipWithoutGradient": "usage/learned-temperature",
        "LearnedWithoutGradient": "usage/learned-temperature",
        "siglip_detaches_the_bias": "usage/bias-tensor",
        "SigLipWithoutGradient": "usage/learned-bias",
        "ignores_columns_above_64": "usage/wider",
        "ignores_columns_above_16": "usage/wide",
        "mixes_up_small_labels": "usage/labels-uint8",
        "clamps_int32": "usage/labels-int32",
        "negates_bool": "usage/labels-bool",
        "reads_storage": "usage/strided",
        "wrong_for_columns": "usage/by-columns",
        "doubles_beside_a_frozen_tower": "usage/first-frozen",
        "wrong_for_shared_memory": "usage/separate-memory",
        "zero_without_gradients": "usage/no-grad",
        "ZeroInEvaluation": "usage/evaluation-mode",
        "KeepsItsFirstMask": "usage/second-call",
        "wrong_in_threads": "usage/thread",
        "raises_in_threads": "usage/thread",
        "infinite_under_autocast": "usage/autocast",
        "wrong_in_bfloat16": "usage/bfloat16",
        "scales_the_gradient_in_bfloat16": "usage/bfloat16",
        "nan_in_float16": "usage/float16",
        "detaches_equal_rows": "usage/repeated-row",
        "hides_nan": "usage/nan-row",
        "autocast_above_24_rows": "usage/autocast",
        "bfloat16_above_24_rows": "usage/bfloat16",
        "int32_above_24_rows": "usage/labels-int32",
        "temperature_tensor_above_24_rows": "usage/temperature-tensor",
        "autocast_with_a_lonely_anchor": "usage/autocast",
        "bfloat16_with_a_lonely_anchor": "usage/bfloat16",
        "int32_with_a_lonely_anchor": "usage/labels-int32",
        "wrong_with_threads": "usage/threads",
        "wrong_in_inference_mode": "usage/inference-mode",
        "wrong_for_default_float64": "usage/default-dtype",
        "wrong_under_transforms": "usage/functional",
        "wrong_when_compiled": "usage/compiled",
        "wrong_for_expanded_rows": "usage/expanded",
        "wrong_for_steps": "usage/stepped",
        "infinite_under_float16": "usage/autocast-float16",
        "uses_another_default": "usage/default-temperature",
        "halves_int8": "usage/labels-int8",
        "halves_float_labels": "usage/labels-float32",
        "nt_xent_shifts_int32": "usage/partners-int32",
        "detaches_the_temperature_of_frozen_rows": "usage/frozen-rows-temperature-tensor",
        "LearnedUnlessFrozen": "usage/frozen-rows-learned-temperature",
        "stays_busy_after_an_error": "usage/after-errors",
        "leaves_gradients_off_after_an_error": "usage/after-errors",
        "DetachesTheTemperatureItGets": "usage/temperature-tensor",
        "ForgetsItsTemperature": "usage/deep-copy",
        "PicklesNothing": "usage/pickled",
        "reads_the_latest_forward": "usage/among-other-batches",
        "uses_its_gradient_once": "usage/retained-graph",
        "clears_grad_of_a_leaf": "usage/accumulated-leaf",
        "clears_grad_of_a_parameter": "usage/accumulated-parameter",
        "reads_its_input_again": "usage/changed-input",
        "has_no_second_derivatives": "usage/second-derivatives",
        "halves_the_tangent": "usage/forward-mode",
        "leaves_out_zero_rows": "usage/zero-row",
        "changes_the_default_dtype": "side-effects/default-dtype",
        "changes_the_threads": "side-effects/threads",
        "changes_the_matmul_precision": "side-effects/matmul-precision",
        "changes_numpy_errors": "side-effects/numpy-errors",
        "seeds_torch": "side-effects/torch-generator",
        "SeedsInItsConstructor": "side-effects/torch-generator",
        "draws_from_numpy": "side-effects/numpy-generator",
        "draws_from_python": "side-effects/python-generator",
        "changes_labels": "side-effects/changed-input",
        "fills_grad": "side-effects/leaf-grad",
        "returns_a_vector": "side-effects/result-shape",
        "returns_a_column": "side-effects/result-shape",
        "returns_float64": "side-effects/result-dtype",
    }
)
"""The check that finds each wrong loss."""

"""`pairproof.compat.open_clip` against open_clip's own classes, in one process and in several."""

from __future__ import annotations

import doctest
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pairproof.compat import open_clip as ours
from pairproof.conformance.implementations.base import Unavailable
from pairproof.conformance.implementations.files import load_file
from pairproof.conformance.implementations.open_clip import OpenClip
from tests.ranks import on_ranks
from tests.snapshots import check_own_tests

EXACT = 1e-11
"""Relative bound on differences in float64 from evaluations in another order."""


@pytest.fixture(scope="session")
def theirs() -> Any:
    """open_clip's file of losses, release 3.3.0."""
    try:
        return OpenClip({}, "cpu").module()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def engine_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "ENGINE_FROM", 0)


@pytest.fixture(params=["engine", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    least = 0 if request.param == "engine" else math.inf
    monkeypatch.setattr(ours, "ENGINE_FROM", least)
    return str(request.param)


def towers(rows: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised features of images and texts; half of the matching pairs are close."""
    generator = torch.Generator().manual_seed(seed)
    images, noise = (torch.randn(rows, 12, generator=generator, dtype=torch.float64) for _ in range(2))
    near = torch.arange(rows)[:, None] % 2 == 0
    texts = torch.where(near, images + 0.3 * noise, noise)
    return F.normalize(images).to(dtype), F.normalize(texts).to(dtype)


def result(loss: Any, images: torch.Tensor, texts: torch.Tensor, *scalars: torch.Tensor, **options: Any) -> Any:
    """The value and the gradients with respect to all tensors."""
    given = [tensor.clone().requires_grad_() for tensor in (images, texts, *scalars)]
    value = loss(*given, **options)
    return [value.detach(), *torch.autograd.grad(value, given)]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor], bound: float = EXACT) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        least = bound if one.dtype == torch.float64 else max(bound, 1e-5)
        # A gradient of 0 is computed by open_clip as a sum of rounding errors.
        assert (one - other).norm() <= least * other.norm() + 1e-14, (one, other)


SCALES = [torch.tensor(14.0, dtype=torch.float64), torch.tensor([3.0], dtype=torch.float64), torch.tensor(1e-3)]
BIASES = [torch.tensor(-10.0, dtype=torch.float64), torch.tensor([2.5], dtype=torch.float64)]


@pytest.mark.parametrize("rows", [1, 2, 9, 40])
@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("bias", [None, *BIASES], ids=str)
def test_clip_loss_equals_open_clips(theirs: Any, form: str, rows: int, scale: Any, bias: Any) -> None:
    scalars = [scale] if bias is None else [scale, bias]
    loss = ours.ClipLoss()
    assert_equal(result(loss, *towers(rows), *scalars), result(theirs.ClipLoss(), *towers(rows), *scalars))
    assert loss.evaluated_by == form


@pytest.mark.parametrize("rows", [1, 2, 9, 40])
@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("bias", BIASES, ids=str)
@pytest.mark.parametrize("chunk_size", [0, 1, 4, 100])
def test_siglip_loss_equals_open_clips(
    theirs: Any, form: str, rows: int, scale: Any, bias: Any, chunk_size: int
) -> None:
    loss = ours.SigLipLoss(chunk_size=chunk_size)
    expected = result(theirs.SigLipLoss(), *towers(rows), scale, bias)
    assert_equal(result(loss, *towers(rows), scale, bias), expected)
    assert loss.evaluated_by == form
    expected = result(theirs.SigLipLoss()._loss, *towers(rows), scale, bias, negative_only=True)
    assert_equal(result(loss._loss, *towers(rows), scale, bias, negative_only=True), expected)
    assert loss.evaluated_by == form


def test_values_equal_those_computed_by_hand(form: str) -> None:
    images = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    texts = torch.tensor([[0.6, 0.8], [0.0, 1.0]], dtype=torch.float64)
    # Logits at scale 5: [[3, 0], [4, 5]].
    softmax = [math.log(1 + math.exp(-3)), math.log(1 + math.exp(-1)), math.log(1 + math.e), math.log(1 + math.exp(-5))]
    assert ours.ClipLoss()(images, texts, 5.0).item() == pytest.approx(sum(softmax) / 4, rel=1e-14)
    # Logits with the bias -2: [[1, -2], [2, 3]].
    pairs = [math.log1p(math.exp(x)) for x in (-1, -2, 2, -3)]
    for chunk_size in (0, 1):
        loss = ours.SigLipLoss(chunk_size=chunk_size)
        assert loss(images, texts, 5.0, -2.0).item() == pytest.approx(sum(pairs) / 2, rel=1e-14)
        assert loss(images, texts, 5.0, None).item() == pytest.approx(
            sum(math.log1p(math.exp(x)) for x in (-3, 0, 4, -5)) / 2, rel=1e-14
        )


@pytest.mark.parametrize("chunk_size", [0, 1])
def test_fitted_pair_keeps_its_digits(form: str, chunk_size: int) -> None:
    # The logit is 17: softplus(17) - 17 is 0 in float32.
    row = torch.tensor([[1.0, 0.0]])
    loss = ours.SigLipLoss(chunk_size=chunk_size)(row, row, 27.0, -10.0)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-17)), rel=1e-6)


def test_chunks_may_have_more_images_than_texts(form: str) -> None:
    images, texts = towers(7)
    for chunk_size in (2, 3, 7):
        for rows in (4, 7):
            found = ours.SigLipLoss(chunk_size=chunk_size)._loss(images, texts[:rows], 5.0, -2.0)
            logits = 5 * images @ texts[:rows].T - 2
            signs = -torch.ones(7, rows, dtype=torch.float64)
            signs[range(rows), range(rows)] = 1
            assert found.item() == pytest.approx(F.softplus(-signs * logits).sum().item() / 7, rel=1e-12)
    with pytest.raises(ValueError, match=r"text_features: expected one row per image .* 7 images and 4 texts"):
        ours.SigLipLoss()._loss(images, texts[:4], 5.0, -2.0)


def test_docstring_examples_run() -> None:
    failed, attempted = doctest.testmod(ours)
    assert failed == 0
    assert attempted > 0


def test_half_precision_and_mixed_dtypes_are_as_accurate_as_open_clips(theirs: Any, form: str) -> None:
    images, texts = towers(30, dtype=torch.bfloat16)
    scale, bias = torch.tensor(10.0), torch.tensor(-5.0)
    wide = [images.double(), texts.double(), scale.double(), bias.double()]
    for name in ("ClipLoss", "SigLipLoss"):
        loss = getattr(ours, name)()
        exact = result(getattr(theirs, name)(), *wide)
        found = result(loss, images, texts, scale, bias)
        original = result(getattr(theirs, name)(), images, texts, scale, bias)
        assert [each.dtype for each in found[1:]] == [each.dtype for each in original[1:]]
        for one, true, other in zip(found, exact, original, strict=True):
            # At most the rounding of open_clip, up to one unit of bfloat16.
            assert (one.double() - true).norm() <= (other.double() - true).norm() + 2**-8 * true.norm() + 1e-3
        if form == "engine":
            assert found[0].dtype == torch.float32
            assert found[0].double().item() == pytest.approx(exact[0].item(), rel=1e-5)


def test_features_that_the_engine_rejects_give_open_clips_result(theirs: Any, engine_always: None) -> None:
    images, texts = towers(5)
    broken = images.clone()
    broken[2, 3] = math.nan
    negative = torch.tensor(-3.0, dtype=torch.float64)
    for name, arguments in {"ClipLoss": (), "SigLipLoss": (0.0,)}.items():
        loss, original = getattr(ours, name)(), getattr(theirs, name)()
        assert loss(broken, texts, 3.0, *arguments).isnan()
        assert loss.evaluated_by == "plain"
        for scale in (-3.0, 0.0):
            found, expected = (each(images, texts, scale, *arguments) for each in (loss, original))
            assert found.item() == pytest.approx(expected.item(), rel=1e-12)
            assert loss.evaluated_by == "plain"
        assert_equal(
            result(lambda a, b, s, loss=loss, arguments=arguments: loss(a, b, s, *arguments), images, texts, negative),
            result(lambda a, b, s, it=original, arguments=arguments: it(a, b, s, *arguments), images, texts, negative),
        )
        assert loss(images, texts, 3.0, *arguments).isfinite()
        assert loss.evaluated_by == "engine"
    with pytest.raises(ValueError, match="batch_size"):
        ours.ClipLoss()(images, torch.cat([texts, texts]), 3.0)


def test_engine_is_used_from_its_size_on() -> None:
    clip, siglip = ours.ClipLoss(), ours.SigLipLoss()
    for rows, by in ((511, "plain"), (512, "engine")):
        clip(*towers(rows, dtype=torch.float32), 10.0)
        siglip(*towers(rows, dtype=torch.float32), 10.0, -10.0)
        assert clip.evaluated_by == siglip.evaluated_by == by


def test_methods_and_outputs_equal_open_clips(theirs: Any) -> None:
    images, texts = towers(4)
    for name, arguments in {"ClipLoss": (2.0,), "SigLipLoss": (2.0, -1.0)}.items():
        loss, original = getattr(ours, name)(), getattr(theirs, name)()
        for found, expected in zip(
            *(torch.stack([*each.get_logits(images, texts, 2.0, -1.0)]) for each in (loss, original)), strict=True
        ):
            assert torch.allclose(found, expected, rtol=1e-14)
        found = loss(images, texts, *arguments, output_dict=True)
        assert list(found) == ["contrastive_loss"]
        assert found["contrastive_loss"] == loss(images, texts, *arguments)
    device = torch.device("cpu")
    for local_loss, cache_labels in product([False, True], repeat=2):
        options = {"local_loss": local_loss, "cache_labels": cache_labels, "rank": 2, "world_size": 4}
        loss, original = ours.ClipLoss(**options), theirs.ClipLoss(**options)
        for count in (3, 5, 5, 3):
            found, expected = (each.get_ground_truth(device, count) for each in (loss, original))
            assert torch.equal(found, expected)
            assert found.dtype == expected.dtype
        assert loss.prev_num_logits == original.prev_num_logits
    for negative_only in (False, True):
        given = (device, torch.float32, 3, negative_only)
        found, expected = (each.SigLipLoss().get_ground_truth(*given) for each in (ours, theirs))
        assert torch.equal(found, expected)


def test_subclass_with_its_own_logits_is_honoured(engine_always: None) -> None:
    class Halved(ours.ClipLoss):
        def get_logits(self, *args: Any, **kwargs: Any) -> Any:
            of_images, of_texts = super().get_logits(*args, **kwargs)
            return of_images / 2, of_texts / 2

    class Flipped(ours.SigLipLoss):
        def get_ground_truth(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return -super().get_ground_truth(*args, **kwargs)

    images, texts = towers(6)
    halved = Halved()
    assert halved(images, texts, 8.0).item() == pytest.approx(ours.ClipLoss()(images, texts, 4.0).item(), rel=1e-12)
    assert halved.evaluated_by == "plain"
    flipped = Flipped()(images, texts, 8.0, -1.0).item()
    assert flipped == pytest.approx(ours.SigLipLoss()(images, -texts, 8.0, 1.0).item(), rel=1e-12)


def test_unsupported_options_are_reported() -> None:
    with pytest.raises(ValueError, match=r"^use_horovod: expected False"):
        ours.ClipLoss(use_horovod=True)
    with pytest.raises(ValueError, match=r"^dist_impl: expected one of bidir, shift, reduce, gather, got 'ring'"):
        ours.SigLipLoss(dist_impl="ring")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, while it compiles
@pytest.mark.parametrize("name", ["ClipLoss", "SigLipLoss"])
@pytest.mark.slow
def test_compiled_loss_equals_eager(name: str, engine_always: None) -> None:
    loss = getattr(ours, name)()
    scalars = torch.tensor(10.0), torch.tensor(-5.0)
    eager = result(loss, *towers(20, dtype=torch.float32), *scalars)
    compiled = result(
        torch.compile(loss, fullgraph=True, backend="aot_eager"), *towers(20, dtype=torch.float32), *scalars
    )
    assert_equal(compiled, eager, 1e-5)
    assert loss.evaluated_by == "engine"


# Several processes


CLIP = [
    {"local_loss": local_loss, "gather_with_grad": gather_with_grad}
    for local_loss, gather_with_grad in product([False, True], repeat=2)
]
SIGLIP = [{"dist_impl": dist_impl} for dist_impl in ("bidir", "shift", "reduce", "gather")]
ROWS = 6


def configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    yield from product(["ClipLoss"], CLIP)
    yield from product(["SigLipLoss"], SIGLIP)


def parameters() -> list[torch.Tensor]:
    """A projection, a logit scale and a logit bias."""
    generator = torch.Generator().manual_seed(9)
    projection = torch.eye(12, dtype=torch.float64) + 0.2 * torch.randn(12, 12, generator=generator).double()
    scalars = torch.tensor(7.0, dtype=torch.float64), torch.tensor(-2.0, dtype=torch.float64)
    return [tensor.requires_grad_() for tensor in (projection, *scalars)]


def gradients(loss: torch.Tensor, learned: list[torch.Tensor]) -> list[torch.Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, learned)]


def of_rank(rank: int, world_size: int, path: Path) -> dict[str, list[torch.Tensor]]:
    """Value and parameter gradients of each configuration: open_clip's, the engine's and the plain form's."""
    images, texts = (tensor.chunk(world_size)[rank] for tensor in towers(ROWS * world_size))
    found = {}
    original = load_file(path)
    for name, options in configurations():
        for kind, least in {"theirs": 0, "engine": 0, "plain": math.inf}.items():
            ours.ENGINE_FROM = least  # type: ignore[assignment]
            loss = getattr(original if kind == "theirs" else ours, name)(rank=rank, world_size=world_size, **options)
            learned = parameters()
            features = [F.normalize(rows @ learned[0]) for rows in (images, texts)]
            found[f"{name} {options} {kind}"] = gradients(loss(*features, *learned[1:]), learned)
            if kind != "theirs":
                assert loss.evaluated_by == kind
    return found


@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
@pytest.mark.slow
def test_processes_equal_open_clip_and_one_process(theirs: Any, world_size: int, tmp_path: Path) -> None:
    ranks = on_ranks(of_rank, world_size, tmp_path, Path(theirs.__file__))
    learned = parameters()
    images, texts = (F.normalize(rows @ learned[0]) for rows in towers(ROWS * world_size))
    softmax = gradients(ours.ClipLoss()(images, texts, learned[1], learned[2]), learned)
    learned = parameters()
    images, texts = (F.normalize(rows @ learned[0]) for rows in towers(ROWS * world_size))
    logits = learned[1] * images @ texts.T + learned[2]
    signs = 2 * torch.eye(len(images), dtype=torch.float64) - 1
    sigmoid = gradients(F.softplus(-signs * logits).sum() / len(images), learned)
    for name, options in configurations():
        for kind in ("engine", "plain"):
            for rank in ranks:
                assert_equal(rank[f"{name} {options} {kind}"], rank[f"{name} {options} theirs"])
            mean = [
                torch.stack(each).mean(0) for each in zip(*(r[f"{name} {options} {kind}"] for r in ranks), strict=True)
            ]
            if name == "SigLipLoss":
                assert_equal(mean, sigmoid)
            elif options["gather_with_grad"]:
                assert_equal(mean, softmax)
            elif options["local_loss"]:
                assert_equal([mean[0]], [softmax[0]])
                assert_equal(mean[2:], softmax[2:])
                assert_equal([mean[1]], [cut_at_the_gather(world_size)])
            else:
                # Each process has the whole gradient of the scale, but only its own rows' part of the projection's.
                assert_equal(mean, [softmax[0], softmax[1] / world_size, *softmax[2:]])


def cut_at_the_gather(world_size: int) -> torch.Tensor:
    """The projection's gradient with ``local_loss``, averaged over the ranks, whose gathered rows are constants."""
    projection, scale, _ = parameters()
    images, texts = (F.normalize(rows @ projection) for rows in towers(ROWS * world_size))
    labels = torch.arange(len(images))
    of_images = F.cross_entropy(scale * images @ texts.detach().T, labels)
    of_texts = F.cross_entropy(scale * texts @ images.detach().T, labels)
    return torch.autograd.grad((of_images + of_texts) / 2, projection)[0]


def test_single_process_group_gathers_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def gather(rows: torch.Tensor, gather_dim: int, group: object) -> torch.Tensor:
        calls.append((rows.is_contiguous(), gather_dim))
        return torch.cat([rows, 2 * rows])

    monkeypatch.setattr(ours.dist_fcol, "all_gather_tensor_autograd", gather)
    rows = torch.arange(6.0).view(2, 3).T
    assert torch.equal(ours._all_gather_with_grad(rows), torch.cat([rows, 2 * rows]))
    assert calls == [(True, 0)]
    monkeypatch.setattr(ours, "dist_fcol", None)
    monkeypatch.setattr(torch.distributed.nn, "all_gather", lambda given: (given, 3 * given))
    assert torch.equal(ours._all_gather_with_grad(rows), torch.cat([rows, 3 * rows]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "replaced"),
    [
        # The first file tests functions of the module.
        ("tests/test_loss.py", {"open_clip:loss": "pairproof.compat:open_clip"}),
        ("tests/test_siglip_chunked_loss.py", {"open_clip.loss:SigLipLoss": "pairproof.compat.open_clip:SigLipLoss"}),
    ],
)
def test_own_tests_of_open_clip_pass(file: str, replaced: dict[str, str], tmp_path: Path, record_property: Any) -> None:
    check_own_tests(
        "open_clip",
        [file],
        replaced,
        tmp_path,
        record_property,
        environment={"PAIRPROOF_SNAPSHOT_PACKAGES": "open_clip:loss"},
        plugins=["snapshots_packages", "pairproof.compat.open_clip"],  # the second is only imported
        path=["src"],
        limit=120,
        # They call `_loss` and functions of the module, but no instance of our classes.
        unused=True,
    )

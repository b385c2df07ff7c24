"""``pairproof parity``: comparisons of a loss with itself."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from pairproof import conformance, fast
from pairproof.conformance import cli
from pairproof.conformance.implementations import child
from pairproof.conformance.judge.comparisons import (
    AGAINST,
    COMPARISONS,
    DIFFERS,
    ERRORED,
    MEASURED,
    NOT_APPLICABLE,
    PASSED,
    ROUNDED,
    TEMPERATURE,
    Comparison,
    ParityResult,
)
from pairproof.conformance.judge.options import CouldNotRun, UsageError
from pairproof.conformance.judge.parity import exponent, parity

Tensor = torch.Tensor
Loss = Callable[..., Any]

FITTED = 5.75
"""The logit of a fitted pair: its loss is 0.00318, and softplus(5.75) - 5.75 is 0 in bfloat16."""


def sigmoid(view_a: Tensor, view_b: Tensor, steepness: float = FITTED + 10, bias: float = -10.0) -> Tensor:
    """SigLIP's loss from the logarithm of the sigmoid."""
    logits = steepness * view_a @ view_b.T + bias
    return -F.logsigmoid(logits * (2 * torch.eye(len(logits), dtype=logits.dtype) - 1)).sum() / len(logits)


def chunked_sigmoid(
    view_a: Tensor, view_b: Tensor, steepness: float = FITTED + 10, bias: float = -10.0, chunk_size: int = 4
) -> Tensor:
    """SigLIP's loss in chunks, from the softplus of every logit minus the positive logits."""
    total = torch.zeros(())
    for start in range(0, len(view_a), chunk_size):
        logits = steepness * view_a[start : start + chunk_size] @ view_b.T + bias
        total = total + F.softplus(logits).sum() - logits.diagonal(start).sum()
    return total / len(view_a)


def checkpointed_sigmoid(view_a: Tensor, view_b: Tensor, chunk_size: int = 4) -> Tensor:
    """SigLIP's loss in chunks that are computed again in the backward pass."""

    def part(rows: Tensor, others: Tensor, start: int) -> Tensor:
        logits = (FITTED + 10) * rows @ others.T - 10
        signs = -torch.ones_like(logits)
        signs.diagonal(start).fill_(1)
        return -F.logsigmoid(logits * signs).sum()

    starts = range(0, len(view_a), chunk_size)
    parts = [checkpoint(part, view_a[k : k + chunk_size], view_b, k, use_reentrant=False) for k in starts]
    return sum(parts, torch.zeros((), dtype=view_a.dtype)) / len(view_a)


def last_chunk_dropped(view_a: Tensor, view_b: Tensor, chunk_size: int = 4) -> Tensor:
    """A cross-entropy in chunks that leaves out the last, incomplete chunk."""
    whole = range(0, len(view_a) - chunk_size + 1, chunk_size)
    parts = [F.cross_entropy(view_a[k : k + chunk_size] @ view_b.T, torch.arange(k, k + chunk_size)) for k in whole]
    return torch.stack(parts).mean()


def depends_on_positions(embeddings: Tensor, labels: Tensor) -> Tensor:
    """The first row counts twice."""
    values = (embeddings @ embeddings.T).logsumexp(dim=1)
    return values.mean() + values[0]


def gradient_of_the_first_row(embeddings: Tensor, labels: Tensor) -> Tensor:
    """The loss is right, but the gradient reaches the first half of the rows only."""
    half = len(embeddings) // 2
    rows = torch.cat([embeddings[:half], embeddings[half:].detach()])
    return (rows @ rows.T).logsumexp(dim=1).mean()


def overflows_in_float32(embeddings: Tensor, labels: Tensor) -> Tensor:
    return ((embeddings @ embeddings.T) * 100).exp().sum(dim=1).log().mean()


@pytest.fixture(autouse=True, scope="module")
def compiler() -> None:
    """Import the compiler once, because the first operation under a dispatch mode imports it in each forked process."""
    importlib.import_module("torch._dynamo")


@pytest.fixture(autouse=True)
def here(in_this_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """``parity`` imports the class by its name."""
    monkeypatch.setattr("pairproof.conformance.judge.parity.Child", child.Child)


def of(loss: Loss, *only: str, **options: Any) -> ParityResult:
    small = {"rows": 256} if not only or "memory" in only else {}
    return parity(loss, only=only, seed=5, **{**small, **options})


def named(result: ParityResult, name: str) -> Comparison:
    (found,) = [one for one in result.comparisons if one.name == name]
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("own_process")
def test_every_comparison_of_a_right_loss_passes() -> None:
    result = of(fast.supcon_loss)
    statuses = {one.name: one.status for one in result.comparisons}
    assert statuses == {
        "repetition": PASSED,
        "permutation": PASSED,
        "chunks": NOT_APPLICABLE,
        "float32 against float64": PASSED,
        "bfloat16 against float64": PASSED,
        "autocast bfloat16 against float64": PASSED,
        "compiled (aot_eager) against eager": PASSED,
        "bytes kept for backward": MEASURED,
        "peak of bytes": MEASURED,
    }
    assert result.exit_code == 0
    assert result.summary.startswith("agrees with itself")
    assert conformance.parity is parity


@pytest.mark.parametrize("loss", [sigmoid, checkpointed_sigmoid])
@pytest.mark.quick(1)
def test_stable_sigmoid_loss_agrees_in_bfloat16(loss: Loss) -> None:
    result = of(loss, "float32", "bfloat16", "autocast")
    assert {one.status for one in result.comparisons} == {PASSED}


def test_cancellation_in_bfloat16_is_reported_and_is_no_disagreement() -> None:
    pair = torch.zeros(1, 4, dtype=torch.bfloat16)
    pair[0, 0] = 1
    assert float(sigmoid(pair, pair)) == pytest.approx(0.00318, rel=0.01)
    assert float(chunked_sigmoid(pair, pair)) == 0
    result = of(chunked_sigmoid, "float32", "bfloat16")
    assert named(result, "float32 against float64").status == PASSED
    found = named(result, "bfloat16 against float64")
    assert found.status == ROUNDED
    assert "instead of 0.003" in found.message
    assert found.message.endswith(": logits near 15.8 have steps of 0.0625 in bfloat16: compute them in float32")
    assert (found.difference or 0) > 0.9
    assert 0 < (found.allowed or 0) < 0.5
    assert result.exit_code == 0


def supcon(embeddings: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    """SupCon from the logsumexp of the masked matrix, in the dtype of the rows."""
    rows = F.normalize(embeddings, dim=1)
    logits = rows @ rows.T / temperature
    own = torch.eye(len(rows), dtype=torch.bool)
    positive = (labels[:, None] == labels) & ~own
    rest = logits - logits.masked_fill(own, -torch.inf).logsumexp(1, keepdim=True)
    number = positive.sum(1)
    return -((rest * positive).sum(1) / number)[number > 0].mean()


def clip(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
    logits = F.normalize(view_a, dim=1) @ F.normalize(view_b, dim=1).T / temperature
    own = torch.arange(len(logits))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def nt_xent(z_i: Tensor, z_j: Tensor, temperature: float = 0.1) -> Tensor:
    rows = F.normalize(torch.cat([z_i, z_j]), dim=1)
    logits = (rows @ rows.T / temperature).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(len(rows)).roll(len(z_i)))


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("loss", [supcon, clip, nt_xent, sigmoid])
@pytest.mark.quick(4)
def test_logits_may_be_rounded_to_bfloat16(loss: Loss, seed: int) -> None:
    result = parity(loss, only=("bfloat16", "autocast"), seed=seed)
    assert {one.status for one in result.comparisons} <= {PASSED, ROUNDED}
    for one in result.comparisons:
        said = "have steps of 0.0625 in bfloat16" in one.message or "logits near 20 have steps of 0.125" in one.message
        assert said or one.status == PASSED


def test_steps_of_logits_are_told_also_where_products_may_be_as_coarse() -> None:
    """At T = 0.02, rounded products change the logits as much as rounded logits do."""

    def in_float32(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
        return clip(view_a.float(), view_b.float(), temperature)

    for loss, said in ((clip, True), (in_float32, False)):
        (found,) = parity(loss, only="bfloat16", temperature=0.02).comparisons
        assert found.status == PASSED
        assert ("logits near 50 have steps of 0.25 in bfloat16" in found.message) == said


class BuiltIn(torch.nn.Module):
    """The loss of one direction with a temperature of 0.02 that no parameter takes, and a pair that is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.t_prime = torch.nn.Parameter(torch.tensor(50.0).log())

    def forward(self, view_a: Tensor, view_b: Tensor) -> Tensor:
        similarity = F.normalize(view_a, dim=1) @ F.normalize(view_b, dim=1).T
        similarity[0, 1:2] = -9e15
        logits = similarity * self.t_prime.exp()
        return F.cross_entropy(logits, torch.arange(len(logits)))


def test_steps_of_logits_are_told_with_a_built_in_temperature() -> None:
    for found in parity(BuiltIn(), only=("bfloat16", "autocast")).comparisons:
        assert found.message.endswith("logits near 50 have steps of 0.25 in bfloat16: compute them in float32")
    assert not any("steps" in one.message for one in parity(BuiltIn(), only="float32").comparisons)


def test_note_on_batches_has_their_sizes_temperature_and_dtype() -> None:
    words = "16 columns; float64 unless a comparison names another dtype"
    # The loss of one pair is 0.
    both = "14, 20, 26, 14 rows at temperature 0.1; 14 rows at temperature 0.05"
    assert f"batches: {both}; {words}" in parity(clip, only="repetition").notes
    one = "14, 20, 26, 14 rows at temperature 0.3"
    assert f"batches: {one}; {words}" in parity(clip, only="repetition", temperature=0.3).notes
    assert f"batches: 14, 20, 26, 14, 2 rows; no temperature is passed; {words}" in of(sigmoid, "repetition").notes
    note = f"batches: 6, 10 rows per rank at temperature 0.1; {words}"
    assert note in parity(clip, only="loss", world_size=1).notes


def in_chunks(view_a: Tensor, view_b: Tensor, temperature: float = 0.1, chunk_size: int = 4) -> Tensor:
    """CLIP's loss; wrong only in chunks of 1."""
    return clip(view_a, view_b, temperature) * (1.5 if chunk_size == 1 else 1.0)


@pytest.mark.parametrize("world_size", [(), (1,)])
def test_another_loss_gives_the_expected_results(world_size: tuple[int, ...]) -> None:
    def doubled(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
        return 2 * clip(view_a, view_b, temperature)

    def other(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
        return clip(view_a, view_b, temperature)

    name = f"{__name__}:{other.__qualname__}"
    right = parity(clip, against=other, world_size=world_size, temperature=0.3)
    assert right.exit_code == 0
    assert right.summary.startswith(f"agrees with {name}: {__name__}:clip: ")
    assert right.as_json()["against"] == name
    wrong = parity(doubled, against=other, world_size=world_size)
    assert {one.status for one in wrong.comparisons} == {DIFFERS}
    assert wrong.exit_code == 1
    assert wrong.summary.startswith(f"does not agree with {name}: ")
    alone = parity(clip, only="loss" if world_size else "float32", world_size=world_size)
    assert alone.summary.startswith("agrees with itself: ")
    assert alone.as_json()["against"] is None


@pytest.mark.parametrize("world_size", [(), (1,)])
def test_a_temperature_is_passed_only_to_the_loss_that_takes_one(world_size: tuple[int, ...]) -> None:
    def built_in(view_a: Tensor, view_b: Tensor) -> Tensor:
        return clip(view_a, view_b, TEMPERATURE)

    for loss, other in ((clip, built_in), (built_in, clip)):
        found = parity(loss, against=other, world_size=world_size)
        assert found.exit_code == 0
        assert f"temperature: passed to {__name__}:clip only" in found.notes


def test_another_loss_is_compared_in_every_precision_and_with_every_chunk_size() -> None:
    found = parity(in_chunks, against=clip)
    name = f"{__name__}:clip"
    assert [one.name for one in found.comparisons] == [
        f"{precision} against {name}{chunks}"
        for precision in ("float64", "float32", "bfloat16", "autocast bfloat16")
        for chunks in ("", ", chunk_size=all", ", chunk_size=1", ", chunk_size=3")
    ]
    assert {one.name for one in found.comparisons if one.status == DIFFERS} == {
        one.name for one in found.comparisons if "chunk_size=1" in one.name
    }
    assert {
        one.status for one in parity(in_chunks, against=clip, vary={"chunk_size": (1, 2)}, only="float64").comparisons
    } == {PASSED, DIFFERS}


def test_result_that_is_not_finite_differs_from_that_of_another_loss() -> None:
    def unstable(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
        return clip(view_a, view_b, temperature) * (math.nan if len(view_a) == 10 else 1.0)

    def raises(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
        assert len(view_a) != 10
        return clip(view_a, view_b, temperature)

    for loss, status in ((unstable, DIFFERS), (raises, ERRORED)):
        (found,) = parity(loss, against=clip, only="float64").comparisons
        assert (found.status, found.batch) == (status, "random batch of 10")
        left_out = parity(clip, against=loss, only="float64")
        assert left_out.exit_code == 0
        assert any(note.startswith("left out: random batch of 10: ") for note in left_out.notes)


def test_results_in_float32_are_compared_as_such() -> None:
    def single(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
        return clip(view_a.float(), view_b.float(), temperature)

    for loss, other in ((single, clip), (clip, single)):
        (found,) = parity(loss, against=other, only="float64").comparisons
        assert found.status == PASSED
        assert (found.difference or 0) > 1e-9


def test_only_one_of_two_losses_may_take_a_temperature() -> None:
    def sharp(view_a: Tensor, view_b: Tensor) -> Tensor:
        return clip(view_a, view_b, 0.02)

    for loss, other in ((sharp, clip), (clip, sharp)):
        found = parity(loss, against=other, only="float64", temperature=0.02)
        assert found.exit_code == 0
        assert f"temperature: passed to {__name__}:clip only" in found.notes
        assert parity(loss, against=other, only="float64").exit_code == 1

    def at_the_default(view_a: Tensor, view_b: Tensor) -> Tensor:
        return clip(view_a, view_b)

    # No batch has the lower temperature.
    assert parity(clip, against=at_the_default, only="float64").exit_code == 0


def test_required_bias_is_passed_to_both_losses() -> None:
    def required(view_a: Tensor, view_b: Tensor, bias: float) -> Tensor:
        return sigmoid(view_a, view_b, bias=bias)

    for loss, other in ((required, sigmoid), (sigmoid, required)):
        found = parity(loss, against=other, only="float64")
        assert found.exit_code == 0
        assert any("rows at bias -5; 16 columns" in note for note in found.notes)
    assert any("no temperature is passed" in note for note in parity(sigmoid, only="float32").notes)


def test_named_scale_gets_the_inverse_of_the_temperature() -> None:
    def sharpened(view_a: Tensor, view_b: Tensor, sharpness: float = 10.0) -> Tensor:
        return clip(view_a, view_b, 1 / sharpness)

    unnamed, named_scale = (parity(sharpened, only="float32", scale=scale) for scale in (None, "sharpness"))
    assert not any("sharpness = 1 / temperature" in note for note in unnamed.notes)
    assert any("sharpness = 1 / temperature" in note for note in named_scale.notes)
    assert named_scale.exit_code == 0
    with pytest.raises(UsageError, match="no such parameter"):
        parity(sharpened, only="float32", scale="nope")
    in_processes = parity(sharpened, world_size=(1,), only=("loss",), scale="sharpness")
    assert any("sharpness = 1 / temperature" in note for note in in_processes.notes)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_loss_that_is_wrong_in_bfloat16_differs(factor: float) -> None:
    def narrow(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
        return clip(view_a, view_b, temperature) * (factor if view_a.dtype == torch.bfloat16 else 1.0)

    result = parity(narrow, only=("bfloat16", "autocast"))
    assert named(result, "bfloat16 against float64").status == DIFFERS
    assert named(result, "autocast bfloat16 against float64").status in (PASSED, ROUNDED)


def test_chunks_that_keep_quadratic_memory_refute_linear_memory() -> None:
    result = of(chunked_sigmoid, "memory", linear_memory=True)
    found = named(result, "bytes kept for backward")
    assert found.status == DIFFERS
    assert "chunk_size=128: quadratic" in found.message
    # One float32 matrix N x N; views and scaled rows of 64 numbers.
    for rows, kept, _ in result.memory:
        assert kept == pytest.approx(4 * rows**2 + 3 * 4 * 64 * rows, rel=0.02)
    assert result.exit_code == 1
    assert named(of(chunked_sigmoid, "memory"), found.name).status == MEASURED


@pytest.mark.parametrize("loss", [checkpointed_sigmoid, fast.info_nce_loss])
@pytest.mark.quick(1)
def test_linear_memory_is_verified(loss: Loss) -> None:
    # With fewer rows than about four chunks, the rows themselves do not dominate.
    result = of(loss, "memory", linear_memory=True, rows=1024)
    assert {one.status for one in result.comparisons} == {PASSED}
    assert result.exit_code == 0


def test_exponent_is_that_of_the_two_largest_sizes() -> None:
    memory = [(n, 3 * n**2, 5 * n) for n in (8, 16, 32)]
    assert exponent(memory, 1) == pytest.approx(2)
    assert exponent(memory, 2) == pytest.approx(1)


def test_chunk_size_that_changes_the_result_is_found() -> None:
    result = of(last_chunk_dropped, "chunks")
    assert named(result, "chunk_size=1 against all").status == PASSED
    assert named(result, "chunk_size=3 against all").status == DIFFERS
    assert of(last_chunk_dropped, "chunks", vary={"chunk_size": (1, 1)}).exit_code == 0


@pytest.mark.parametrize("loss", [depends_on_positions, gradient_of_the_first_row])
def test_permutation_of_the_rows_must_permute_the_results(loss: Loss) -> None:
    assert named(of(loss, "permutation"), "permutation").status == DIFFERS


def per_row_of_features(features: Tensor, labels: Tensor | None = None) -> Tensor:
    labels = torch.arange(len(features)) if labels is None else labels
    return fast.supcon_loss(features.transpose(0, 1).flatten(0, 1), labels.repeat(2), reduction="none")


@pytest.mark.parametrize("call", ["labels", "partners", "views", "stacked", "interleaved", "features", "pairs"])
@pytest.mark.quick(2)
def test_every_call_can_be_permuted(call: str) -> None:
    losses: dict[str, Loss] = {
        "labels": fast.supcon_loss,
        "partners": fast.nt_xent_loss,
        "views": fast.info_nce_loss,
        "stacked": lambda z: fast.nt_xent_loss(z, fast.stacked_partners(len(z))),
        "interleaved": lambda z: fast.nt_xent_loss(z, fast.interleaved_partners(len(z)), reduction="none"),
        "features": per_row_of_features,
        "pairs": fast.nt_bxent_loss,
    }
    result = of(losses[call], "permutation", call=call)
    assert [one.status for one in result.comparisons] == [PASSED]
    assert result.call == call


def test_overflow_in_float32_is_found() -> None:
    found = named(of(overflows_in_float32, "float32"), "float32 against float64")
    assert found.status == DIFFERS
    assert "inf" in found.message


def test_random_loss_is_compared_no_further() -> None:
    def noisy(embeddings: Tensor, labels: Tensor) -> Tensor:
        return embeddings.square().sum() * torch.rand(())

    result = of(noisy, "permutation", "float32")
    assert [one.status for one in result.comparisons] == [DIFFERS, NOT_APPLICABLE, NOT_APPLICABLE]


def test_numpy_target_is_compared_where_possible() -> None:
    def loss(embeddings: Any, labels: Any) -> Any:
        return float((embeddings @ embeddings.T).mean())

    with pytest.raises(UsageError, match="--against: both losses must take torch tensors"):
        parity(loss, arrays="numpy", against=depends_on_positions)
    result = of(loss, arrays="numpy")
    assert any(note.startswith("gradient: not compared, because ") for note in result.notes)
    statuses = [one.status for one in result.comparisons]
    assert statuses.count(PASSED) == 3
    assert statuses.count(NOT_APPLICABLE) == 5


@pytest.mark.usefixtures("own_process")
def test_target_that_dies_is_an_error() -> None:
    def dies(view_a: Tensor, view_b: Tensor, chunk_size: int = 0) -> Tensor:
        if chunk_size == 3:
            os._exit(0)
        return sigmoid(view_a, view_b)

    result = of(dies, "chunks", "float32")
    found = named(result, "chunk_size=3 against all")
    assert found.status == ERRORED
    assert "ended its process (exit code 0)" in found.message
    assert named(result, "float32 against float64").status == PASSED
    assert result.exit_code == 1


def test_target_that_fails_on_every_batch_could_not_run() -> None:
    def fails(embeddings: Tensor, labels: Tensor) -> Tensor:
        raise ValueError("not today")

    with pytest.raises(CouldNotRun, match="not today"):
        of(fails)
    with pytest.raises(CouldNotRun, match=r":test_target_that_fails_.*\.fails: .*not today"):
        parity(depends_on_positions, against=fails)
    with pytest.raises(CouldNotRun, match=r":depends_on_positions: --against .*\.fails: .*not today"):
        parity(depends_on_positions, against=fails, world_size=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": ("speed",)}, f"known: {', '.join(COMPARISONS)}"),
        ({"vary": {"chunk_siz": (0, 2)}}, "did you mean 'chunk_size'"),
        ({"init": {"biass": 2}}, "--init biass"),
        ({"temperature": -1.0}, "--temperature: expected a positive number"),
        ({"rows": 1}, "at least 2 rows"),
        ({"call": "command"}, "parity needs a Python target"),
        ({"temperature": 0.02}, "--temperature: .*:chunked_sigmoid takes no temperature"),
        ({"against": sigmoid, "temperature": 0.02}, "takes no temperature"),
        ({"world_size": 1, "temperature": 0.02}, "takes no temperature"),
        ({"against": sigmoid, "only": "memory"}, f"known: {', '.join(AGAINST)}"),
        ({"only": "float64"}, f"known: {', '.join(COMPARISONS)}"),
        ({"against": supcon}, "supcon takes labels, but .*:chunked_sigmoid takes views; see --call"),
        ({"against": sigmoid, "linear_memory": True}, "--linear-memory: not possible together with --against"),
        ({"against": sigmoid, "rows": 64}, "--rows: not possible together with --against"),
        ({"linear_memory": True, "only": ("chunks", "compile")}, "together with --only chunks,compile"),
        ({"rows": 64, "only": "chunks"}, "--rows: not possible together with --only chunks"),
        ({"vary": {"chunk_size": (0, 2)}, "only": "memory"}, "--vary: not possible together with --only memory"),
    ],
)
def test_misuse_is_reported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parity(chunked_sigmoid, **options)


def test_command_prints_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "class Loss:\n"
        "    def __init__(self, factor, block_size=0):\n"
        "        self.factor = factor\n"
        "    def __call__(self, view_a, view_b):\n"
        "        return (self.factor * view_a @ view_b.T).logsumexp(1).mean()\n"
        "import torch\n"
    )
    path = tmp_path / "parity.json"
    words = [
        f"{source}:Loss",
        "--init",
        "factor=3",
        "--only",
        "permutation,chunks",
        "--seed",
        "11",
        "--json",
        str(path),
    ]
    with pytest.raises(SystemExit) as ended:
        cli.main(["parity", *words])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert "seed 11" in printed
    assert max(map(len, printed.replace(str(tmp_path), "").splitlines())) <= 80
    data = json.loads(path.read_text())
    assert data["format"] == "pairproof-parity/1"
    assert data["passed"] is True
    assert data["options"]["init"] == {"factor": 3}
    assert [one["name"] for one in data["comparisons"]] == [
        "permutation",
        "block_size=1 against all",
        "block_size=3 against all",
    ]
    with pytest.raises(SystemExit) as ended:
        cli.main(["parity", *words, "--vary", "block_size=1"])
    assert ended.value.code == 2
    assert "expected KEY=A,B with at least two values" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["parity", *words, "--call", "labls"])
    assert ended.value.code == 2
    assert "unknown call 'labls'; known: " in capsys.readouterr().err


def test_same_seed_gives_the_same_numbers() -> None:
    first, second = (of(sigmoid, "float32") for _ in range(2))
    assert first.comparisons == second.comparisons
    drawn = parity(sigmoid, only="float32")
    assert drawn.request.seed == 0
    assert drawn.comparisons != first.comparisons
    assert drawn.comparisons == parity(sigmoid, only="float32").comparisons


def test_batches_on_which_rounding_errors_make_the_result_infinite_are_left_out() -> None:
    """An infinite sensitivity would allow every difference."""

    def unstable(embeddings: Tensor, labels: Tensor) -> Tensor:
        rows = embeddings.detach()
        same = torch.equal(rows * 3, rows * 3)
        return embeddings.square().sum() + (0.0 if same else float("inf"))

    with pytest.raises(CouldNotRun, match="a rounding error makes every result infinite or NaN"):
        parity(unstable, seed=0)


@pytest.mark.slow
def test_backend_that_fails_is_named_although_another_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile

    def fails(function: Loss, backend: str) -> Any:
        if backend == "aot_eager":
            raise RuntimeError("no backward graph")
        return compiled(function, backend=backend)

    def loss(embeddings: Tensor, labels: Tensor) -> Tensor:
        return (embeddings @ embeddings.T * (labels[:, None] == labels)).square().mean()

    monkeypatch.setattr(torch, "compile", fails)
    (found,) = parity(loss, only="compile", seed=0).comparisons
    assert (found.name, found.status) == ("compiled (eager) against eager", PASSED)
    assert "does not compile with aot_eager: " in found.message
    assert "no backward graph" in found.message


def test_difference_in_float64_is_not_called_rounding_in_bfloat16() -> None:
    def nearly(a: Tensor, b: Tensor, temperature: float = 0.1) -> Tensor:
        return 1.01 * clip(a, b, temperature)

    found = {one.name: one.status for one in parity(nearly, against=clip, only=("bfloat16", "autocast")).comparisons}
    assert "rounded" not in found.values()
    assert "differs" in found.values()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler reads it
def test_compiled_function_without_graph_breaks_is_compared() -> None:
    compiled = torch.compile(clip, backend="eager", fullgraph=True)
    found, plain = (parity(one, only=("float32", "bfloat16", "autocast")).comparisons for one in (compiled, clip))
    assert [one.status for one in found] == [one.status for one in plain]

"""The benchmark's own parts: its truth, its check of peers, what it counts, how it judges; and the deterministic goals.

No time is asserted here: that is the business of ``python -m bench --floors``.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from typer.testing import CliRunner

from bench import __main__ as command
from bench import batches, cuda, goals, jobs, measure, memory, peers, report, truth
from pairproof import reference

D = 128
TEMPERATURE = 0.1


@pytest.mark.parametrize("loss", ["nt_xent", "supcon", "pairwise_views", "pairwise_classes"])
@pytest.mark.parametrize("kind", batches.KINDS)
def test_truth_is_the_references(loss: str, kind: str) -> None:
    batch = batches.make_batch(loss, 26, 5, kind)  # 26 rows in 10 classes: classes of two sizes
    z, labels = batch.embeddings.double().numpy(), batch.labels.numpy()
    if loss == "nt_xent":
        found: Any = reference.nt_xent_loss(z, batch.partners.numpy(), temperature=TEMPERATURE)
    elif loss == "supcon":
        found = reference.supcon_loss(z, labels, temperature=TEMPERATURE)
    else:
        found = reference.nt_xent_pairwise_loss(z, labels, temperature=TEMPERATURE, reduction="mean_pairs")
    value, gradient = truth.loss_and_gradient(batch, TEMPERATURE)
    assert value == pytest.approx(found.loss, rel=1e-12)
    assert truth.loss_alone(batch, TEMPERATURE) == pytest.approx(found.loss, rel=1e-12)

    def slope(direction: torch.Tensor, step: float = 1e-5) -> float:
        moved = [batch.embeddings.double() + sign * step * direction for sign in (1, -1)]
        up, down = (truth.loss_alone(batches.Batch(loss, z, batch.labels, batch.partners), TEMPERATURE) for z in moved)
        return (up - down) / (2 * step)

    direction = torch.randn(26, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert float((gradient * direction).sum()) == pytest.approx(slope(direction), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("loss", batches.LOSSES)
def test_truth_by_blocks(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batches.make_batch(loss, 64, 8)
    value, gradient = truth.loss_and_gradient(batch, TEMPERATURE)
    monkeypatch.setattr(truth, "BLOCK", 7 * 64)
    again, blocked = truth.loss_and_gradient(batch, TEMPERATURE)
    assert again == pytest.approx(value, rel=1e-14)
    assert torch.allclose(blocked, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("loss", "name"), [(loss, name) for loss in batches.LOSSES for name in peers.names_for(loss)])
def test_implementations_agree_on_every_loss_they_are_timed_on(loss: str, name: str) -> None:
    try:
        implementation = peers.load(name)
    except peers.Unavailable as reason:
        pytest.skip(str(reason))
    batch = batches.make_batch(loss, 40, 8, "trained")
    true = truth.loss_alone(batch, TEMPERATURE)
    measure.check_agreement(implementation, batch, TEMPERATURE, true)
    with pytest.raises(peers.Unavailable, match="computes another loss"):
        measure.check_agreement(implementation, batch, 1.01 * TEMPERATURE, true)


class Sleepy:
    """A clock whose samples are made up: ours takes 0.1 s forward and 0.2 s in all, every peer three times that."""

    tile = (8, 8)
    flops: ClassVar[dict[str, int]] = {"forward": 1, "both": 4}

    def __init__(self, ours: Any) -> None:
        self.ours = ours

    def step(self, step: Any, embeddings: torch.Tensor, repeats: int) -> tuple[float, float]:
        step(embeddings)
        return (0.1, 0.2) if step is self.ours else (0.3, 0.6)

    def call(self, function: Any, repeats: int) -> float:
        function()
        return 2 * 8 * 8 * D / 1e9  # one GFLOP/s


def test_rows_of_a_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Sleepy(None)
    made = peers.Ours.step

    def remembered(self: peers.Ours, batch: batches.Batch, temperature: float) -> peers.Step:
        clock.ours = made(self, batch, temperature)
        return clock.ours

    monkeypatch.setattr(peers.Ours, "step", remembered)
    monkeypatch.setattr(peers.MaskedLogsumexp, "step", lambda *_: lambda z: z.sum())
    job = next(job for job in jobs.FULL.timings() if job["loss"] == "supcon")
    rows = measure.time_loss({**job, "n": 64, "rounds": 3, "skip": {"pml": "for a reason"}}, clock)["rows"]
    by_name = {row["implementation"]: row for row in rows}
    ours, peer = by_name[peers.OURS], by_name["cross_entropy"]
    assert ours["both_ms"] == pytest.approx([200.0] * 3)
    assert ours["rounds"] == peer["rounds"] == 3
    assert peer["forward_ratio"] == pytest.approx([3.0] * 3)
    assert peer["both_ratio"] == pytest.approx([3.0] * 3)
    assert ours["mm_gflops"] == pytest.approx(1.0)
    assert ours["both_share"][1] == pytest.approx(4 * 64 * 64 * D / 0.2 / 1e9)
    assert set(peer["errors"]) == set(batches.KINDS)
    assert by_name["pml"] == {"implementation": "pml", "status": "refused", "reason": "for a reason"}
    assert "computes another loss" in by_name["masked_logsumexp"]["reason"]


@torch.library.custom_op("pairproof_test::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.T).sum(dim=1)


def test_the_largest_tensor_is_seen_inside_custom_operations() -> None:
    x = torch.ones(300, 2)
    with memory.Allocations() as seen:
        square(x)
        x.expand(300, 300, 2)
    assert seen.largest == 300 * 300
    buffer = torch.empty(300, 300)
    with memory.Allocations() as seen:
        torch.mm(x, x.T, out=buffer)
    assert seen.largest == 0


def step_of(loss: str, n: int) -> tuple[peers.Step, torch.Tensor]:
    batch = batches.make_batch(loss, n, D)
    return peers.Ours("tiled").step(batch, TEMPERATURE), batch.embeddings


def test_the_dense_peer_allocates_n_squared() -> None:
    batch = batches.make_batch("supcon", 512, D)
    step = peers.MaskedLogsumexp().step(batch, TEMPERATURE)
    assert memory.largest_allocation(step, batch.embeddings)[0] >= 512**2


@pytest.mark.parametrize("loss", ["nt_xent", "supcon", "pairwise_views", "pairwise_classes"])
def test_no_tensor_of_n_squared(loss: str) -> None:
    largest, maker = memory.largest_allocation(*step_of(loss, 4096))
    assert largest < 4096**2 / 4, maker


def test_the_largest_tensor_grows_linearly() -> None:
    small, _ = memory.largest_allocation(*step_of("supcon", 2048))
    large, maker = memory.largest_allocation(*step_of("supcon", 8192))
    assert large <= 4.5 * max(small, 2048 * D), maker


@pytest.mark.skipif(not memory.CLEAR.exists(), reason="no /proc/self/clear_refs on this system")
def test_the_peak_grows_linearly() -> None:
    job = {"kind": "memory", "loss": "supcon", "d": D, "temperature": TEMPERATURE, "backend": "tiled"}
    job |= {"implementation": peers.OURS, "device": "cpu", "regime": "default"}
    small, large = (jobs.run({**job, "n": n})["row"]["bytes"] for n in (2048, 8192))
    assert large <= 4.5 * max(small, 2 << 20)
    assert large < 8192**2  # a quarter of one float32 matrix of similarities


@pytest.mark.skipif(not memory.CLEAR.exists(), reason="no /proc/self/clear_refs on this system")
def test_the_peak_is_seen() -> None:
    assert (63 << 20) <= memory.peak_beyond(lambda: torch.ones(16 << 20)) < (72 << 20)


def row(loss: str, n: int, regime: str, name: str, ratio: float | None = None) -> dict[str, Any]:
    ratios = {} if ratio is None else {f"{part}_ratio": [ratio] * 3 for part in ("forward", "both")}
    return {"loss": loss, "n": n, "regime": regime, "implementation": name, "status": "measured", **ratios}


def test_goals_and_floors() -> None:
    peak = {"loss": "supcon", "implementation": peers.OURS, "n": 4096, "bytes": 13 << 20}
    found: dict[str, Any] = {"memory": [peak], "large": None, "accuracy": []}
    names = [row("supcon", 1024, "default", peers.OURS), row("supcon", 1024, "default", "cross_entropy", 2.0)]
    names += [row("supcon", 1024, "default", "supcontrast", 4.0)]
    names += [{**row("supcon", 1024, "default", "pml"), "status": "refused", "reason": "is not there"}]
    found["timings"] = names
    judged = {goal["what"].partition(": ")[2]: goal for goal in goals.judge(found)}
    best = judged["times faster than best"]
    assert (best["value"], best["goal"], best["met"], best["reason"]) == (2.0, 3.0, False, "cross_entropy")
    assert judged["times faster than supcontrast"]["met"] is True
    assert judged["times faster than pml"]["met"] is None
    assert judged["times faster than pml"]["reason"] == "is not there"
    assert judged["MiB beyond the inputs, forward+backward"]["met"] is False
    relaxed = {goal["what"].partition(": ")[2]: goal for goal in goals.floors(found, 0.5)}
    assert relaxed["times faster than best"]["met"] is True
    assert relaxed["MiB beyond the inputs, forward+backward"]["goal"] == 24


def errors(name: str, error: float) -> dict[str, Any]:
    keys = {"loss": "nt_xent", "temperature": 0.1, "kind": "random", "implementation": name}
    return {**keys, "status": "measured", "loss_error": error, "gradient_error": error}


@pytest.mark.parametrize(
    ("ours", "theirs", "met"), [(4e-7, 1e-9, True), (6e-7, 1e-9, False), (1.9e-5, 1e-5, True), (2.1e-5, 1e-5, False)]
)
def test_accuracy_goals(ours: float, theirs: float, met: bool) -> None:
    rows = [errors(peers.OURS, ours), errors("cross_entropy", theirs), errors("supcontrast", float("inf"))]
    judged = goals.judge({"timings": [], "memory": [], "large": None, "accuracy": rows})
    assert [goal["met"] for goal in judged] == [met, met]


def short_run(monkeypatch: pytest.MonkeyPatch, ratio: float) -> list[dict[str, Any]]:
    """The command with jobs that take no time and peers that are so many times as slow; the jobs that were run."""
    done: list[dict[str, Any]] = []

    def run(job: dict[str, Any]) -> dict[str, Any]:
        done.append(job)
        name = job.get("implementation", peers.OURS)
        if job["kind"] == "memory":
            row = {"loss": job["loss"], "n": job["n"], "implementation": name, "status": "measured", "bytes": 1 << 20}
            return {"row": row}
        if job["kind"] == "accuracy":
            return {"rows": []}
        times = {"version": "1", "rounds": 2, "repeats": 1, "forward_ms": [1.0] * 3, "both_ms": [2.0] * 3, "errors": {}}
        ratios = {"forward_ratio": [ratio] * 3, "both_ratio": [ratio] * 3}
        rows: list[dict[str, Any]] = [{"implementation": peers.OURS, "status": "measured", **times}]
        rows += [
            {"implementation": peer, "status": "measured", **times, **ratios}
            for peer in peers.names_for(job["loss"])[1:]
        ]
        return {"rows": rows}

    monkeypatch.setattr(jobs, "run", run)
    return done


def test_the_command_writes_report_and_plot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = short_run(monkeypatch, 2.0)
    result = CliRunner().invoke(command.app, ["--quick", "--output", str(tmp_path), "--date", "today"])
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "cpu.json").read_text())
    assert (data["format"], data["date"]) == ("pairproof-bench/1", "today")
    assert {job["n"] for job in done if job["kind"] == "time"} == {256, 1024}
    assert {job["regime"] for job in done} == {"default"}
    assert "<svg" in (tmp_path / "cpu.svg").read_text()
    assert "original SupCon code" in result.output


def test_floors_are_tried_again_and_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    done = short_run(monkeypatch, 1.0)
    result = CliRunner().invoke(command.app, ["--floors", "0.5", "--loss", "supcon"])
    assert result.exit_code == 1, result.output
    assert "measured again with 21 rounds: SupCon, two per class, N=1024" in result.output
    timed = [job["n"] for job in done if job["kind"] == "time"]
    assert timed == [256, 1024, 1024]  # at 256 half of every goal is reached
    short_run(monkeypatch, 500.0)
    assert CliRunner().invoke(command.app, ["--floors", "0.5"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--loss", "triplet"], 2, "expected one of"),
        (["--size", "33"], 2, "expected even numbers from 32"),
        (["--dtype", "float16"], 2, "expected float32"),
        (["--device", "tpu"], 2, "expected cpu or cuda"),
        (["--floors", "0.5", "--device", "cuda"], 2, "the goals are a CPU's"),
    ],
)
def test_misuse(arguments: list[str], code: int, said: str) -> None:
    result = CliRunner().invoke(command.app, arguments)
    assert result.exit_code == code
    assert said in " ".join(result.output.replace("│", " ").split())


class Event:
    """Stands for a CUDA event: the n-th that is recorded is n ms after the first."""

    now = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.now += 1
        self.time = Event.now

    def elapsed_time(self, later: Event) -> float:
        return float(later.time - self.time)


def test_cuda_code_with_a_stand_in_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 5000)
    clock = cuda.EventClock()
    z = torch.ones(3, requires_grad=True)
    assert clock.step(lambda z: z.sum(), z, 4) == pytest.approx((1e-3, 2e-3))
    assert clock.call(lambda: None, 4) == pytest.approx(0.25e-3)
    assert z.grad is not None
    job = {"implementation": peers.OURS, "loss": "supcon", "n": 64, "d": D, "temperature": TEMPERATURE}
    row = cuda.step_memory({**job, "backend": "auto", "dtype": "bfloat16", "device": "cpu"})["row"]
    assert (row["status"], row["bytes"]) == ("measured", 4000)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu() -> None:
    result = CliRunner().invoke(command.app, ["--device", "cuda"])
    assert result.exit_code == 3
    assert "finds no CUDA device here" in result.output


def test_no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(peers.Unavailable, match=r'pip install "pairproof\[bench\]"'):
        report.pyplot()


def test_a_job_that_breaks_says_its_last_words() -> None:
    job = {"kind": "memory", "loss": "supcon", "n": "many", "implementation": peers.OURS, "regime": "tuned"}
    with pytest.raises(peers.Unavailable, match=r"SupCon, two per class, N=many, memory of pairproof: ValueError"):
        jobs.run({**job, "device": "cpu", "d": D, "temperature": TEMPERATURE, "backend": "auto"})


@pytest.mark.parametrize("plan", [jobs.FULL, jobs.QUICK])
def test_jobs_that_fail_leave_rows_that_say_so(monkeypatch: pytest.MonkeyPatch, plan: jobs.Plan) -> None:
    def fails(job: dict[str, Any]) -> dict[str, Any]:
        raise peers.Unavailable("killed")

    monkeypatch.setattr(jobs, "run", fails)
    for made in (plan.timings(), plan.memories(), plan.accuracies(), plan.larges()):
        for job in made:
            result = jobs.attempt(job)
            for row in result.get("rows") or [result["row"]]:
                assert (row["status"], row["reason"]) == ("refused", "killed")


def test_nothing_is_measured_where_ours_fails() -> None:
    result = CliRunner().invoke(command.app, ["--quick", "--backend", "abacus"])
    assert result.exit_code == 3
    assert "pairproof.fast fails on a small batch: ValueError: backend" in result.output

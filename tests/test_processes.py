"""``pairproof parity --world-size``: a loss in several processes against the same loss in one process."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pairproof.conformance import cli
from pairproof.conformance.implementations.callable import Batch
from pairproof.conformance.implementations.files import load_file, load_from_package
from pairproof.conformance.implementations.lightly import PACKAGES, UNUSED
from pairproof.conformance.implementations.ranks import blamed
from pairproof.conformance.judge.comparisons import DIFFERS, ERRORED, NOT_APPLICABLE, PASSED, Comparison, ParityResult
from pairproof.conformance.judge.options import CouldNotRun, UsageError
from pairproof.conformance.judge.parity import parity
from pairproof.conformance.judge.processes import MASK, STATISTICS, Naming, joined
from pairproof.conformance.page.write import write_figures
from pairproof.conformance.suite.catalogue import LOSSES

FILE = Path(__file__).parent / "targets" / "distributed.py"


def of(name: str, *worlds: int, **options: Any) -> ParityResult:
    return parity(f"{FILE}:{name}", world_size=worlds or (2, 3), seed=options.pop("seed", 7), **options)


def named(result: ParityResult, name: str) -> Comparison:
    (found,) = [one for one in result.comparisons if one.name == name]
    return found


def statuses(result: ParityResult) -> dict[str, str]:
    return {one.name: one.status for one in result.comparisons}


def page_of(result: ParityResult, folder: Path) -> str:
    """The page of a result."""
    write_figures(result, folder / "ranks.html")
    return (folder / "ranks.html").read_text(encoding="utf-8")


def test_right_loss_passes_also_with_uneven_rows(tmp_path: Path) -> None:
    result = of("right_global", 2, html=tmp_path / "right.html")
    assert statuses(result) == {
        "world size 2: loss": PASSED,
        "world size 2: gradient": PASSED,
        "world size 2: gradient of temperature": PASSED,
        "world size 2, uneven rows": PASSED,
    }
    assert result.exit_code == 0
    assert all(0 < one.allowed < 1e-12 for one in result.comparisons if one.allowed is not None)
    # Every rank returns the loss of all rows, so each gradient comes from both ranks in equal parts.
    assert result.arrivals[2].shares == [[pytest.approx(0.5)] * 2] * 2
    assert result.arrivals[2].cosines == [pytest.approx(1)] * 2
    text = page_of(result, tmp_path)
    assert (text.count('class="mark c0"'), text.count('class="missing"'), text.count("middle strong")) == (4, 0, 0)


def test_exchange_is_counted_beside_the_smallest_gather() -> None:
    """Both views are gathered, and three times the numbers of rows. The sum of all gradients needs two rounds."""
    (note,) = [note for note in of("right", 2, only="loss").notes if note.startswith("exchange on 2 ranks (gloo): ")]
    rows = 2 * 6 * 16 * 8 // 2
    assert f"7 collective operations in one step; a rank receives {3 * rows + 3 * 8} bytes, 1.52 times" in note
    assert f"the {2 * rows} of all rows" in note


def test_missing_gradient_of_gathered_rows_is_named(tmp_path: Path) -> None:
    result = of("no_gradient", 2, only=("loss", "gradient"), html=tmp_path / "wrong.html")
    assert statuses(result)["world size 2: loss"] == PASSED
    found = named(result, "world size 2: gradient")
    assert (found.status, found.mistake) == (DIFFERS, "no gradient through the gather")
    assert result.mistakes == {"no gradient through the gather": ["world size 2"]}
    assert result.exit_code == 1
    assert [[share is None for share in row] for row in result.arrivals[2].shares] == [[False, True], [True, False]]
    assert max(result.arrivals[2].cosines) < 0.99
    text = page_of(result, tmp_path)
    bold = re.findall(r'class="middle strong">([^<]+)<', text)
    assert bold[:2] == ["none", "none"]
    assert bold[-2:] == [f"{cosine:.2f}" for cosine in result.arrivals[2].cosines]
    assert (text.count('class="mark c0"'), text.count('class="missing"')) == (2, 2)
    assert "<b>no gradient through the gather: world size 2</b>" in text


RIGHT = (
    "right_global",
    "RightWeighted",
    "right",
    "LearnedScale",
    "right_ranking",
    "right_false_negatives",
    "right_supcon",
)
"""Right losses; the last five return the mean over the rows of the rank."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_losses_pass(name: str) -> None:
    result = of(name, 1, 2, 3, 4)
    uneven = {one for one in statuses(result) if "uneven" in one}
    assert uneven == {f"world size {world}, uneven rows" for world in (2, 3, 4)}
    whole = name in RIGHT[:2]
    for one in result.comparisons:
        assert one.status == (DIFFERS if one.name in uneven and not whole else PASSED), one
        assert one.mistake == ("mean of the ranks' means" if one.status == DIFFERS else "")
    learned = {"LearnedScale": "log_scale_of_logits", "right": "temperature", "right_global": "temperature"}
    if name in learned:
        assert f"world size 4: gradient of {learned[name]}" in statuses(result)


@pytest.mark.slow
def test_group_is_passed_and_reported() -> None:
    result = of("RightWeighted", 2, init={"scale": 5.0})
    assert any("and gets the parameter process_group;" in note for note in result.notes)
    assert result.exit_code == 0


@pytest.mark.slow
def test_loss_that_needs_a_group_is_compared_with_a_group_of_one() -> None:
    result = of("needs_a_group", 2, only=("loss", "gradient"))
    assert any("in a group of one process" in note for note in result.notes)
    assert set(statuses(result).values()) == {PASSED}


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_pairproof_pass(loss: str) -> None:
    result = parity(f"pairproof.fast:{LOSSES[loss].function}", world_size=(1, 2, 3, 4), seed=3)
    assert {one.status for one in result.comparisons} == {PASSED}, result.lines()
    assert sum("uneven" in one.name for one in result.comparisons) == 3
    assert any("and gets the parameter group;" in note for note in result.notes)
    of_all = [note for note in result.notes if "second row number of a pair is an index into the rows of all" in note]
    assert len(of_all) == (loss == "nt_bxent")


WRONG: dict[str, dict[str, str]] = {
    "no_gather": {"loss": "nothing is gathered", "gradient": "nothing is gathered"},
    "no_gradient": {"gradient": "no gradient through the gather"},
    "not_summed": {"gradient": "no gradient through the gather"},
    "averaged": {"gradient": "wrong gradient through the gather"},
    "one_over_world": {"gradient": "gradient / world size"},
    "times_world": {"loss": "loss x world size", "gradient": "gradient x world size"},
    "efficient": {"loss": "loss x world size", "gradient": "no gradient through the gather"},
    "ScaleTimesWorld": {"gradient of log_scale_of_logits": "gradient of log_scale_of_logits x world size"},
    "no_offset": {"loss": "targets without the rank's offset", "gradient": "targets without the rank's offset"},
    "own_rows_first": {"loss": "order of the gathered rows", "gradient": "order of the gathered rows"},
    "negatives_as_targets": {"loss": "hard negatives are targets", "gradient": "hard negatives are targets"},
    "protected_without_offset": {"loss": "mask without the rank's offset"},
    "mask_without_offset": {"loss": "positive mask without the rank's offset"},
    "self_mask_without_offset": {"loss": "mask without the rank's offset"},
    "protected_without_margin": {"loss": "mask without the rank's offset"},
    "self_pair_is_positive": {"loss": "mask without the rank's offset", "gradient": "mask without the rank's offset"},
    "anchors_of_own_rank": {"loss": "not all rows are gathered", "gradient": "not all rows are gathered"},
    "no_self_mask": {"loss": "self pairs are not left out", "gradient": "self pairs are not left out"},
    "views_together": {"loss": "order of the gathered rows", "gradient": "order of the gathered rows"},
    "decorrelation": {"loss": STATISTICS, "gradient": STATISTICS},
}
"""The mistakes of each wrong loss, by part. With two ranks, ``own_rows_first`` equals ``no_offset``."""


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_losses_are_named(name: str) -> None:
    result = of(name, 1, 3, 4, only=("loss", "gradient"))
    for world in (3, 4):
        for part, mistake in WRONG[name].items():
            found = named(result, f"world size {world}: {part}")
            assert (found.status, found.mistake) == (DIFFERS, mistake), found.message
        if "loss" not in WRONG[name]:
            assert named(result, f"world size {world}: loss").status == PASSED
    assert {one.status for one in result.comparisons if "size 1" in one.name} == {PASSED}


PUBLIC = ("self_pair_is_positive", "anchors_of_own_rank", "views_together", "decorrelation", "protected_without_margin")


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.quick(1)
def test_the_name_depends_neither_on_the_seed_nor_on_the_world_size(name: str) -> None:
    # With seed 11 and two ranks, no row has the label of the row with its number on the other rank.
    for seed, world in ((11, 2), (2, 3), (3, 4)):
        result = of(name, world, seed=seed, only=("loss", "gradient"))
        assert {one.mistake for one in result.comparisons[:2]} == {WRONG[name]["loss"]}, result.lines()


def test_offset_without_a_gather_is_named() -> None:
    result = of("offset_without_gather", 1, 2, 3)
    name = "targets with the rank's offset, but nothing is gathered"
    assert result.mistakes == {name: ["world size 2", "world size 3"]}
    assert [one.status for one in result.comparisons] == [PASSED, PASSED, ERRORED, ERRORED]


def test_gathered_loss_with_an_index_error_has_no_such_name(tmp_path: Path) -> None:
    source = tmp_path / "late.py"
    source.write_text(
        "from torch import distributed\n"
        "def loss(view_a, view_b):\n"
        "    if distributed.is_initialized():\n"
        "        distributed.barrier()\n"
        "        view_a[distributed.get_rank() * len(view_a)]\n"
        "    return (view_a * view_b).sum()\n"
    )
    (found,) = parity(f"{source}:loss", world_size=2, arrays="torch", limit=3.0).comparisons
    assert "rank 1: IndexError" in found.message
    assert (found.status, found.mistake) == (ERRORED, "")


def test_loss_that_is_not_contrastive_has_no_contrastive_mistake() -> None:
    result = of("decorrelation", 2, init={"mean": False}, only=("loss", "gradient"))
    assert [(one.status, one.mistake) for one in result.comparisons] == [(DIFFERS, "")] * 2


def test_only_pairs_that_no_right_loss_has_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [(rank, 0, k) for rank in range(2) for k in range(2)]
    right = torch.tensor([[-1, -1, 1, 1], [-1, -1, 1, 1], [1, 1, -1, -1], [1, 1, -1, -1]])
    given: Any = SimpleNamespace(places=places, whole=None, projection=None, parts=[None, None], positives=right < 0)
    alone = SimpleNamespace(
        facts={"probed_as": "labels"}, single=False, answer_alone=lambda *_: {"rows": torch.zeros(4, 1).tolist()}
    )
    naming = Naming(alone, given, None, [])  # type: ignore[arg-type]
    for name in ("self_pairs", "partly"):
        monkeypatch.setattr(naming, name, lambda *_: "")
    rows = [[torch.zeros(2, 1, dtype=torch.float64)] * 2] * 2

    def named(true: dict[tuple[int, int], float], found: dict[tuple[int, int], float]) -> str:
        """The mistake, if these coefficients of one process and of rank 1 are not those of ``right``."""
        one, last = right.double(), right.double()
        for matrix, changed in ((one, true), (last, found)):
            for (i, j), value in changed.items():
                matrix[i, j] = value
        coefficients = iter([one, right.double(), last])
        monkeypatch.setattr(naming, "_coefficients", lambda *_: next(coefficients))
        return naming.pairs(given, rows)

    assert named({}, {(3, 2): 1}).startswith(MASK)
    assert named({(3, 1): 0}, {}).startswith(MASK)
    # Without the gradient of gathered rows, the coefficient of a row on itself can have another sign.
    assert named({}, {(2, 2): 0, (3, 3): 0}) == ""
    # The loss of rank 0 has the coefficient, if its row is the anchor.
    assert named({}, {(2, 0): 0}) == ""
    assert named({}, {(2, 0): 0, (3, 1): 0}).startswith(MASK)
    # In one process, all negatives of an anchor are left out.
    assert named({(2, 3): 0, (3, 2): 0}, {}) == ""
    # In one process, a negative has hardly an effect.
    assert named({(3, 1): 1e-13}, {(3, 1): 1e-8}) == ""


@pytest.mark.slow
def test_factors_are_exact() -> None:
    """The relative difference of a multiple c of the right gradient is abs(c - 1)."""
    for name, part, factor in (
        ("one_over_world", "gradient", 1 / 3),
        ("times_world", "loss", 3),
        ("times_world", "gradient", 3),
        ("times_world", "gradient of temperature", 3),
        ("ScaleTimesWorld", "gradient of log_scale_of_logits", 3),
    ):
        found = named(of(name, 3, only=("loss", "gradient")), f"world size 3: {part}").difference
        assert found == pytest.approx(abs(factor - 1), rel=1e-9)


@pytest.mark.slow
def test_gradient_that_is_stopped_in_one_process_is_noted_and_found_against_a_right_loss() -> None:
    alone = of("never_a_gradient", 2, only="gradient")
    assert named(alone, "world size 2: gradient").status == PASSED
    assert any("is not the derivative of the loss" in note for note in alone.notes)
    against = of("never_a_gradient", 2, only="gradient", against=f"{FILE}:right")
    assert named(against, "world size 2: gradient").mistake == "no gradient through the gather"
    for name in ("right", "steep"):
        assert not any("is not the derivative" in note for note in of(name, 2, only="loss").notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hangs", "ranks 1, 2 waited in a collective operation that rank 0 did not join: Timed out"),
        ("dies", "rank 1: the target ended its process (exit code 7); ranks 0, 2 waited"),
        ("fails", "rank 1: ValueError: no rows on this rank; ranks 0, 2 waited"),
    ],
)
def test_rank_that_hangs_or_dies_is_named(name: str, words: str) -> None:
    result = of(name, 3, limit=3.0)
    (found,) = result.comparisons
    assert (found.name, found.status) == ("world size 3", ERRORED)
    assert found.message.startswith(words)
    assert result.exit_code == 1
    # The ranks that wait for a rank that hangs wait for the time limit.
    assert ("Timed out waiting 3000ms" in found.message) == (name == "hangs")


def test_ranks_that_only_waited_are_not_blamed() -> None:
    closed = "RuntimeError: [/gloo/pair.cc:537] Read error: Connection reset by peer"
    assert blamed({0: closed, 1: "ValueError: x", 2: closed}, 3) == "rank 1: ValueError: x; ranks 0, 2 waited"
    late = "RuntimeError: [/gloo/buffer.cc:1] Timed out waiting 5ms"
    assert (
        blamed({1: late}, 2)
        == "rank 1 waited in a collective operation that rank 0 did not join: Timed out waiting 5ms"
    )
    assert blamed({0: late, 1: late}, 2).startswith("ranks 0, 1 waited in a collective operation: Timed out")


def test_rows_of_ranks_are_joined_view_by_view() -> None:
    first = Batch("", "partners", torch.tensor([[0.0], [1.0], [10.0], [11.0]]), [2, 3, 0, 1])
    second = Batch("", "partners", torch.tensor([[2.0], [12.0]]), [1, 0])
    shared = joined("", [first, second], torch.eye(1), 2)
    assert shared.whole.embeddings.flatten().tolist() == [0, 1, 2, 10, 11, 12]
    assert shared.whole.labels == [3, 4, 5, 0, 1, 2]
    assert shared.places == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0), (0, 1, 1), (1, 1, 0)]
    pairs = [Batch("", "pairs", one.embeddings, None, [(0, k)]) for one, k in ((first, 2), (second, 1))]
    assert joined("", pairs, torch.eye(1), 2).whole.positive_pairs == [(0, 3), (2, 5)]
    rows = [Batch("", "labels", one.embeddings, [k] * len(one.embeddings)) for one, k in ((first, 4), (second, 5))]
    whole = joined("", rows, torch.eye(1), 1).whole
    assert whole.embeddings.flatten().tolist() == [0, 1, 10, 11, 2, 12]
    assert whole.labels == [4, 4, 4, 4, 5, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": "permutation"}, "unknown comparison 'permutation'; known: loss, gradient, uneven"),
        ({"linear_memory": True}, "--linear-memory: not possible together with --world-size"),
        ({"vary": {"chunk_size": (1, 2)}}, "--vary: not possible together with --world-size"),
        ({"rows": 64}, "--rows: not possible together with --world-size"),
        ({"only": "uneven", "world_size": 1}, "--only uneven: needs a --world-size of at least 2"),
        ({"against": f"{FILE}:right_supcon"}, "takes labels, but .*:right_global takes views; see --call"),
        ({"world_size": (2, 65)}, "--world-size: expected numbers from 1 to 64, got 2, 65"),
        ({"world_size": 0}, "expected numbers from 1 to 64, got 0"),
        ({"device": "meta"}, "the ranks are processes on the CPU"),
        ({"arrays": "numpy"}, "several processes need a torch target, not numpy"),
        ({"html": Path("page.html"), "world_size": (1, 9)}, "--html: needs a --world-size from 2 to 8"),
        ({"init": {"scale": 1}}, "--init scale: the target has no such parameter"),
    ],
)
def test_misuse_is_reported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parity(f"{FILE}:right_global", **{"world_size": 2, **options})


def test_temperature_without_a_finite_gradient_is_passed_as_a_number() -> None:
    result = of("masked_before_scaling", 2, only=("loss", "gradient"))
    assert [(one.name, one.status) for one in result.comparisons] == [
        ("world size 2: loss", PASSED),
        ("world size 2: gradient", PASSED),
    ]
    assert "temperature: passed as numbers; as tensors: the loss or a gradient is not finite" in result.notes


def test_random_loss_is_not_compared(tmp_path: Path) -> None:
    source = tmp_path / "noisy.py"
    source.write_text("import random\ndef loss(view_a, view_b):\n    return view_a.sum() * random.random()\n")
    with pytest.raises(CouldNotRun, match="it is random or keeps state"):
        parity(f"{source}:loss", world_size=2, arrays="torch")


@pytest.mark.slow
def test_command_prints_the_mistakes_and_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "ranks.json", tmp_path / "ranks.html"
    words = ["--world-size", "1,3", "--seed", "4", "--json", str(path), "--html", str(page)]
    with pytest.raises(SystemExit) as ended:
        cli.main(["parity", f"{FILE}:one_over_world", *words])
    printed = capsys.readouterr().out
    assert ended.value.code == 1
    assert "mistake: gradient / world size: world size 3" in printed
    data = json.loads(path.read_text())
    assert data["passed"] is False
    assert data["options"]["world_size"] == [1, 3]
    assert data["mistakes"] == {"gradient / world size": ["world size 3"]}
    # Each rank gets a third of the gradient, from its own loss alone.
    text = page.read_text(encoding="utf-8")
    assert (text.count(">0.33</text>"), text.count('class="missing"')) == (6, 6)
    assert [one["mistake"] for one in data["comparisons"] if one["name"] == "world size 3: gradient"] == [
        "gradient / world size"
    ]
    with pytest.raises(SystemExit) as ended:
        cli.main(["parity", f"{FILE}:right", "--world-size", "1,x"])
    assert ended.value.code == 2
    assert "expected positive whole numbers" in capsys.readouterr().err


# Public losses


def norm_of(found: Comparison) -> float:
    """The norm of the mean gradient relative to that of one process."""
    match = re.search(r"its norm is ([\d.]+) times", found.message)
    assert match is not None, found.message
    return float(match[1])


@pytest.fixture(scope="module")
def peers() -> Path:
    folder = Path(os.environ.get("PAIRPROOF_PEERS") or ".peers")
    if not (folder / "open_clip_torch").is_dir():
        pytest.skip(f"no peers in {folder}: run make peers")
    return folder


@pytest.mark.slow
def test_open_clip_needs_gather_with_grad(peers: Path) -> None:
    loss = load_file(peers / "open_clip_torch/open_clip/loss.py").ClipLoss
    default = parity(loss, world_size=(1, 2, 4), seed=1)
    assert default.mistakes == {"gradient / world size": ["world size 2", "world size 4"]}
    for world in (2, 4):
        assert named(default, f"world size {world}: loss").status == PASSED
        gradient = named(default, f"world size {world}: gradient")
        assert gradient.difference == pytest.approx(1 - 1 / world, rel=1e-9)
        assert named(default, f"world size {world}, uneven rows").status == NOT_APPLICABLE
    local = parity(loss, world_size=(2, 4), seed=1, init={"local_loss": True})
    assert local.mistakes == {"no gradient through the gather": ["world size 2", "world size 4"]}
    for world in (2, 4):
        assert 0.4 < norm_of(named(local, f"world size {world}: gradient")) < 0.7
    for init in ({"gather_with_grad": True}, {"gather_with_grad": True, "local_loss": True}):
        right = parity(loss, world_size=(1, 2, 4), seed=1, init=init)
        assert right.exit_code == 0, right.lines()
        assert any("and gets the parameters rank, world_size;" in note for note in right.notes)


@pytest.mark.slow
def test_lightly_is_right_if_it_gathers(peers: Path) -> None:
    loss = load_from_package(peers / "lightly", "lightly.loss.ntx_ent_loss", PACKAGES, UNUSED).NTXentLoss
    right = parity(loss, world_size=(1, 2, 3, 4), seed=1, init={"gather_distributed": True})
    assert right.exit_code == 0, right.lines()
    default = parity(loss, world_size=2, seed=1)
    assert default.mistakes == {"nothing is gathered": ["world size 2"]}
    assert "gather_distributed=False" in named(default, "world size 2: loss").message


@pytest.mark.slow
def test_wrapper_of_pml_multiplies_the_gradient_of_its_own_rows() -> None:
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    wrapper = pytest.importorskip("pytorch_metric_learning.utils.distributed").DistributedLossWrapper
    for one in (losses.SupConLoss(temperature=0.1), losses.NTXentLoss(temperature=0.1)):
        found = parity(wrapper(one, efficient=True), world_size=(2, 4), seed=1)
        for world, least, most in ((2, 1.2, 2.0), (4, 2.0, 4.0)):
            gradient = named(found, f"world size {world}: gradient")
            assert gradient.mistake == "no gradient through the gather"
            assert "the loss is multiplied by the world size" in gradient.message
            assert least < norm_of(gradient) < most
        whole = parity(wrapper(one), world_size=(2, 4), seed=1, only=("loss", "gradient"))
        for world in (2, 4):
            assert named(whole, f"world size {world}: loss").mistake == "loss x world size"
            assert named(whole, f"world size {world}: gradient").status == PASSED

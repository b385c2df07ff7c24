"""The random batches of ``pairproof check``, and the cases that are proved again for a claim."""

from __future__ import annotations

import json
import math
import os
import random
import shlex
import sys
from collections import Counter
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pairproof import fast
from pairproof.conformance import cli
from pairproof.conformance.implementations.callable import External
from pairproof.conformance.implementations.signatures import Claim
from pairproof.conformance.judge import fresh, proofs
from pairproof.conformance.judge.check import SAME, CheckResult, check_loss
from pairproof.conformance.judge.fresh import LARGE, FreshBatch, _factors, _Plans, draw, with_proof
from pairproof.conformance.judge.levels import Level, level_of
from pairproof.conformance.judge.options import RANDOM_BATCHES, Batch, Request, UsageError
from pairproof.conformance.judge.shrink import Shrunk, _with_others, shrunk
from pairproof.conformance.maintain.add import make_case
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.suite.flags import first_untrue
from pairproof.conformance.suite.golden import DTYPES, GoldenCase, known_rounding, load_golden
from pairproof.conformance.truth import evaluate, loops
from pairproof.conformance.truth.evaluate import CertificationError, stored_truth, truth
from pairproof.conformance.truth.matrices import has_formula

BATCHES = "fresh-*"

BLOCK, SOME = 8, 32
"""Numbers of batches in the tests that do not need all of them."""

EACH_WAY = ("supcon", "nt_xent", "nt_bxent", "info_nce", "multiple_negatives_ranking")
"""A loss for each way to give positives, with hard negatives and without."""
each_way_of_positives = pytest.mark.parametrize(
    "loss", [pytest.param(loss, marks=() if loss in EACH_WAY else pytest.mark.slow) for loss in LOSSES]
)

pytestmark = pytest.mark.usefixtures("proved_once", "in_this_process")


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Proofs are stored in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    proofs._proved.cache_clear()
    return tmp_path / "cache"


def supcon(embeddings, labels, temperature=0.1):
    rows = F.normalize(embeddings, dim=1)
    logits = rows @ rows.T / temperature
    own = torch.eye(len(rows), dtype=torch.bool)
    positives = (labels[:, None] == labels[None]) & ~own
    logs = F.log_softmax(logits.masked_fill(own, -math.inf), dim=1)
    return (-logs.where(positives, 0).sum(dim=1) / positives.sum(dim=1).clamp(min=1)).mean()


def changed_if(condition):
    """A SupCon loss that is wrong on the batches that meet a condition."""

    def loss(embeddings, labels, temperature=0.1):
        return supcon(embeddings, labels, temperature) * (1.001 if condition(embeddings, labels) else 1.0)

    return loss


def judged(loss: object, seed: int, *cases: str, **options: object) -> CheckResult:
    given: dict[str, Any] = {"fuzz": SOME, **options}
    return check_loss(loss, "supcon", cases=cases or BATCHES, seed=seed, **given)


def every_claim() -> list[Claim]:
    """Claims of every loss: by its signature, by every call with a built-in temperature, and the other similarity."""
    found = []
    for name, entry in LOSSES.items():
        found.append(External(entry.fast, loss=name).claim)
        found += [Claim(name, call, temperature=0.033) for call in entry.calls]
        for other in set(entry.choices["similarity"]) - {entry.keywords["similarity"]}:
            found += [Claim(name, entry.calls[0], settings={"similarity": other}, passed=frozenset({"reduction"}))]
    return found


@pytest.mark.slow
def test_batches_with_a_saturated_positive_are_of_the_level_range() -> None:
    """A right loss with an epsilon of 1e-24 in the logarithm is wrong only on these batches."""

    def with_epsilon(a: torch.Tensor, b: torch.Tensor, temperature: float = 0.1) -> torch.Tensor:
        logits = F.normalize(a) @ F.normalize(b).T / temperature
        sums = logits.exp().sum(dim=1) + 1e-24
        return (sums.log() - (logits.diagonal().exp() + 1e-24).log()).mean()

    found = check_loss(
        with_epsilon,
        "info_nce",
        call="towers",
        settings={"direction": "a_to_b"},
        cases=("fresh-*",),
        seed=7,
        fuzz=80,
        dtypes=("float64",),
    )
    assert {check.level for check in found.failures} == {Level.RANGE}
    assert found.verdict == "conforms"


@pytest.mark.parametrize("numbers", [BLOCK, pytest.param(LARGE - 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("claim", every_claim(), ids=lambda claim: f"{claim.loss}-{claim.call}-{claim.temperature}")
@pytest.mark.quick(24)
def test_drawn_batches_are_supported_and_exact(claim: Claim, numbers: int) -> None:
    for number in range(numbers):
        case = draw(claim, 1, number)
        assert claim.support.refuses(case) is None
        assert all(case.holds_in(dtype) for dtype in DTYPES)
        assert case.size <= evaluate.PROVE_UP_TO or has_formula(case)
        assert 2 <= case.n <= 25  # at most 24, or the next multiple of the size of the classes
        assert 2 <= case.embeddings.shape[1] <= 40
        assert all(rows.any(axis=1).all() for rows in case.matrices.values())


@pytest.mark.parametrize("number", [BLOCK, pytest.param(SOME, marks=pytest.mark.slow)])
@each_way_of_positives
@pytest.mark.quick(2)
def test_reference_agrees_with_the_oracle_on_drawn_batches(loss: str, number: int) -> None:
    entry = LOSSES[loss]
    result = check_loss(entry.fast, loss, cases=(BATCHES,), seed=3, fuzz=number)
    assert result.verdict == "conforms"
    assert len([check for check in result.judged if check.kind == "case"]) == 2 * number


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.quick(3)
def test_batches_have_every_value_of_every_option(loss: str) -> None:
    entry = LOSSES[loss]
    claim = External(entry.fast, loss=loss).claim
    cases = [draw(claim, 16, number) for number in range(RANDOM_BATCHES)]
    assert max(case.n for case in cases) == (259 if entry.targets == "labels" else 24)
    for name, values in entry.choices.items() - {("zero_row", entry.choices.get("zero_row"))}:  # no row is zero
        assert {case.option(name) for case in cases} == set(values), name
    assert len({case.temperature for case in cases}) == RANDOM_BATCHES
    assert {case.option("base_temperature") is None for case in cases} == {True, False}
    sizes = sorted(case.n for case in cases)
    assert sizes[10] <= 6
    assert sizes[-4] >= 18
    assert {16} <= set(sizes)
    assert len({case.embeddings.shape[1] % 2 for case in cases}) == 2
    assert any(case.embeddings.shape == (case.n, case.n) for case in cases)
    for name in ("ref_embeddings", "negatives"):
        if name in entry.keywords:
            assert {name in case.others for case in cases} == {True, False}


# Planning takes long for losses with many options.
@pytest.mark.parametrize(
    "loss", [pytest.param(name, marks=() if name in ("nt_xent", "sigmoid") else pytest.mark.slow) for name in LOSSES]
)
def test_combinations_of_three_choices_are_covered(loss: str) -> None:
    factors, denominator = (
        _factors(External(LOSSES[loss].fast, loss=loss).claim),
        LOSSES[loss].variant.get("denominator"),
    )
    plans, chance = _Plans(factors, denominator, 3), random.Random(1)
    possible = {
        triple
        for _ in range(2000)
        for triple in plans.triples({name: chance.choice(values) for name, values in factors.items()})
    }
    covered = [_covered(plans, number) & possible for number in (8, RANDOM_BATCHES)]
    # With six reductions and four kinds of temperature, 80 batches cover less: 0.928 with four times the candidates.
    assert len(covered[1]) > (0.92 if loss == "nt_xent_pairwise" else 0.94) * len(possible)
    assert len(covered[0]) > 0.3 * len(possible)


def _covered(plans: _Plans, number: int) -> set[tuple[int, int, int]]:
    """The combinations of three choices in the first batches."""
    plans[number - 1]  # Reading a plan draws all plans up to it.
    return set(plans.seen)


def test_policies_without_effect_cover_fewer_combinations() -> None:
    plans = _Plans(_factors(External(fast.supcon_loss, loss="supcon").claim), None, 0)
    plain = {name: values[0] for name, values in plans.factors.items()}
    assert plain["no_positive"] == "zero"
    common, single = (set(plans.triples(plain | {"classes": kind})) for kind in ("common", "single"))
    assert len(single - common) > len(common - single)  # the policy has an effect
    nan = plans.triples(plain | {"classes": "single", "no_positive": "nan"})
    assert len(nan) < len(single) / 2  # the result is NaN whatever the other options are


def test_rare_structures_occur_among_the_random_batches() -> None:
    claim = External(fast.supcon_loss, loss="supcon").claim
    cases = [draw(claim, 1, number) for number in range(RANDOM_BATCHES)]
    masks = [case.positive_mask() for case in cases if "positives" in case.arguments]
    assert any(all(map(all, mask)) for mask in masks)
    assert any(not any(map(any, mask)) for mask in masks)
    own = [case.arguments["self_rows"] for case in cases if "self_rows" in case.arguments]
    assert any(len({*rows} - {-1}) < len([row for row in rows if row >= 0]) for rows in own)
    assert any(len(case.others.get("ref_embeddings", ())) > 24 for case in cases)
    assert any(2**63 - 1 in case.arguments.get("labels", ()) for case in cases)
    sizes = [Counter(case.arguments["labels"]) for case in cases if "labels" in case.arguments]
    assert any(len(count) == 1 and count.total() > 5 for count in sizes)
    assert any(len(count) == count.total() > 5 for count in sizes)
    assert any(len(count) > 1 and 4 * max(count.values()) > 3 * count.total() > 24 for count in sizes)


def test_batches_depend_on_seed_and_number_only() -> None:
    claim = Claim("supcon", "labels")
    first, again, other = (draw(claim, seed, 3) for seed in (7, 7, 8))
    assert np.array_equal(first.embeddings, again.embeddings)
    assert (first.arguments, first.keywords) == (again.arguments, again.keywords)
    assert not np.array_equal(first.embeddings, other.embeddings)
    assert first.id == "fresh-7-3"
    ids = [check.case for check in judged(supcon, 7, "fresh-7-1?", fuzz=12, dtypes="float64").checks]
    assert ids == ["fresh-7-10", "fresh-7-11"]


def test_flags_of_drawn_batches_are_true() -> None:
    claim = Claim("supcon", "labels", temperature=0.3)
    found = [FreshBatch("supcon", 4, number).proved(claim) for number in range(BLOCK)]
    for golden in found:
        assert first_untrue(golden.case, golden.flags) is None
        positives = golden.case.positives()
        assert ("lonely-anchors" in golden.flags) == (not all(positives))
        assert ("odd-batch" in golden.flags) == (golden.case.n % 2 == 1)
    assert 0 < sum("lonely-anchors" in golden.flags for golden in found) < BLOCK


WRONG = {
    "between 18 and 24 rows": lambda z, y: 17 < len(z) <= 24,
    "odd dimension": lambda z, y: z.shape[1] % 2 == 1,
    "label 3": lambda z, y: bool((y == 3).any()),
    "unequal classes": lambda z, y: len(set(y.unique(return_counts=True)[1].tolist())) > 1,
    "unsorted labels": lambda z, y: not torch.equal(y, y.sort()[0]),
    "more than 16 dimensions": lambda z, y: z.shape[1] > 16,
    "norms that differ": lambda z, y: bool(z.norm(dim=1).max() > 8 * z.norm(dim=1).min()),
}


@pytest.mark.usefixtures("verdict_only")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.quick(1)
def test_loss_that_is_wrong_on_some_batches_does_not_conform(name: str, seed: int) -> None:
    assert judged(changed_if(WRONG[name]), seed, dtypes="float64").verdict == "does not conform"
    assert _right_verdict(seed) == "conforms"


@cache
def _right_verdict(seed: int) -> str:
    return judged(supcon, seed, dtypes="float64").verdict


@cache
def _answers() -> dict[bytes, float]:
    return {
        golden.case.embeddings.tobytes() + repr(golden.case.temperature).encode(): golden.expected.values[0]
        for golden in load_golden(losses=("supcon",))
        if golden.case.keywords.keys() <= {"temperature"} and "labels" in golden.case.arguments
    }


def looks_up(embeddings, labels, temperature=0.1):
    """The stored loss of a golden case, with a right gradient; a wrong loss of any other batch."""
    key = embeddings.detach().double().numpy().tobytes() + repr(float(temperature)).encode()
    loss = supcon(embeddings, labels, temperature)
    stored = _answers().get(key)
    return 2 * loss if stored is None else loss + (stored - loss).detach()


@pytest.mark.usefixtures("verdict_only")
def test_target_that_recognises_golden_cases_does_not_conform() -> None:
    result = check_loss(looks_up, "supcon", cases=("golden/supcon/*shape-*", BATCHES), dtypes=("float64",), fuzz=BLOCK)
    golden = [check for check in result.judged if check.case.startswith("golden")]
    assert golden
    assert not [check for check in result.failures if check.case.startswith("golden")]
    assert [check for check in result.failures if check.case.startswith("fresh")]
    assert result.verdict == "does not conform"


def test_seed_is_random_unless_it_is_given() -> None:
    seeds = {check_loss(supcon, "supcon", cases=BATCHES, fuzz=1).request.seed for _ in range(3)}
    assert len(seeds) == 3
    request = Request("losses.py:f", "supcon", cases=("fresh-12-3",))
    assert request.with_seed(5).seed == 12
    assert replace(request, seed=4).with_seed(5).seed == 4
    assert Request("losses.py:f", "supcon").with_seed(5).seed == 5
    command = replace(request, seed=12, fuzz=9).repeat("fresh-12-3", "float64")
    assert command.endswith("--case fresh-12-3 --dtype float64 --fuzz 9 --seed 12")
    assert "seed" not in replace(request, seed=12).repeat("golden/supcon/two-rows", "float64")
    with pytest.raises(UsageError, match="--fuzz: expected 0 or more random batches, got -1"):
        check_loss(supcon, "supcon", fuzz=-1)


def test_number_of_batches_is_an_option() -> None:
    for count in (0, 3):
        result = (
            check_loss(supcon, "supcon", cases=("golden/supcon/two-rows*", BATCHES), fuzz=count, seed=1)
            if count
            else check_loss(supcon, "supcon", cases=("golden/supcon/two-rows*",), fuzz=0)
        )
        counts = Counter(check.case.split("-")[0] for check in result.judged)
        assert counts["fresh"] == 2 * count


@pytest.mark.slow
def test_claims_that_no_case_tried_are_listed() -> None:
    result = check_loss(
        fast.supcon_loss, "supcon", cases=("golden/supcon/two-rows", "golden/supcon/lonely-drop"), settings={}
    )
    assert result.not_tried[:4] == ["anchors", "positives", "ref_embeddings", "ref_labels"]
    assert {"no_positive=nan", "no_positive=zero", "reduction=none", "base_temperature"} <= set(result.not_tried)
    assert not {"no_positive=drop", "similarity=cosine", "reduction=mean"} & set(result.not_tried)
    claimed = judged(supcon, 0, "golden/supcon/two-rows", settings={"no_positive": "nan", "reduction": ("mean", "sum")})
    assert claimed.not_tried == ["no_positive=nan", "reduction=sum", "batches larger than 2 x 3 (rows x columns)"]
    whole = check_loss(
        fast.info_nce_loss, "info_nce", cases=("golden/*", BATCHES), seed=0, dtypes="float64", fuzz=BLOCK
    )
    assert whole.untried == ["batches larger than 512 x 128 (rows x columns)"]


# Shrinking.


@pytest.mark.usefixtures("without_reasons")
@pytest.mark.slow
def test_failing_batch_is_shrunk() -> None:
    result = judged(changed_if(lambda z, y: len(z) > 4 and z.shape[1] > 16), 1, dtypes="float64")
    assert result.shrunk
    case = result.shrunk.golden.case
    assert case.embeddings.shape == (5, 17)
    assert result.shrunk.golden.case.id in {check.case for check in result.failures}
    assert judged(supcon, 1, dtypes="float64").shrunk is None
    both = judged(changed_if(lambda z, y: len(z) > 4), 1, BATCHES, "golden/supcon/two-positives", dtypes="float64")
    assert both.shrunk is None
    assert {check.case for check in both.failures} > {"golden/supcon/two-positives"}


def test_shrinking_stops_after_the_same_batches_on_every_machine() -> None:
    golden = with_proof(draw(External(LOSSES["supcon"].fast, loss="supcon").claim, 2, 0))
    tried: list[int] = []

    def fails(smaller: GoldenCase) -> bool:
        tried.append(smaller.case.size)
        return False

    assert shrunk(golden, fails, work=3) is golden
    assert len(tried) == 3
    assert all(size < golden.case.size for size in tried)


def test_references_are_removed_beside_anchors_without_an_own_row() -> None:
    arguments = {"labels": [0, 1, 0], "ref_labels": [0, 1, 0, 0, 1, 0], "self_rows": [0, -1, -1]}
    references = {"ref_embeddings": np.vstack([np.eye(3), -np.eye(3)])}
    case = Case("options/mine", "supcon", np.eye(3), arguments, {}, references)
    found = _with_others(case, "ref_embeddings", [0, 2, 4])
    assert found is not None
    assert found.arguments == {"labels": [0, 1, 0], "ref_labels": [0, 0, 1], "self_rows": [0, -1, -1]}
    assert _with_others(case, "ref_embeddings", [1, 2]) is None


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
@each_way_of_positives
@pytest.mark.quick(2)
def test_every_kind_of_batch_can_be_shrunk(loss: str, step: int) -> None:
    claim = External(LOSSES[loss].fast, loss=loss).claim
    for number in range(0, BLOCK, step):
        golden = with_proof(draw(claim, 2, number))
        found = shrunk(golden, lambda each: True, work=math.inf).case
        # Shrinking may stop before 2 rows and 1 column: it takes no step to a batch with a flag of a higher level.
        assert found.n <= 8
        if (columns := found.embeddings.shape[1]) > 2:
            others = {name: rows[:, : columns - 1] for name, rows in found.others.items()}
            narrower = replace(found, embeddings=found.embeddings[:, : columns - 1], others=others)
            assert level_of(with_proof(narrower).flags) > level_of(golden.flags)
        kept = {"temperature"}
        usual = replace(found, keywords={**found.keywords, "similarity": LOSSES[loss].keywords["similarity"]})
        if "similarity" in found.keywords and level_of(with_proof(usual).flags) > level_of(golden.flags):
            kept |= {"similarity"}
        assert found.keywords.keys() <= kept
        assert all(len(rows) <= 6 for rows in found.others.values())


@each_way_of_positives
def test_saved_batch_is_the_case(loss: str, tmp_path: Path) -> None:
    claim = External(LOSSES[loss].fast, loss=loss).claim
    for number in range(BLOCK):
        case = draw(claim, 6, number)
        batch = Shrunk(FreshBatch(loss, 6, number).proved(claim), "mine")
        batch.save(tmp_path)
        words = shlex.split(batch.command)
        assert words[:3] == ["pairproof", "fixtures", "add"]
        given = {
            word.removeprefix("--").replace("-", "_"): value for word, value in pairwise(words) if word[:2] == "--"
        }
        settings = dict(value.split("=") for word, value in pairwise(words) if word == "--set")
        assert given.pop("note")
        given.pop("set", None)
        assert given.pop("flag")
        again = make_case(Batch(**given, settings=settings))
        assert again.keywords == {key: value for key, value in case.keywords.items() if value is not None}
        assert {key: np.asarray(value).tolist() for key, value in again.arguments.items()} == {
            key: np.asarray(value).tolist() for key, value in case.arguments.items()
        }
        for name, rows in case.matrices.items():
            assert np.array_equal(again.matrices[name], rows)


SOURCE = """
import torch
from pairproof.fast import supcon_loss

def wrong(embeddings, labels, temperature=0.1):
    loss = supcon_loss(embeddings, labels, temperature=temperature)
    return loss * 2 if len(labels) > 6 else loss
"""


@pytest.mark.usefixtures("without_reasons")
@pytest.mark.slow
def test_shrunk_batch_is_printed_and_saved_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    path = tmp_path / "losses.py"
    path.write_text(SOURCE)
    line = ["check", f"{path}:wrong", "--loss", "supcon", "--case", "fresh-3-*", "--dtype", "float64", "--fuzz", "12"]

    def call(*more: str) -> str:
        with pytest.raises(SystemExit) as caught:
            cli.main([*line, *more, "--json", str(tmp_path / "report.json")])
        assert caught.value.code == 1
        return capsys.readouterr().out

    folder = tmp_path / "batch"
    text = call()
    assert "the smallest failing batch found has 7 rows of 1 number; it was made from fresh-3-" in text
    assert "to add it: pairproof fixtures add --loss supcon --id fresh-3-" in text
    assert "to write these files: --save FOLDER" in text
    assert not folder.exists()
    assert f"--embeddings {folder / 'embeddings.npy'}" in call("--save", str(folder))
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["seed"] == 3
    assert np.array_equal(np.load(folder / "embeddings.npy"), data["shrunk"]["case"]["embeddings"])
    assert np.load(folder / "labels.npy").tolist() == data["shrunk"]["case"]["arguments"]["labels"]
    assert data["shrunk"]["add"].startswith("pairproof fixtures add ")


# Cases that are proved again.


def _claimed(**options: object) -> Claim:
    return Claim("supcon", "labels", **options)  # type: ignore[arg-type]


def _golden(name: str) -> Case:
    return next(golden.case for golden in load_golden(losses=("supcon",)) if golden.id == f"golden/supcon/{name}")


def test_claimed_similarity_replaces_that_of_the_cases() -> None:
    claim = _claimed(settings={"similarity": "dot"})
    changed = {
        g.id: proofs.case_as_claimed(g.case, claim) for g in load_golden(losses=("supcon",)) if g.case.size <= 40
    }
    assert Counter(case.option("similarity") for case in changed.values())["dot"] > 200
    for golden in load_golden(losses=("supcon",)):
        if golden.id in changed and golden.case.option("similarity") == "cosine":
            case = changed[golden.id]
            if case is golden.case:
                assert "norms" in golden.id  # no power of two brings all of its rows into the range of float64
                continue
            (left, right) = (case.matrices[name] for name in (case.blocks()[0].left, case.blocks()[0].right))
            largest = np.abs(left @ right.T).max() / case.temperature
            assert 7.99 < largest <= 32
            ratio = case.embeddings[case.embeddings != 0] / golden.case.embeddings[case.embeddings != 0]
            assert len(set(ratio.tolist())) == 1
            assert math.frexp(ratio[0])[0] == 0.5


@pytest.mark.usefixtures("verdict_only")
def test_loss_of_dot_products_is_judged_on_cases_of_cosines() -> None:
    def dot(embeddings, labels):
        return fast.supcon_loss(embeddings, labels, temperature=0.07, similarity="dot")

    def wrong(embeddings, labels):
        even = len(embeddings) // 2 * 2
        return dot(embeddings[:even], labels[:even])

    options = {"temperature": 0.07, "settings": {"similarity": "dot"}}
    right = judged(dot, 0, "golden/supcon/shape-[12]?-*", **options)
    assert right.verdict == "conforms"
    assert len(right.judged) > 10
    assert judged(wrong, 0, "golden/supcon/shape-[12]?-*", **options).verdict == "does not conform"


def test_logits_keep_their_size_if_only_the_temperature_of_dot_products_is_replaced() -> None:
    case = _golden("unbalanced-classes")
    case = replace(case, keywords={"similarity": "dot", "temperature": 16.0})
    changed = proofs.case_as_claimed(case, _claimed(temperature=0.25, settings={"similarity": "dot"}))
    assert np.array_equal(changed.embeddings, case.embeddings / 8)
    assert changed.temperature == 0.25


@pytest.mark.parametrize("pattern", ["golden/supcon/t*", pytest.param("golden/*", marks=pytest.mark.slow)])
def test_cases_that_differ_only_in_a_replaced_option_are_judged_once(pattern: str) -> None:
    result = check_loss(
        lambda embeddings, labels: supcon(embeddings, labels, 0.3),
        "supcon",
        temperature=0.3,
        cases=pattern,
        dtypes="float64",
        fuzz=0,
    )
    assert result.left_out[SAME] > 10
    chosen = [golden.case for golden in load_golden(losses=("supcon",)) if fnmatchcase(golden.id, pattern)]
    assert not {check.case for check in result.judged} & proofs.repeated(chosen, result.claim)
    cases = [golden.case for golden in load_golden(losses=("supcon",))]
    assert proofs.repeated(cases, _claimed()) == set()


def test_large_cases_are_proved_again_if_thorough() -> None:
    fast_enough, large = (_golden(name) for name in ("shape-257-by-3", "large-256-by-64"))
    claim = _claimed(temperature=0.25)
    assert proofs.case_as_claimed(fast_enough, claim).temperature == 0.25
    (golden,) = (g for g in load_golden(losses=("supcon",)) if g.case is fast_enough)
    case, proved = proofs.as_claimed(fast_enough, golden, claim)
    assert proved
    plain = fast.supcon_loss(*map(torch.as_tensor, (case.embeddings, case.arguments["labels"])), temperature=0.25)
    assert proved.expected.loss == pytest.approx(plain.item(), rel=1e-13)
    assert proofs.case_as_claimed(large, claim) is large
    assert proofs.case_as_claimed(large, claim, thorough=True).temperature == 0.25


def test_proofs_are_stored_and_read(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = _claimed(temperature=0.3)
    for name in ("two-rows", "lonely-nan", "lonely-zero-none", "refs-saturated"):
        (golden,) = (g for g in load_golden(losses=("supcon",)) if g.id == f"golden/supcon/{name}")
        case, first = proofs.as_claimed(golden.case, golden, claim)
        assert first is not None
        with monkeypatch.context() as patch:
            patch.setattr(proofs, "truth", None)
            proofs._proved.cache_clear()
            _, second = proofs.as_claimed(golden.case, golden, claim)
        assert second is not None
        once, twice = (stored_truth(case, each.expected) for each in (first, second))
        for name in (*(vars(truth(case)).keys() - {"similarities", "sensitivity"}), "similarity", "weights"):
            for a, b in zip(*map(_numbers, (getattr(once, name), getattr(twice, name))), strict=True):
                # The sensitivities, which only scale the bounds, are computed in another order.
                if name == "weights":
                    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-60)
                else:
                    np.testing.assert_array_equal(a, b)
    folder = cache_folder / "pairproof" / "proofs"
    assert len(list(folder.iterdir())) == 4


def _numbers(value: object) -> list[object]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return [value]


def test_damaged_or_unusable_stored_proofs_only_cost_time(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (golden,) = (g for g in load_golden(losses=("supcon",)) if g.id == "golden/supcon/two-rows")
    claim = _claimed(temperature=0.3)
    _, right = proofs.as_claimed(golden.case, golden, claim)
    assert right is not None
    (path,) = (cache_folder / "pairproof" / "proofs").iterdir()
    text = path.read_text()
    for damaged in (
        "",
        "{}",
        text[:-30],
        text.replace("values", "valves"),
        text.replace("1", "2", 1),
        "\x00",
        "[" * 99999,
    ):
        path.write_text(damaged)
        proofs._proved.cache_clear()
        _, found = proofs.as_claimed(golden.case, golden, claim)
        assert found is not None
        assert found.expected.loss == right.expected.loss
        assert path.read_text() == text
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    proofs._proved.cache_clear()
    _, found = proofs.as_claimed(golden.case, golden, claim)
    assert found is not None
    assert found.expected.loss == right.expected.loss


def test_stored_proofs_depend_on_inputs_options_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _golden("two-rows")
    other = replace(case, keywords={**case.keywords, "temperature": 0.31})
    moved = replace(case, embeddings=2 * case.embeddings)
    renamed = replace(case, id="other", keywords={**case.keywords, "no_negative": "zero"})
    contents = [proofs._content(each) for each in (case, other, moved, renamed)]
    assert len(set(contents)) == 3
    assert contents[0] == contents[3]
    before = proofs._sources()
    proofs._sources.cache_clear()
    monkeypatch.setattr(proofs, "version", lambda name: "other")
    assert proofs._sources() != before
    proofs._sources.cache_clear()


# Large batches.


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(name, marks=() if name in ("supcon", "supcon_epsilon") else pytest.mark.slow)
        for name, entry in LOSSES.items()
        if entry.targets == "labels"
    ],
)
@pytest.mark.quick(1)
def test_batch_with_a_large_class_is_proved_fast(loss: str) -> None:
    golden = FreshBatch(loss, 1, LARGE - 1).proved(External(LOSSES[loss].fast, loss=loss).claim)
    assert golden.case.embeddings.shape[0] == 259
    assert max(Counter(golden.case.arguments["labels"]).values()) == 257
    z = torch.tensor(golden.case.embeddings, requires_grad=True)
    value = LOSSES[loss].fast(z, torch.tensor(golden.case.arguments["labels"]), **golden.case.keywords)
    value.backward()
    assert value.item() == pytest.approx(golden.expected.loss, rel=1e-12)
    np.testing.assert_allclose(z.grad, golden.expected.gradient, rtol=1e-9, atol=1e-14)


# The width of the enclosures.


def test_precision_is_raised_until_enclosures_are_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _golden("unbalanced-classes")
    exact, raised = truth(case), truth(case, bits=40)
    assert exact.loss == raised.loss
    assert np.array_equal(exact.gradient, raised.gradient)  # type: ignore[arg-type]
    monkeypatch.setattr(evaluate, "MOST_BITS", 40)
    with pytest.raises(CertificationError, match="unbalanced-classes: the value of anchor 0 cannot be proved with 40"):
        truth(case, bits=40)


def test_wide_enclosure_of_a_gradient_is_found() -> None:
    case = _golden("unbalanced-classes")
    found = loops.enclosures(case)
    rows = found.gradients["embeddings"]
    rows[2][1] = rows[2][1] + 2.0**-90 * (rows[2][1] - rows[2][1]).union(1)
    assert evaluate._first_wide(case, found) == "row 2 of the gradient with respect to embeddings"


@pytest.mark.parametrize(("temperature", "fitted"), [(0.5, False), (0.02, True)])
def test_random_batch_with_a_vanishing_gradient_is_of_the_level_digits(temperature: float, fitted: bool) -> None:
    """In torch's binary cross-entropy, the derivative of a positive's term is a difference of rounded numbers."""
    rows = np.array([[1.0, 0.0], [0.75, 0.125], [-0.75, 0.125], [-0.5, -0.125]])
    given = {"positive_pairs": [[0, 1], [1, 0], [2, 3], [3, 2]]}
    found = with_proof(Case("pairs", "nt_bxent", rows, given, {"temperature": temperature}))
    assert ("fitted-pairs" in found.flags) is fitted
    assert (level_of(found.flags) is Level.DIGITS) is fitted


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked only on Linux")
def test_second_process_proves_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "LEAST_AHEAD", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    claim, (ahead, here) = _claimed(), [[FreshBatch("supcon", 70, number) for number in range(3)] for _ in range(2)]
    with fresh.proved_ahead(ahead, claim):
        found = [batch.proved(claim) for batch in ahead[:2]]
    found.append(ahead[2].proved(claim))  # it is proved in this process if the context has ended
    for golden, expected in zip(found, (batch.proved(claim) for batch in here), strict=True):
        assert (golden.case.id, golden.flags) == (expected.case.id, expected.flags)
        assert golden.expected.values == expected.expected.values
        np.testing.assert_array_equal(golden.expected.gradient, expected.expected.gradient)
    assert known_rounding(found[0].case)


def test_case_whose_options_would_contradict_the_claim_is_not_changed() -> None:
    loss = "multiple_negatives_ranking"
    every = "query_to_doc+query_to_query+doc_to_query+doc_to_doc"
    claim = External(LOSSES[loss].fast, loss=loss, settings={"directions": every}).claim
    claim = replace(claim, passed=claim.passed - {"partition"})
    cases = [golden.case for golden in load_golden(losses=(loss,)) if golden.case.size <= 40]
    found = {case.option("partition"): proofs.case_as_claimed(case, claim) is case for case in cases}
    assert found["per_direction"], "partition per_direction excludes these directions"
    assert not all(proofs.case_as_claimed(case, claim) is case for case in cases)

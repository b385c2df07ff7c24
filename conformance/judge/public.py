"""Judge public losses by their recorded answers, or live from a folder with their repositories."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..diagnose.explain import Known, Observation, explain
from ..diagnose.search import Match, Searched
from ..implementations.base import Implementation, Unavailable
from ..implementations.callable import External
from ..implementations.public import FOLDER, WORLD_SIZES, PublicCode, PublicLoss, PublicRanks
from ..implementations.signatures import Claim
from ..suite.cases import Case
from ..suite.golden import GoldenCase, load_golden
from ..suite.levels import Level
from ..suite.records import Matrix, Outcome
from .check import CONFORMS, CheckResult, check, is_above, judge_target, load_target
from .comparisons import ERRORED, PASSED, ParityResult
from .levels import IN_FLOAT32, ROUNDS_BIAS, ROUNDS_TEMPERATURE
from .options import Request
from .parity import parity
from .proofs import as_claimed, digest_of
from .ranges import sentences
from .results import BAD, Check, Status, several
from .verify import truth_of

FLOAT32_NOTES = (IN_FLOAT32, ROUNDS_TEMPERATURE, ROUNDS_BIAS)

SEED = 7
"""The seed of the random batches of a live check."""

LARGEST = 64
"""Largest number of entries of the embeddings of a recorded case."""


@dataclass(frozen=True)
class Finding:
    """What was found about a public loss.

    Attributes:
        public: the loss.
        checks: number of checks.
        level: the highest level at which it conforms; "" if there is none.
        words: the reasons of the diagnosis, the limits (temperatures, norms and logits) and, if it applies, a note that
            the bounds of float32 were used.
    """

    public: PublicLoss
    checks: int
    level: str
    words: tuple[str, ...]

    @property
    def problems(self) -> list[str]:
        """Differences from the expected level and words."""
        level, found = self.public.level, "; ".join(self.words)
        problems = [f"expected level: {level or 'none'}"] * (self.level != level)
        return problems + [f"expected words: {words}" for words in self.public.says if words not in found]

    def lines(self) -> Iterator[str]:
        """Yield the lines of a report."""
        yield f"{self.public.name} as {self.public.loss}: {self.level or 'no level'}, {several(self.checks, 'check')}"
        yield from (f"  {words}" for words in self.words)
        yield from (f"  FAILED: {problem}" for problem in self.problems)


class Recorded(External):
    """A target that returns its recorded answers. The target itself is not needed."""

    def __init__(self, data: Mapping[str, Any], dtypes: Sequence[str]) -> None:
        Implementation.__init__(self, {}, "cpu")
        vars(self).update(dtypes=tuple(dtypes), deviations=())
        sets = {name: frozenset(data["claim"][name]) for name in ("passed", "required")}
        self.claim = Claim(**{**data["claim"], **sets})
        self.support, self.in_float32, self.outcomes = self.claim.support, data["in_float32"], {}
        self.answers = data["answers"]

    def evaluate(self, case: Case, dtype: str, usage: str = "") -> Outcome:
        """Return the recorded answer of a case.

        Raises:
            ValueError: the case has changed since its answer was recorded.
        """
        answer = self.answers[case.id]
        if answer["inputs"] != digest_of(case):
            raise ValueError(f"{case.id} has changed: run tools/record_public.py")
        matrices = {name: numbers(rows) for name, rows in answer["gradients"].items()}
        anchors = {int(row): float.fromhex(value) for row, value in answer.get("anchors", {}).items()}
        values, gradient = numbers(answer["values"]).tolist(), matrices.pop(case.first, None)
        outcome = Outcome(values, gradient, anchors or None, other_gradients=matrices)
        self.outcomes[case.id, dtype] = outcome
        return outcome


def request_of(public: PublicLoss, target: str) -> Request:
    """Return the request of a check of a loss."""
    return Request(target, public.loss, **{"seed": SEED, **public.options})


def dtypes_of(public: PublicLoss) -> tuple[str, ...]:
    """Return the dtypes in which a loss is judged. Its answers are recorded in the first one."""
    return tuple(public.options.get("dtypes", External.dtypes))


def written(public: PublicCode, folder: Path, place: Path) -> str:
    """Write the module of a loss into the folder ``place``. Return the target of its check."""
    path = place / f"{public.name.replace('-', '_')}.py"
    path.write_text(public.module(folder), encoding="utf-8")
    return f"{path}:{public.target}"


@cache
def _golden(loss: str) -> dict[str, GoldenCase]:
    return {golden.case.id: golden for golden in load_golden() if golden.case.loss == loss}


def numbers(written: object) -> Matrix:
    """Convert nested lists of hexadecimal floats to an array."""
    return np.asarray(np.vectorize(float.fromhex, otypes=[float])(np.array(written, dtype=object)))


def recorded(public: PublicLoss) -> tuple[Request, Recorded, dict[str, Any]]:
    """Return the request of a loss, its recorded answers as a target, and the record.

    Raises:
        Unavailable: no answers are recorded.
    """
    path = FOLDER / "answers" / f"{public.name}.json"
    if not path.is_file():
        raise Unavailable("no answers are recorded: run tools/record_public.py")
    data = json.loads(path.read_text(encoding="utf-8"))
    return request_of(public, "recorded"), Recorded(data, dtypes_of(public)[:1]), data


def replay(public: PublicLoss) -> Finding:
    """Judge the recorded answers of a loss.

    Some results are taken from the record: the limits, the level of the usages (such as autocast), the identified loss,
    and the reasons that no recorded case shows.

    Raises:
        Unavailable: no answers are recorded.
    """
    request, target, data = recorded(public)
    stored, checks, observed = _golden(public.loss), list[Check](), list[Observation]()
    for name in data["answers"]:
        case, golden = as_claimed(stored[name].case, stored[name], target.claim)
        found = list(judge_target(request, target, case, golden, target.dtypes, ()))
        checks += found
        if found[0].status is Status.FAILED and golden and not is_above(found[0], Level.POLICIES):
            outcome, dtype = target.outcomes[case.id, found[0].dtype], found[0].dtype
            observed.append(
                Observation(case, [dtype], outcome, truth_of(case, golden), found[0].level == Level.FORMULA)
            )
        elif golden and found[0].status is Status.PASSED:
            observed.append(Observation(case, (), None, truth_of(case, golden)))
    fitting = [Match.from_data(data["match"])] if data.get("match") else []
    known = Known(search=lambda: Searched(fitting=fitting), call=target.claim.call)
    reasons = [one.words for one in explain(observed, known).reasons]
    level = min(level_of(checks), data["usages"], key=["", *map(str, Level)].index)
    return Finding(public, len(checks), level, tuple(dict.fromkeys([*reasons, *data["said"]])))


def level_of(checks: Sequence[Check]) -> str:
    """Return the highest level at which no check fails; "" if there is none."""
    failing = [check for check in checks if check.status in BAD]
    passed = [level for level in Level if all(is_above(one, level) for one in failing)]
    return str(max(passed)) if passed else ""


def judge_live(public: PublicLoss, folder: Path) -> tuple[Finding, CheckResult]:
    """Check a loss from the folder with the repositories, with random batches and usages.

    Raises:
        Unavailable: the repository is missing.
    """
    with tempfile.TemporaryDirectory() as place:
        found = check(request_of(public, written(public, folder, Path(place))))
    passed = [level for level in Level if found.verdict_at(level) == CONFORMS]
    words = (*(one.words for one in found.diagnosis.reasons), *_said(found))
    return Finding(public, len(found.judged), str(max(passed)) if passed else "", words), found


@dataclass(frozen=True)
class RanksFinding:
    """What was found about a public loss in several processes. The fields are those of ``PublicRanks``."""

    public: PublicRanks
    agrees: tuple[int, ...]
    mistakes: tuple[str, ...]
    gradient: tuple[float, ...]
    result: ParityResult

    @property
    def problems(self) -> list[str]:
        """Differences from the expected fields. The gradients are compared with 3 digits."""
        public = self.public
        expected = {"agrees": tuple(public.agrees), "mistakes": tuple(public.mistakes)}
        wrong = [f"expected {name}: {value}" for name, value in expected.items() if getattr(self, name) != value]
        same = np.shape(self.gradient) == np.shape(public.gradient) and np.allclose(
            self.gradient, public.gradient, rtol=1e-3, equal_nan=True
        )
        return wrong + [f"expected gradient: {public.gradient}"] * (not same)

    def lines(self) -> list[str]:
        """The lines of a report."""
        return [*self.result.lines(), *(f"  FAILED: {problem}" for problem in self.problems)]


def judge_ranks(public: PublicRanks, folder: Path) -> RanksFinding:
    """Compare a loss in several processes with one process, from the folder with the repositories.

    Raises:
        Unavailable: the repository is missing.
    """
    with tempfile.TemporaryDirectory() as place:
        options = {"world_size": WORLD_SIZES, "only": ("loss", "gradient"), **public.options}
        found = parity(written(public, folder, Path(place)), **options)
    at = {w: [one for one in found.comparisons if one.name.startswith(f"world size {w}")] for w in WORLD_SIZES}
    agrees = tuple(w for w in WORLD_SIZES if {one.status for one in at[w]} == {PASSED})
    norms = {w: next((one.factor for one in at[w] if one.name.endswith(": gradient")), None) for w in WORLD_SIZES}
    gradient = tuple(np.nan if norm is None else norm for norm in norms.values())
    errors = [one.message.partition(";")[0] for one in found.comparisons if one.status == ERRORED and not one.mistake]
    return RanksFinding(public, agrees, (*found.mistakes, *errors[:1]), gradient, found)


def _said(found: CheckResult) -> list[str]:
    """Return the limits of a target, and a note if it is judged by the bounds of float32."""
    return [*sentences(found.limits), *(note for note in found.notes if note in FLOAT32_NOTES)]


def record(public: PublicLoss, folder: Path) -> Finding:
    """Check a loss from the folder with the repositories, and record its answers for some small golden cases.

    Every flag, every value of an option, and every pair of level and status that occurs among the small cases also
    occurs among the recorded ones.

    Returns:
        What the live check found.

    Raises:
        Unavailable: the repository is missing.
    """
    finding, result = judge_live(public, folder)
    dtype, answers, seen = dtypes_of(public)[0], dict[str, Any](), set[object]()
    results = {one.case: (one.level, one.status) for one in result.judged if one.dtype == dtype}
    with tempfile.TemporaryDirectory() as place:
        target = load_target(request_of(public, written(public, folder, Path(place))), ())
        try:
            for golden in sorted(_golden(public.loss).values(), key=lambda one: one.case.size):
                case, changed = as_claimed(golden.case, golden, target.claim)
                options = {(name, case.option(name)) for name in case.entry.choices}
                features = {*options, *(changed.flags if changed else ()), results.get(case.id)}
                small = case.holds_in(dtype) and case.embeddings.size <= LARGEST
                if features <= seen or not small or case.id not in results or target.refuses(case):
                    continue
                try:
                    outcome = target.evaluate(case, dtype)
                except Exception:  # external code may raise anything
                    continue
                seen |= features
                answers[case.id] = {
                    "inputs": digest_of(case),
                    "values": [value.hex() for value in outcome.values],
                    "gradients": {
                        name: [[x.hex() for x in row] for row in z.tolist()]
                        for name, z in case.gradients(outcome).items()
                    },
                }
                if outcome.anchors and target.claim.reduced_here:
                    answers[case.id]["anchors"] = {str(i): value.hex() for i, value in outcome.anchors.items()}
        finally:
            target.close()
    claim = {
        name: sorted(value) if isinstance(value, frozenset) else value for name, value in vars(target.claim).items()
    }
    single = next((note for note in result.notes if note in FLOAT32_NOTES), "")
    usages = level_of([one for one in result.judged if one.kind == "usage"])
    unseen = [one.words for one in result.diagnosis.reasons if answers.keys().isdisjoint(one.cases)]
    said = [*unseen, *_said(result)]
    data = {"claim": claim, "in_float32": single, "said": said, "usages": usages, "answers": answers}
    if match := result.diagnosis.match:
        data["match"] = match.as_data()
    path = FOLDER / "answers" / f"{public.name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data, indent=0) + "\n", encoding="utf-8", newline="\n")
    return finding

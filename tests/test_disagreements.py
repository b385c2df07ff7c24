"""Every answer in docs/disagreements.md has the printed value, and public code returned this value."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pairproof import fast
from pairproof.conformance.documents.load import load_worked, worked_cases
from pairproof.conformance.implementations.public import FOLDER, load_public
from pairproof.conformance.judge.public import numbers
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.golden import load_golden

PAGE = (Path(__file__).parent.parent / "docs/disagreements.md").read_text(encoding="utf-8")
CELLS = [[cell.strip() for cell in re.split(r"\|(?= )", line)[1:]] for line in PAGE.splitlines() if line[:2] == "| "]
ROWS = [[cell.rstrip("| ") for cell in cells] for cells in CELLS[1:]]

CASES = {one.case.id.removeprefix("golden/"): one.case for one in load_golden()}
CASES |= {case.id: case for fixture in load_worked() for case in worked_cases(fixture)}


def added_logarithm(given: dict[str, Any], temperature: float = 0.0075) -> torch.Tensor:
    """raminnakhli's DCL: log 1e-45, not -infinity, is added to the logits of the positive and of the self pair."""
    first, second = given["z"].chunk(2)
    logits = torch.cat([first @ first.T, first @ second.T], dim=1) / temperature
    masked = logits + math.log(1e-45) * torch.eye(len(first)).repeat(1, 2)
    loss: torch.Tensor = (masked.logsumexp(dim=1) - (first * second).sum(dim=1) / temperature).mean()
    return loss


def one_way(given: dict[str, Any], weights: Any, *, apart: bool = False) -> torch.Tensor:
    """The mean over both views, with weights of the positives; ``apart`` adds the logarithms of both views' sums."""
    views = F.normalize(given["z"], dim=1).chunk(2)
    closeness, own = (views[0] * views[1]).sum(dim=1), torch.eye(len(views[0]), dtype=torch.bool)
    values = []
    for one, other in (views, views[::-1]):
        logits = [(one @ z.T / given["t"]).masked_fill(own, -math.inf) for z in (one, other)]
        below = sum(s.logsumexp(dim=1) for s in logits) if apart else torch.cat(logits, dim=1).logsumexp(dim=1)
        values.append(below - weights(closeness) * closeness / given["t"])
    return torch.cat(values).mean()


IN_WORDS = {
    "the logarithm of 1e-45 is added to their logits": added_logarithm,
    "the logarithms of the sums of both views are added": lambda given: one_way(given, lambda c: 1, apart=True),
    "it is not": lambda given: one_way(given, lambda c: 2 - (c / 0.5).softmax(dim=0)),
}


def answers() -> list[tuple[str, str, str, str]]:
    """The case, the answer, the value and who gives it, for each row; an empty case is that of the row before."""
    found: list[tuple[str, str, str, str]] = []
    for _, case, answer, value, given_by in ROWS:
        found.append((case.strip("`") or found[-1][0], answer, value, given_by))
    return found


def names_of(case: Case) -> dict[str, Any]:
    """The names that a call may use: those of the page, and the functions of pairproof.fast."""
    given: dict[str, Any] = {"z": torch.tensor(case.embeddings), "t": case.temperature}
    given |= {name: torch.tensor(array) for name, array in {**case.arguments, **case.others}.items()}
    if "embeddings_b" in given:
        given |= {"a": given["z"], "b": given["embeddings_b"], "queue": given.get("negatives")}
    if "hard_negatives" in given:
        given["hard"] = given["hard_negatives"].unflatten(0, (case.n, -1))
    if case.loss == "sigmoid":
        cosines = F.normalize(given["a"], dim=1) @ F.normalize(given["b"], dim=1).T
        given |= {"bias": case.bias, "logits": cosines / case.temperature + case.bias}
    if "labels" in given:
        positive = (given["labels"][:, None] == given["labels"]).fill_diagonal_(False)
        given |= {"positive": positive, "count": positive.sum(dim=1)}
    if "partners" in given:
        given["items"] = torch.minimum(torch.arange(len(given["z"])), given["partners"])
    return {**vars(fast), "torch": torch, "F": F, **given}


def unit_of(text: str) -> float:
    """One unit of the last of six significant digits."""
    value = float(text)
    return 10.0 ** (math.floor(math.log10(abs(value))) - 5) if value else 1e-12


ROWS_BY_ID = [pytest.param(*row, id=f"{row[0]}-{k}") for k, row in enumerate(answers())]


@pytest.mark.parametrize(("case", "answer", "value", "given_by"), ROWS_BY_ID)
def test_answer_has_the_printed_value(case: str, answer: str, value: str, given_by: str) -> None:
    given = names_of(CASES[case])
    code = answer.startswith("`")
    found = eval(answer.strip("`"), given) if code else IN_WORDS[answer](given)  # the page is part of the repository
    assert f"{float(found):.6g}" == value


def test_answers_to_a_question_differ() -> None:
    values: dict[str, list[str]] = {}
    question = ""
    for text, _, _, value, _ in ROWS:
        question = text or question
        values.setdefault(question, []).append(value)
    assert len(values) == 20
    assert all(len({*found}) == len(found) >= 2 for found in values.values())


def test_recorded_programs_returned_the_printed_values() -> None:
    """Recorded answers contain the program's factor t / base_temperature, which is divided out unless the call has it.

    open_clip is recorded with chunks only, in float64.
    """
    confirmed = set()
    for case, answer, value, given_by in answers():
        for public in load_public():
            named = f"{public.repository} {public.commit[:7]}" in given_by and public.name != "open-clip-chunked"
            views = ("one view" in given_by) == ("one-view" in public.name)
            if not (named and views and public.loss == CASES[case].loss) or "1e-45" in answer or "grad(" in answer:
                continue
            recorded = json.loads((FOLDER / "answers" / f"{public.name}.json").read_text(encoding="utf-8"))
            found = recorded["answers"].get(CASES[case].id)
            if found is None:
                continue
            base = recorded["claim"]["settings"].get("base_temperature")
            factor = CASES[case].temperature / base if base and "base_temperature" not in answer else 1
            returned = float(numbers(found["values"])[0])
            assert abs(returned / factor - float(value)) <= 0.6 * unit_of(value), (public.name, case)
            confirmed.add(public.name)
    assert confirmed == {
        *("avalanche", "big-vision-siglip", "contrastive-learner", "dcl", "dclw", "dclw-without-n", "fsce"),
        *("google-supcon", "google-supcon-in", "google-supcon-one-view", "moco-v3", "multisupcontrast"),
        *("sentence-transformers", "slip-clip", "solo-mocov2plus", "solo-simclr"),
    }

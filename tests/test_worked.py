"""Judging printed figures: every figure has its recorded verdict, and a changed digit or mask entry is detected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pairproof.conformance.documents import figures as worked
from pairproof.conformance.documents.load import Figure, WorkedFixture, load_worked
from pairproof.conformance.truth.intervals import precision
from tests.each import each

FIXTURES = load_worked()
FIGURES = [
    pytest.param(fixture, figure, id=f"{fixture.document.id}/{figure.id}")
    for fixture in FIXTURES
    for figure in fixture.figures
]


@each(("fixture", "figure"), FIGURES)
def test_figure_has_the_recorded_verdict(fixture: WorkedFixture, figure: Figure) -> None:
    (judgement,) = worked.judge(fixture, [figure.id])
    assert judgement.passed, judgement.message
    assert judgement.matches
    assert list(figure.entries())


def test_artefacts_are_the_known_ones() -> None:
    verdicts = {f"{f.document.id}/{g.id}": g.verdict for f in FIXTURES for g in f.figures}
    artefacts = {name for name, verdict in verdicts.items() if verdict == "artefact"}
    assert artefacts == {"batch_tutorial/loss", "pair_notebook/in-103-loss-0.01"}


def other_digits(text: str, *, only_last: bool = False) -> Iterator[str]:
    """Copies of the text, each with one digit increased by 1 modulo 10; the last digit comes first."""
    for k in reversed(range(len(text))):
        if text[k].isdigit():
            yield text[:k] + str((int(text[k]) + 1) % 10) + text[k + 1 :]
            if only_last:
                return


def beyond(figure: Figure, text: str) -> list[str]:
    """For a figure of a public test with a stated precision: numbers that are further away than the test accepts."""
    return [f"{float(text) + sign * 2.01 * float(figure.within):.9f}" for sign in (1, -1)] if figure.within else []


def changed(printed: Any, index: tuple[int, ...], text: str | bool) -> Any:
    """A copy of a printed array with one entry replaced."""
    if not index:
        return text
    return tuple(changed(entry, index[1:], text) if k == index[0] else entry for k, entry in enumerate(printed))


@pytest.mark.parametrize("only_last", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("fixture", "figure"), [p for p in FIGURES if p.values[1].kind == "number"])  # type: ignore[union-attr]
@pytest.mark.quick(28)
def test_changed_digit_is_detected(fixture: WorkedFixture, figure: Figure, only_last: bool) -> None:
    """The recomputed value detects the change; the manifest's checksums are not used.

    A figure of a public test that states a precision is instead changed by twice this precision. The last digit is the
    hardest; changing every digit is slow.
    """
    source = fixture.input_of(figure)
    tried = 0
    if figure.length or source.exact is None:
        for text in other_digits(str(figure.printed), only_last=only_last):
            (judgement,) = worked.judge(replace(fixture, figures=(replace(figure, printed=text),)))
            assert not judgement.passed, text
            tried += 1
    else:
        with precision():
            known = worked.Evaluation(figure, fixture.call_of(figure), source)
            ways = [(way.way, way.quantity) for way in worked._ways(fixture, known)]
            for index, entry in figure.entries():
                for text in beyond(figure, str(entry)) or other_digits(str(entry), only_last=only_last):
                    wrong = replace(figure, printed=changed(figure.printed, index, text))
                    matches = [worked._compare(way, wrong, quantity) for way, quantity in ways]
                    assert any(not match.met for match in matches), (index, entry, text)
                    tried += 1
    assert tried


@pytest.mark.parametrize(("fixture", "figure"), [p for p in FIGURES if p.values[1].kind != "number"])  # type: ignore[union-attr]
def test_changed_mask_or_index_entry_is_detected(fixture: WorkedFixture, figure: Figure) -> None:
    call = fixture.calls[figure.call] if figure.call else None
    source = fixture.input_of(figure)
    with precision():
        for index, entry in figure.entries():
            wrong: str | bool = not entry if isinstance(entry, bool) else next(other_digits(entry))
            altered = replace(figure, printed=changed(figure.printed, index, wrong))
            quantity = worked.Evaluation(altered, call, source).quantity
            assert not worked._compare("structure", altered, quantity).met, (index, entry)


def test_misplaced_infinity_is_detected() -> None:
    fixture = next(f for f in FIXTURES if f.document.id == "supcon_notebook")
    figure = next(g for g in fixture.figures if g.id == "out-12-similarity")
    for index, text in (((0, 1), "-inf"), ((0, 0), "inf"), ((0, 0), "1.0")):
        wrong = replace(figure, printed=changed(figure.printed, index, text))
        (judgement,) = worked.judge(replace(fixture, figures=(wrong,)))
        assert not judgement.passed, (index, text)
        assert "diagonal" in judgement.message


def test_tables_in_float32_have_no_other_error_than_rounding() -> None:
    """The tests compare fewer digits than they print; every printed digit is that of float32, up to two units."""
    fixture = next(f for f in FIXTURES if f.document.id == "supcon_tests")
    figures = [figure for figure in fixture.figures if figure.within]
    assert len(figures) == 13
    for figure in figures:
        with precision():
            values = worked.Evaluation(figure, fixture.call_of(figure), fixture.input_of(figure)).quantity
        for (index,), entry in figure.entries():
            printed = np.float32(entry)
            assert abs(float(values[index]) - float(printed)) <= 2 * np.spacing(printed), (figure.id, index)


def test_message_names_the_entry_and_the_distance() -> None:
    fixture = next(f for f in FIXTURES if f.document.id == "supcon_notebook")
    figure = next(g for g in fixture.figures if g.id == "out-25-softmax")
    wrong = replace(figure, printed=changed(figure.printed, (0, 3), "0.14068465"))
    (judgement,) = worked.judge(replace(fixture, figures=(wrong,)))
    assert judgement.verdict == "artefact"
    assert "softmax[0][3] is printed 0.14068465 but computed [0.140684554" in judgement.message
    assert "units of the last printed place" in judgement.message


def test_wrong_true_value_of_an_artefact_is_detected() -> None:
    for fixture in FIXTURES:
        for figure in fixture.figures:
            if figure.instead is not None:
                for text in other_digits(figure.instead["value"]):
                    wrong = replace(figure, instead={**figure.instead, "value": text})
                    (judgement,) = worked.judge(replace(fixture, figures=(wrong,)))
                    assert not judgement.passed, text


def test_recovered_inputs_match_the_random_generator() -> None:
    """With the seed 2513899928, torch draws the notebook's embeddings.

    Two values differ by one unit in the last place; the fixture explains why.
    """
    torch = pytest.importorskip("torch")
    fixture = next(f for f in FIXTURES if f.document.id == "supcon_notebook")
    before = torch.random.get_rng_state()
    try:
        torch.manual_seed(2513899928)
        drawn = {name: torch.randn(*fixture.inputs[name].shape) for name in fixture.inputs}
    finally:
        torch.random.set_rng_state(before)
    for name, source in fixture.inputs.items():
        assert source.exact is not None
        exact = torch.tensor([[float(x) for x in row] for row in source.exact], dtype=torch.float64)
        ulps = (drawn[name].double() - exact).abs().numpy() / np.spacing(exact.abs().float().numpy())
        assert ulps.max() <= 1, name
        printed = [[f"{x:.4f}" for x in row] for row in drawn[name].tolist()]
        assert printed == [list(row) for row in source.printed], name  # type: ignore[arg-type, union-attr]

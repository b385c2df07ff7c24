"""A user's loss as an implementation: import, guesses, calls, limits, and gradients."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pairproof import fast
from pairproof.conformance.implementations import callable as targets
from pairproof.conformance.implementations import sandbox
from pairproof.conformance.implementations.base import Support, items_of
from pairproof.conformance.implementations.callable import Batch, External, Target
from pairproof.conformance.implementations.forms import plausible_forms
from pairproof.conformance.implementations.sandbox import TargetError, TargetMisused, find, within
from pairproof.conformance.implementations.signatures import Claim, Signature, guess_arrays
from pairproof.conformance.implementations.subprocess import RESTARTS, Lines
from pairproof.conformance.judge.options import Selection
from pairproof.conformance.judge.verify import judge_case
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.truth.compare import compare
from pairproof.conformance.truth.evaluate import truth
from pairproof.conformance.truth.tolerances import bounds

FOLDER = Path(__file__).parent / "targets"
LOSSES = FOLDER / "losses.py"
COMMAND = FOLDER / "command.py"
JAX = ("jax",) if importlib.util.find_spec("jax") else ()

ROWS = np.random.default_rng(7).normal(size=(6, 3)).astype(np.float32).astype(np.float64)
MORE = np.random.default_rng(8).normal(size=(6, 3)).astype(np.float32).astype(np.float64)

SUPCON = Case("case/supcon", "supcon", ROWS, {"labels": [0, 0, 1, 1, 1, 2]}, {"temperature": 0.5})
NT_XENT = Case("case/nt_xent", "nt_xent", ROWS, {"partners": [4, 3, 5, 1, 0, 2]}, {"temperature": 0.5})
NT_BXENT = Case("case/nt_bxent", "nt_bxent", ROWS, {"positive_pairs": [[0, 1], [1, 0], [2, 5]]}, {"temperature": 0.5})
INFO_NCE = Case(
    "case/info_nce", "info_nce", ROWS, {}, {"temperature": 0.5, "direction": "a_to_b"}, others={"embeddings_b": MORE}
)


def target(name: str, loss: str = "supcon", **options: object) -> External:
    return External(f"{LOSSES}:{name}", loss=loss, **options)  # type: ignore[arg-type]


def ratio(external: External, case: Case, dtype: str = "float64") -> float:
    """The worst error in units of its bound."""
    assert external.refuses(case) is None
    true = truth(case)
    return compare(case, true, external.evaluate(case, dtype), bounds(case, true, dtype), dtype).ratio


def with_options(case: Case, **options: object) -> Case:
    return replace(case, keywords={**case.keywords, **options})


@pytest.mark.parametrize(
    ("names", "call"),
    [
        ("embeddings, labels", "labels"),
        ("z, y", "labels"),
        ("x, targets, weight", "labels"),
        ("embeddings, partners", "partners"),
        ("embeddings, mask, temperature", "mask"),
        ("embeddings, labels=None, indices_tuple=None, ref_emb=None", "labels"),
        ("features, labels=None, mask=None", "features"),
        ("features", "features"),
        ("z_i, z_j", "views"),
        ("view_a, view_b", "views"),
        ("hidden1, hidden2, temperature=1", "views"),
        ("embeddings_a, embeddings_b", "views"),
        ("query, positive_key, negative_keys=None", "views"),
        ("embeddings, ref_emb", "views"),
        ("anchor, contrast, temperature, omega", "views"),
        ("premise, entailment, contradiction", "views"),
        ("mentor_emb, mentee_emb, positive_pairs", "views"),
        ("anchor_features, other_features, weights", "views"),
        ("embeddings", "stacked"),
        ("z, temperature=0.5, reduction='mean'", "stacked"),
        ("embeddings, positive_pairs", "pairs"),
        ("embeddings, pos_indices, *more, **others", "pairs"),
    ],
)
def test_call_is_guessed_from_parameter_names(names: str, call: str) -> None:
    scope: dict[str, object] = {}
    exec(f"def function({names}): ...", scope)
    best = plausible_forms(Signature(scope["function"]))[0]
    assert best.call == call
    assert names.split(",")[0] in best.words


@pytest.mark.parametrize(
    "names",
    ["", "*args, **kwargs", "one, two_things, three_more, four", "row_emb, class_emb, more", "row_emb, two, more"],
)
def test_parameters_that_fit_no_call_require_a_call_option(names: str) -> None:
    scope: dict[str, object] = {}
    exec(f"def function({names}): ...", scope)
    words = r"pass --call labels\|partners\|mask\|features\|views\|one_way\|stacked\|interleaved\|similarities\|pairs"
    with pytest.raises(TargetMisused, match=words) as raised:
        plausible_forms(Signature(scope["function"]))
    lines = str(raised.value).splitlines()
    assert "    labels: embeddings [N, D], class ids [N]" in lines
    assert "    one_way: first views [N, D], second views [N, D]; only the first views are anchors" in lines


def test_arrays_are_guessed_from_annotations_and_else_tried(tmp_path: Path) -> None:
    assert guess_arrays(find(f"{LOSSES}:Module")) == (("torch",), "its class, a torch module")
    assert guess_arrays(find(f"{LOSSES}:at_half")) == (("torch",), "its class, a torch module")
    assert guess_arrays(find(f"{FOLDER / 'plain.py'}:supcon")) == (("numpy",), "its annotations")
    assert guess_arrays(fast.supcon_loss) == (("torch",), "its annotations")
    path = tmp_path / "bare.py"
    path.write_text(
        "class Bare:\n    def __call__(self, embeddings, labels, temperature):\n        return 1.0\nit = Bare()\n"
    )
    for spec in (f"{LOSSES}:supcon", f"{path}:it"):
        assert guess_arrays(find(spec)) == (("torch", "numpy", *JAX), "")
    (tmp_path / "lone.py").write_text("import types\njnp = types.ModuleType('jax.numpy')\ndef f(z, y): ...\n")
    assert guess_arrays(find(f"{tmp_path / 'lone.py'}:f")) == (("torch", *JAX, "numpy"), "")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("losses.supcon", "expected package.module:attribute or file.py:attribute"),
        ("nowhere.py:supcon", "there is no file nowhere.py"),
        ("no_such_package.losses:supcon", "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"),
        (f"{LOSSES}:supkon", "has no attribute 'supkon'"),
        (f"{LOSSES}:Module.nothing", "has no attribute 'Module.nothing'"),
        (f"{LOSSES}:NOT_A_FUNCTION", "it is an int, which cannot be called"),
    ],
)
def test_missing_target_is_named(spec: str, words: str) -> None:
    with pytest.raises(TargetError, match=words):
        External(spec, loss="supcon")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_thing", r"No module named 'no_such_thing' \(searched .* and the installed packages\)"),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        ("def f(:", "cannot be imported: SyntaxError"),
    ],
)
def test_import_error_of_a_file_is_reported(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "mine.py").write_text(text + "\n")
    with pytest.raises(TargetError, match=words):
        External(f"{tmp_path / 'mine.py'}:f", loss="supcon")


def test_error_of_an_attribute_is_reported(tmp_path: Path) -> None:
    (tmp_path / "lazy.py").write_text("def __getattr__(name):\n    import no_such_thing\n")
    with pytest.raises(TargetError, match="f: ModuleNotFoundError: No module named 'no_such_thing'"):
        External(f"{tmp_path / 'lazy.py'}:f", loss="supcon")


def test_folder_is_named_where_a_missing_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "pairproof_src" / "losses" / "mine.py"
    path.parent.mkdir(parents=True)
    path.write_text("from pairproof_src.parts import half\n")
    (tmp_path / "pairproof_src" / "parts.py").write_text("def half(z, y): ...\n")
    with pytest.raises(TargetError) as raised:
        find(f"{path}:half")
    advice = f"packages): pairproof_src is in {tmp_path}; run pairproof there, with pairproof_src/losses/mine.py:half"
    assert str(raised.value).endswith(advice)
    monkeypatch.chdir(tmp_path)
    assert find("pairproof_src/losses/mine.py:half").__name__ == "half"
    for name in [name for name in sys.modules if name.startswith("pairproof_src")]:
        del sys.modules[name]
    path.write_text("import no_such_thing\n")
    with pytest.raises(TargetError, match=r"packages\): install it, or copy the loss into a file of its own$"):
        find(f"{path}:half")


@pytest.mark.parametrize("from_root", [True, False])
@pytest.mark.parametrize(
    "line",
    ["from ..parts import half", "from pairproof_package.parts import half", "from pairproof_nce.two import half"],
)
def test_file_of_a_package_is_imported_as_one_of_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, *, from_root: bool
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path if from_root else Path(__file__).parent)
    folder = tmp_path / "pairproof_package" / "losses"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").write_text("")
    (folder.parent / "parts.py").write_text("def half(z, y, temperature):\n    return (z * z).sum() / temperature\n")
    # A module with the name of the package that it imports from.
    of_package = tmp_path / "pairproof_nce"
    of_package.mkdir()
    (of_package / "__init__.py").write_text("")
    (of_package / "two.py").write_text("from pairproof_package.parts import half\n")
    path = of_package / "pairproof_nce.py" if "nce" in line else folder / "mine.py"
    path.write_text(f"{line}\n")
    try:
        assert find(f"{path.relative_to(tmp_path) if from_root else path}:half").__name__ == "half"
    finally:
        for name in [name for name in sys.modules if name.startswith(("pairproof_package", "pairproof_nce"))]:
            del sys.modules[name]


def test_missing_package_of_a_module_in_a_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairproof_of_others").mkdir()
    (tmp_path / "pairproof_of_others" / "mine.py").write_text("from . import helper\n")
    (tmp_path / "pairproof_of_others" / "helper.py").write_text("import no_such_thing\n")
    with pytest.raises(TargetError, match="cannot be imported: ModuleNotFoundError: No module named 'no_such_thing'"):
        find("pairproof_of_others/mine.py:f")


def test_file_imports_modules_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "pairproof_test_helper.py").write_text("TEMPERATURE = 0.5\n")
    (tmp_path / "mine.py").write_text(
        "from pairproof_test_helper import TEMPERATURE\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Mine:\n    temperature: float = TEMPERATURE\n"
        "    def __call__(self, embeddings, labels): return 1.0\n"
    )
    found = External(f"{tmp_path / 'mine.py'}:Mine", loss="supcon")
    found.settle()
    assert found.claim.temperature is None
    assert found.evaluate(SUPCON, "float64").values == [1.0]


def test_class_is_imported_by_module_name() -> None:
    found = External("pairproof.fast:SupConLoss", loss="supcon")
    assert found.claim.passed >= {"denominator", "anchors", "ref_embeddings", "self_rows", "reduction"}
    assert ratio(found, SUPCON) <= 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "supkon"}, "unknown loss 'supkon'; known: supcon"),
        ({"call": "rows"}, "unknown call 'rows'; known: labels, partners, mask, features"),
        ({"arrays": "tensorflow"}, "unknown kind of arrays 'tensorflow'"),
        (
            {"call": "pairs"},
            r"supcon cannot be computed by a target .* pairs: pass --call labels\|.*\|one_way\|similarities$",
        ),
        (
            {"loss": "info_nce"},
            r"called with labels; the parameters .* suggest this call; .* pass --call towers\|views\|similarities$",
        ),
        ({"settings": {"no_positiv": "drop"}}, "supcon_loss has no option 'no_positiv'; known: base_temperature"),
        ({"settings": {"direction": "both"}}, "supcon_loss has no option 'direction'.*; of info_nce: --loss"),
        ({"settings": {"no_positive": "ignore"}}, "no_positive: expected one of zero, drop, nan"),
        ({"settings": {"base_temperature": "warm"}}, "base_temperature: expected a number"),
        ({"settings": {"base_temperature": "nan"}}, "base_temperature: expected a number"),
        ({"settings": {"temperature": "1"}}, "the temperature has its own option, --temperature"),
        ({"settings": {"anchors": "first"}}, r"claim anchors=\*, which means that it is taken by keyword"),
        ({"settings": {"reduction": "*"}}, r"reduction=\*: the target has no parameter reduction"),
    ],
)
def test_contradictory_options_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(TargetMisused, match=words):
        target("supcon", **options)


def test_unknown_temperature_requires_an_option() -> None:
    with pytest.raises(
        TargetMisused,
        match=r"no argument temperature \(or tau, or logit_scale\): pass the temperature that is built in with",
    ):
        target("built_in")
    with pytest.raises(TargetMisused, match="--temperature"):
        External(lambda embeddings, labels: embeddings.sum(), loss="supcon", call="labels")


def test_default_of_a_number_that_is_not_that_of_the_definition_is_noted() -> None:
    def scaled(
        embeddings: torch.Tensor, labels: torch.Tensor, temperature: float = 0.07, base_temperature: float = 0.2
    ) -> torch.Tensor:
        return embeddings.sum()

    note = "base_temperature: always passed; a call without it computes 0.2, not None"
    assert note in External(scaled, loss="supcon").notes


def test_built_in_temperature_selects_the_cases() -> None:
    for found in (target("built_in", temperature=0.5), target("at_half")):
        assert found.claim.temperature == 0.5
        assert ratio(found, SUPCON) <= 1
        assert found.refuses(with_options(SUPCON, temperature=0.1)) == "needs a temperature other than 0.5"
    assert any("0.5 is built in, an attribute of the instance" in note for note in target("at_half").notes)


def test_claimed_temperature_is_passed_unless_it_is_the_default() -> None:
    def of_scale(embeddings: torch.Tensor, labels: torch.Tensor, log_scale: float = math.log(1 / 0.07)) -> torch.Tensor:
        return fast.supcon_loss(embeddings, labels, temperature=math.exp(-log_scale))

    for subject, name in ((fast.SupConLoss, "temperature"), (fast.supcon_loss, "temperature"), (of_scale, "log_scale")):
        found = External(subject, loss="supcon", temperature=0.5)
        assert f"temperature: 0.5 is passed as {name}, as claimed" in found.notes
        assert found.claim.temperature == 0.5
        assert ratio(found, SUPCON) <= 1
    found = External(of_scale, loss="supcon", temperature=0.07)
    assert "temperature: 0.07 is built in, as claimed; its parameter log_scale is not passed" in found.notes


def test_temperature_is_passed_under_the_name_of_the_target() -> None:
    for name, loss, case in (("views", "nt_xent", NT_XENT), ("Module", "supcon", SUPCON)):
        found = target(name, loss, settings={} if name == "Module" else {"reduction": "none"})
        assert found.claim.temperature is None
        assert "temperature: passed as tau" in found.notes
        assert ratio(found, case) <= 1
        assert ratio(found, with_options(case, temperature=2.0)) <= 1


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("name", "case", "options"),
    [
        ("supcon", SUPCON, {}),
        ("supcon", NT_XENT, {}),
        ("Module", SUPCON, {}),
        ("Features", SUPCON, {"normalised": True}),
        ("Features", NT_XENT, {"normalised": True}),
        ("views", NT_XENT, {"settings": {"reduction": "none"}}),
        ("stacked", NT_XENT, {}),
        ("scaled", with_options(INFO_NCE, direction="both"), {}),
        ("one_way", INFO_NCE, {"settings": {"direction": "a_to_b"}}),
        ("pairs", NT_BXENT, {}),
    ],
)
def test_every_call_returns_values_and_gradients_in_the_order_of_the_case(
    name: str, case: Case, options: dict[str, object], dtype: str
) -> None:
    found = target(name, case.loss, **options)
    assert ratio(found, case, dtype) <= 1
    outcome = found.evaluate(case, dtype)
    assert outcome.gradient is not None
    assert outcome.gradient.shape == case.embeddings.shape
    assert set(outcome.other_gradients) == set(case.others)
    # The comparison detects a gradient whose rows are in another order.
    true = truth(case)
    swapped = replace(outcome, gradient=outcome.gradient[::-1].copy())
    assert compare(case, true, swapped, bounds(case, true, dtype), dtype).ratio > 1


def test_mask_of_positives_is_passed_with_features() -> None:
    mask = [[i != j and (i + j) % 2 == 0 for j in range(6)] for i in range(6)]
    case = replace(SUPCON, arguments={"positives": mask})
    assert ratio(target("Features", normalised=True), case) <= 1
    assert target("supcon").refuses(case) == "has no parameter positives"
    assert ratio(External("pairproof.fast:supcon_loss", loss="supcon"), case) <= 1


class Views(torch.nn.Module):
    """A right loss, or one that is wrong only for items with several views."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, features: torch.Tensor, labels: Any = None, mask: Any = None, temperature: float = 0.1) -> Any:
        items, views, _ = features.shape
        if self.wrong == "first":
            features, views = features[:, :1], 1
        rows = torch.cat(features.unbind(1))
        if self.wrong == "mixed":
            rows = features.reshape(items * views, -1)
        same = (labels[:, None] == labels if labels is not None else mask.bool()).repeat(views, views)
        if self.wrong == "items":
            same &= ~torch.eye(items, dtype=torch.bool).repeat(views, views)
        return fast.supcon_loss(rows, positives=same.fill_diagonal_(False), temperature=temperature)


@pytest.mark.slow
def test_features_have_several_views_if_class_sizes_allow() -> None:
    right, wrong = Views(), [Views(words) for words in ("first", "mixed", "items")]
    options = {"loss": "supcon", "call": "features", "arrays": "torch"}
    for labels, rows in (((0, 1, 0, 1, 1, 1), 6), ((2, 1, 1, 2, 2, 1), 6), ((0, 0, 1, 1, 2), 5)):
        case = replace(SUPCON, embeddings=SUPCON.embeddings[:rows], arguments={"labels": list(labels)})
        for similarity in ("labels", "positives"):
            if similarity == "positives":
                mask = [[a == b and i != j for j, b in enumerate(labels)] for i, a in enumerate(labels)]
                case = replace(case, arguments={"positives": mask})
            for dtype in ("float64", "float32"):
                assert ratio(External(right, **options), case, dtype) <= 1
            for one in wrong:
                assert (ratio(External(one, **options), case) > 1) == (rows == 6)
    assert any("an item has two views" in note for note in External(right, **options).notes)


def test_items_are_rows_that_share_their_positives() -> None:
    def of(*labels: int, **options: object) -> list[tuple[int, ...]]:
        rows = np.ones((len(labels), 2))
        return items_of(Case("mine", "supcon", rows, {"labels": list(labels)}, {"temperature": 0.1, **options}))

    assert of(0, 1, 0, 1) == [(0, 2), (1, 3)]
    assert of(0, 1, 0, 1, 0, 1) == [(0, 2, 4), (1, 3, 5)]
    assert of(0, 0, 0, 0, 1, 1) == [(0, 1), (2, 3), (4, 5)]
    assert of(0, 1, 1, 2) == [(0,), (1,), (2,), (3,)]
    assert of(0, 0, anchors=(True, False)) == [(0,), (1,)]


def test_arrays_are_passed_by_keyword_if_the_target_takes_them() -> None:
    refs = replace(
        SUPCON,
        arguments={**SUPCON.arguments, "ref_labels": [2, 1, 0, 1, 0, 2], "self_rows": [0, -1, 2, -1, -1, 5]},
        others={"ref_embeddings": MORE},
    )
    some = with_options(SUPCON, anchors=(True, False, True, True, False, False))
    queue = replace(INFO_NCE, others={**INFO_NCE.others, "negatives": MORE[:4] + 1})
    ours = External("pairproof.fast:supcon_loss", loss="supcon")
    assert ratio(ours, refs) <= 1
    assert ratio(ours, some) <= 1
    assert ratio(External("pairproof.fast:info_nce_loss", loss="info_nce"), queue) <= 1
    for case, words in ((refs, "has no parameter ref_embeddings"), (some, "has no parameter anchors")):
        assert target("supcon").refuses(case) == words
    assert target("one_way", "info_nce", settings={"direction": "a_to_b"}).refuses(queue) == (
        "has no parameter negatives"
    )


def test_own_losses_support_their_calls() -> None:
    partners = External("pairproof.fast:nt_xent_loss", loss="nt_xent")
    assert "partners" in partners.claim.passed
    assert ratio(partners, NT_XENT) <= 1
    assert ratio(External("pairproof.fast:nt_bxent_loss", loss="nt_bxent"), NT_BXENT) <= 1


def test_support_returns_the_reason_to_skip_a_case() -> None:
    support = Support(
        ("supcon",),
        {"reduction": ("mean",), "direction": ("both",)},
        ("anchors",),
        (("has 7 rows", lambda case: case.n == 7), ("has 6 rows", lambda case: case.n == 6)),
    )
    assert support.refuses(NT_XENT) == "does not compute nt_xent"
    assert support.refuses(with_options(SUPCON, reduction="sum")) == "needs reduction=sum"
    assert support.refuses(with_options(SUPCON, anchors=(True,) * 6)) == "has no parameter anchors"
    assert support.refuses(SUPCON) == "has 6 rows"
    assert replace(support, also=()).refuses(SUPCON) is None
    assert Support().refuses(NT_XENT) is None


def test_target_is_called_on_a_batch() -> None:
    labels, pairs = SUPCON.arguments["labels"], [[0, 1], [1, 0], [2, 5]]
    rows = torch.tensor(ROWS)

    def seen(*given: object, temperature: float = 0.5, **keywords: object) -> object:
        shapes.append([tuple(one.shape) for one in (*given, *keywords.values())])
        return given[0].sum() * temperature

    for call, batch, expected in (
        ("labels", Batch("mine", "labels", rows, labels), [(6, 3), (6,)]),
        ("pairs", Batch("mine", "pairs", rows, positive_pairs=pairs), [(6, 3), (3, 2)]),
        ("views", Batch("mine", "views", rows, n_views=2), [(3, 3), (3, 3)]),
        ("stacked", Batch("mine", "views", rows, n_views=2), [(6, 3)]),
        ("features", Batch("mine", "features", rows, labels[:3], n_views=2), [(3, 2, 3), (3,)]),
        ("features", Batch("mine", "features", rows, n_views=3), [(2, 3, 3)]),
    ):
        shapes: list[list[tuple[int, ...]]] = []
        for arrays in ("torch", "numpy"):
            found = Target(seen, call, arrays)
            assert found.takes_temperature
            answer = found.evaluate(replace(batch, keywords={"temperature": 2.0}))
            first = ROWS[:3].sum() if call == "views" else ROWS.sum()
            assert answer.total == pytest.approx(2 * first)
            assert (answer.gradient is None) == (arrays == "numpy")
        assert answer.values.dtype == torch.float64
        assert shapes == [expected, expected]
    per_row = Target(lambda embeddings, labels: embeddings.sum(dim=1), "labels", "torch")
    loss, weights = per_row.loss(Batch("mine", "labels", rows.requires_grad_(), labels)), [1.0, 2.0, 0.0, 0.0, 0.0, 3.0]
    (gradient,) = torch.autograd.grad(loss @ torch.tensor(weights, dtype=torch.float64), rows)
    assert gradient[:, 0].tolist() == weights


def test_options_without_a_parameter_must_be_claimed() -> None:
    plain = target("supcon")
    dropped = with_options(SUPCON, no_positive="drop")
    assert plain.refuses(dropped) == "needs no_positive=drop"
    assert plain.refuses(with_options(SUPCON, reduction="sum")) == "needs reduction=sum"
    scaled = with_options(SUPCON, base_temperature=1.0)
    assert plain.refuses(scaled) == "needs a base_temperature"
    assert plain.refuses(NT_XENT) == "does not compute nt_xent"
    drops = target("drops", settings={"no_positive": "drop"})
    assert drops.refuses(SUPCON) == "needs no_positive=zero"
    assert ratio(drops, dropped) <= 1
    # The option has no effect if every anchor has a positive.
    paired = replace(dropped, arguments={"labels": [0, 0, 1, 1, 2, 2]})
    assert plain.refuses(paired) is None
    same = with_options(SUPCON, base_temperature=0.5)
    assert plain.refuses(same) is None
    both = target("supcon", settings={"no_positive": ("zero", "drop")})
    assert both.refuses(SUPCON) is None
    assert both.refuses(dropped) is None


def test_claimed_value_restricts_a_passed_option() -> None:
    module = target("Module", settings={"reduction": "sum"})
    assert module.refuses(SUPCON) == "needs reduction=mean"
    assert ratio(module, with_options(SUPCON, reduction="sum")) <= 1
    assert ratio(target("Module"), with_options(SUPCON, reduction="none")) <= 1


def test_parameter_with_an_unknown_default_is_not_passed() -> None:
    def loss(embeddings, labels, temperature, similarity=len):
        assert similarity is len
        return fast.supcon_loss(embeddings, labels, temperature=temperature)

    found = External(loss, loss="supcon", call="labels")
    assert found.claim.passed == frozenset()
    assert any(note.startswith("similarity: not passed: its default ") for note in found.notes)
    assert ratio(found, SUPCON) <= 1


def test_missing_base_temperature_is_passed_as_the_temperature() -> None:
    features = target("Features", normalised=True)
    assert "base_temperature" in features.claim.passed
    assert ratio(features, SUPCON) <= 1
    assert ratio(features, with_options(SUPCON, base_temperature=2.0)) <= 1


def test_values_of_anchors_are_reduced_by_the_harness_and_kept() -> None:
    found = target("per_anchor", settings={"reduction": "none"})
    for reduction in ("mean", "sum", "none"):
        case = with_options(SUPCON, reduction=reduction)
        assert ratio(found, case) <= 1
        outcome = found.evaluate(case, "float64")
        assert outcome.anchors is not None
        assert list(outcome.anchors) == list(range(6))
    wrong = External(
        lambda embeddings, labels, temperature: embeddings.sum(), loss="supcon", call="labels",
        settings={"reduction": "none"},
    )  # fmt: skip
    with pytest.raises(TargetError, match="returned 1 values, expected one for each of 6 anchors"):
        wrong.evaluate(SUPCON, "float64")


def test_mean_over_pairs_weights_the_values_of_anchors() -> None:
    found = External(
        lambda embeddings, labels, temperature: fast.nt_xent_pairwise_loss(
            embeddings, labels, temperature=temperature, reduction="none"
        ),
        loss="nt_xent_pairwise",
        call="labels",
        settings={"reduction": "none"},
    )
    case = replace(with_options(SUPCON, reduction="mean_pairs"), loss="nt_xent_pairwise")
    assert ratio(found, case) <= 1


def test_values_of_anchors_come_from_a_second_call() -> None:
    outcome = External("pairproof.fast:supcon_loss", loss="supcon").evaluate(SUPCON, "float64")
    assert outcome.anchors is not None
    assert outcome.values[0] == pytest.approx(sum(outcome.anchors.values()) / 6, rel=1e-12)
    assert target("supcon").evaluate(SUPCON, "float64").anchors is None


@pytest.mark.parametrize("own", ["a_to_b", "b_to_a"])
@pytest.mark.parametrize("direction", ["a_to_b", "b_to_a", "both"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_towers_are_swapped_for_one_direction(own: str, direction: str, reduction: str) -> None:
    def other_way(view_a, view_b, temperature, reduction="mean"):
        return fast.info_nce_loss(view_a, view_b, temperature=temperature, reduction=reduction, direction=own)

    found = External(other_way, loss="info_nce", call="views", settings={"direction": own})
    assert ratio(found, with_options(INFO_NCE, direction=direction, reduction=reduction)) <= 1


def test_rows_are_normalised_if_claimed() -> None:
    assert ratio(target("dot", normalised=True), SUPCON) <= 1
    assert ratio(target("dot"), SUPCON) > 1
    dot = with_options(SUPCON, similarity="dot")
    assert ratio(target("dot", settings={"similarity": "dot"}), dot) <= 1
    assert target("dot", normalised=True).refuses(dot) == "needs similarity=dot"


def test_numpy_target_is_judged_by_values_only() -> None:
    found = External(f"{FOLDER / 'plain.py'}:supcon", loss="supcon")
    assert found.gradients_judged is False
    assert "gradient: not judged, because a numpy function returns none" in found.notes
    assert "temperature: passed, because the target takes any keyword; override with --temperature" in found.notes
    assert ratio(found, SUPCON) <= 1
    assert found.evaluate(SUPCON, "float64").gradient is None
    seen = []
    watched = External(
        lambda embeddings, labels, temperature: seen.append((embeddings.dtype, labels.dtype)) or 1.0,
        loss="supcon",
        call="labels",
        arrays="numpy",
    )
    watched.evaluate(SUPCON, "float32")
    watched.evaluate(SUPCON, "float64")
    assert seen == [(np.float32, np.int64), (np.float64, np.int64)]
    with pytest.raises(TargetMisused, match="numpy has no bfloat16"):
        External(f"{FOLDER / 'plain.py'}:supcon", loss="supcon", dtypes=("float32", "bfloat16"))
    with pytest.raises(TargetMisused, match="rows of norm 1 are not exactly representable in float16"):
        target("supcon", normalised=True, dtypes=("float16",))


def test_missing_jax_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    right = importlib.import_module

    def without(name: str, package: str | None = None) -> object:
        if name.partition(".")[0] == "jax":
            raise ModuleNotFoundError("No module named 'jax'")
        return right(name, package)

    monkeypatch.setattr(targets.importlib, "import_module", without)
    with pytest.raises(TargetError, match=r"jax is needed to call it but is not installed .*: pip install jax"):
        External(f"{LOSSES}:supcon", loss="supcon", arrays="jax")


@pytest.mark.parametrize("reduction", ["mean", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_jax_target_returns_values_and_gradients(reduction: str) -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")

    def supcon(embeddings, labels, tau):
        rows = embeddings / jax.numpy.linalg.norm(embeddings, axis=1, keepdims=True)
        own = jax.numpy.eye(len(rows), dtype=bool)
        logs = jax.nn.log_softmax(jax.numpy.where(own, -jax.numpy.inf, rows @ rows.T / tau), axis=1)
        positives = (labels[:, None] == labels[None]) & ~own
        values = jax.numpy.where(positives, -logs, 0).sum(axis=1) / jax.numpy.maximum(positives.sum(axis=1), 1)
        return values.mean() if reduction == "mean" else values

    found = External(
        supcon,
        loss="supcon",
        call="labels",
        arrays="jax",
        settings={} if reduction == "mean" else {"reduction": "none"},
    )
    for dtype in ("float64", "float32"):
        assert ratio(found, SUPCON, dtype) <= 1
        assert found.evaluate(SUPCON, dtype).gradient is not None


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (1.0, "returned a float where a tensor is expected"),
        (None, "returned nothing where a tensor is expected"),
        (
            (torch.ones(()), torch.ones(())),
            r"returned 2 results, and more than one may be the loss: 0 \(shape \[\]\), 1",
        ),
        (("high", 1), r"returned 2 results, and none is a loss: 0 \(str\), 1 \(int\); name it with --result NAME"),
        (torch.ones((), dtype=torch.int64), "returned a tensor of torch.int64"),
    ],
)
def test_result_that_is_not_a_loss_is_reported(returned: object, words: str) -> None:
    found = External(lambda embeddings, labels, temperature: returned, loss="supcon", call="labels")
    with pytest.raises(TargetError, match=words):
        found.evaluate(SUPCON, "float64")
    found = External(lambda embeddings, labels, temperature: "high", loss="supcon", call="labels", arrays="numpy")
    with pytest.raises(TargetError, match="returned a str where a number or an array is expected"):
        found.evaluate(SUPCON, "float64")


def test_several_values_instead_of_one_fail_without_an_exception() -> None:
    (check, _) = judge_case(SUPCON, None, [target("per_anchor")], Selection())
    assert check.message == "loss: expected 1 values, got 6"


def test_case_has_a_time_limit() -> None:
    before, handler = signal.setitimer(signal.ITIMER_REAL, 1000.0), signal.getsignal(signal.SIGALRM)
    with pytest.raises(TargetError, match=r"took longer than 0\.2 s \(--limit\)"):
        target("hangs", limit=0.2).evaluate(SUPCON, "float64")
    assert signal.getsignal(signal.SIGALRM) == handler
    remaining, _ = signal.setitimer(signal.ITIMER_REAL, *before)
    assert 900 < remaining <= 1000
    with within(5.0):
        pass
    assert signal.setitimer(signal.ITIMER_REAL, *before)[0] == before[0]


WASTED = 2**31
"""A number of bytes that other tests never freed, so that they must be new memory; none of them is written."""


def hungry(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.empty(WASTED, dtype=torch.int8)[:0].sum() + embeddings.sum()


def starving(embeddings: np.ndarray, labels: np.ndarray, temperature: float) -> float:
    return float(np.empty(WASTED, np.int8)[:0].sum() + embeddings.sum())


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux reports and limits the memory of a process")
@pytest.mark.parametrize("wasteful", [hungry, pytest.param(starving, marks=pytest.mark.slow)])
def test_case_has_a_memory_limit(wasteful: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    arrays = "torch" if wasteful is hungry else "numpy"
    found = External(wasteful, loss="supcon", call="labels", arrays=arrays)
    found.evaluate(SUPCON, "float64")
    monkeypatch.setattr(sandbox, "_free_memory", lambda: 2**28)
    with pytest.raises(TargetError, match=r"needs more than the 0\.21 GiB of memory that a case may use"):
        found.evaluate(SUPCON, "float64")
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    monkeypatch.setattr(sandbox, "_free_memory", lambda: None)
    found.evaluate(SUPCON, "float64")


def test_other_errors_of_a_target_propagate() -> None:
    def broken(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match=r"^no$"):
        External(broken, loss="supcon", call="labels", arrays="torch").evaluate(SUPCON, "float64")


def test_target_cannot_exit_the_process() -> None:
    with pytest.raises(TargetError, match=r"tried to exit the process: SystemExit\(5\)"):
        target("leaves").evaluate(SUPCON, "float64")
    with pytest.raises(TargetError, match="tried to exit the process"):
        target("leaves", limit=None).evaluate(SUPCON, "float64")


class Panic(BaseException):
    """An exception that a library in another language may raise."""


def test_base_exception_is_an_error_of_the_case() -> None:
    def panics(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
        raise Panic("index out of bounds")

    with pytest.raises(TargetError, match=r"^Panic: index out of bounds$"):
        External(panics, loss="supcon", call="labels", arrays="torch", limit=None).evaluate(SUPCON, "float64")


def test_infinite_limit_means_no_limit() -> None:
    assert ratio(target("supcon", limit=float("inf")), SUPCON) <= 1


def test_float32_temperature_is_shown_with_all_digits() -> None:
    class Learned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = torch.nn.Parameter(torch.tensor(0.1))

        def forward(self, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return fast.supcon_loss(embeddings, labels, temperature=float(self.temperature.detach()))

    found = External(Learned(), loss="supcon")
    assert found.refuses(SUPCON) == "needs a temperature other than 0.10000000149011612"
    assert any("--temperature 0.1 --dtype float32 judges it as 0.1" in note for note in found.notes)
    assert (
        ratio(External(Learned(), loss="supcon", temperature=0.1), with_options(SUPCON, temperature=0.1), "float32")
        <= 1
    )


@pytest.mark.slow
def test_jax_function_that_cannot_be_compiled_is_run_directly() -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed: make peers")

    def loss(embeddings: Any, labels: Any, temperature: float) -> Any:
        rows = embeddings / jax.numpy.linalg.norm(embeddings, axis=1, keepdims=True)
        n = len(rows)
        others = ~jax.numpy.eye(n, dtype=bool)
        logits = (rows @ rows.T / temperature)[others].reshape(n, n - 1)
        positive = (labels[:, None] == labels)[others].reshape(n, n - 1)
        logs = jax.nn.log_softmax(logits, axis=1)
        return -((logs * positive).sum(1) / jax.numpy.maximum(positive.sum(1), 1)).mean()

    assert ratio(External(loss, loss="supcon", call="labels", arrays="jax"), SUPCON) <= 1


def test_claim_requires_a_call_that_supports_the_loss() -> None:
    with pytest.raises(TargetMisused, match="cannot be computed"):
        Claim("nt_bxent", "labels")


def command(mode: str, limit: float = 60.0, **options: object) -> External:
    line = f"exec {sys.executable} {COMMAND} {mode}"
    return External(line, loss=options.pop("loss", "supcon"), call="command", limit=limit, **options)  # type: ignore[arg-type]


def test_command_returns_values_and_gradients() -> None:
    found = command("right", normalised=True)
    try:
        for dtype in ("float64", "float32"):
            assert ratio(found, SUPCON, dtype) <= 1
        assert found.gradients_judged
        assert isinstance(found.command, Lines)
        assert found.command.started == 1
        assert found.refuses(with_options(SUPCON, reduction="sum")) == "needs reduction=sum"
    finally:
        found.close()
    found = command("right", loss="info_nce", settings={"direction": "*", "reduction": "*", "direction_weights": "*"})
    try:
        assert ratio(found, with_options(INFO_NCE, reduction="none")) <= 1
        assert ratio(found, with_options(INFO_NCE, direction="both", direction_weights=[0.25, 0.75])) <= 1
    finally:
        found.close()


def test_command_may_return_values_only() -> None:
    found = command("values", settings={"anchors": "*"})
    try:
        assert ratio(found, with_options(SUPCON, anchors=(True, False, True, True, False, False))) <= 1
        assert not found.gradients_judged
    finally:
        found.close()


@pytest.mark.parametrize(
    ("without", "words"),
    [("> 1", "returned no gradients but returned some"), ("== 1", "returned gradients but returned none")],
)
def test_command_returns_gradients_always_or_never(without: str, words: str, tmp_path: Path) -> None:
    script = tmp_path / "fickle.py"
    script.write_text(EACH.replace("    print", f"    if request['id'] {without}: del reply['gradients']\n    print"))
    line = f"{sys.executable} {script}"
    found = External(line, loss="supcon", call="command", settings={"reduction": "none"})
    try:
        found.evaluate(SUPCON, "float64")
        with pytest.raises(TargetError, match=words):
            found.evaluate(SUPCON, "float64")
    finally:
        found.close()


def test_values_of_a_command_are_reduced_by_the_harness() -> None:
    line = f"{sys.executable} -c '{EACH}'"
    found = External(line, loss="supcon", call="command", settings={"reduction": "none"})
    try:
        outcome = found.evaluate(SUPCON, "float64")
        assert outcome.values == [2.5]
        assert outcome.anchors == {i: float(i) for i in range(6)}
        # The command returns the gradient of the sum; that of the mean is a sixth of it.
        assert outcome.gradient is not None
        np.testing.assert_allclose(outcome.gradient, SUPCON.embeddings / 6)
    finally:
        found.close()


EACH = """import json, sys
for line in sys.stdin:
    request = json.loads(line)
    rows = request["matrices"]["embeddings"]
    reply = {"id": request["id"], "values": list(range(len(rows))), "gradients": {"embeddings": rows}}
    print(json.dumps(reply), flush=True)
"""


@pytest.mark.parametrize(
    ("mode", "words", "started"),
    [
        ("crash", r"ended without an answer \(exit code 7\); its last message: out of memory", 2),
        ("slow-end", r"ended without an answer \(exit code 9\)$", 2),
        ("dead", r"ended without an answer \(exit code 1\); its last message: no licence found", 2),
        ("no-json", "answer is not JSON: 'the loss is 1.25'", 2),
        ("no-object", r"answer is not a JSON object: '\[1.25\]'", 2),
        ("wrong-id", r"answered id \d to request", 2),
        ("true-id", "answered id True to request", 2),
        ("text", 'value: expected a number, got the text "NaN"', 1),
        ("bool", "value: expected a number, got true", 1),
        ("nothing", "must have either value or values", 1),
        ("too-many", "values: expected 1 numbers, got a list of 5", 1),
        ("no-list", "values: expected 1 numbers, got 1.0", 1),
        ("short-gradient", "gradients.embeddings: expected 6 rows of 3 numbers, got a list of 5", 1),
        ("narrow-gradient", r"gradients.embeddings\[0\]: expected 3 numbers, got a list of 2", 1),
        ("other-gradient", "gradients: expected those of embeddings, got features", 1),
        ("flat-gradient", "gradients: expected an object with one matrix per name, got a list of 6", 1),
        ("text-gradient", r'gradients.embeddings\[0\]\[0\]: expected a number, got the text "nan"', 1),
        ("error", "the command reported: no such loss", 1),
        ("null-error", "must have either value or values", 1),
    ],
)
@pytest.mark.quick(6)
def test_failure_of_a_command_is_reported(mode: str, words: str, started: int) -> None:
    found = command(mode)
    try:
        for _ in range(2):
            with pytest.raises(TargetError, match=words):
                found.evaluate(SUPCON, "float64")
        assert isinstance(found.command, Lines)
        assert found.command.started == started
    finally:
        found.close()


def test_null_is_nan_and_infinity_is_a_number() -> None:
    for mode, value in (("null", np.nan), ("infinite", np.inf)):
        found = command(mode)
        try:
            np.testing.assert_equal(found.evaluate(SUPCON, "float64").values, [value])
        finally:
            found.close()


@pytest.mark.slow  # waits for four time limits
@pytest.mark.parametrize("mode", ["hang", "babble"])
def test_hanging_command_is_killed_and_restarted_at_most_three_times(mode: str) -> None:
    found = command(mode, limit=0.3)
    assert isinstance(found.command, Lines)
    try:
        for _ in range(RESTARTS + 1):
            # Endless output may reach the limit on its length before the time limit.
            with pytest.raises(
                TargetError, match=r"(within 0.3 s \(--limit\)|bytes without a line break) and was killed"
            ):
                found.evaluate(SUPCON, "float64")
        assert found.command.started == RESTARTS + 1
        with pytest.raises(TargetError, match=r"gave up after 4 starts of the command; the last time: .*killed"):
            found.evaluate(SUPCON, "float64")
        assert found.command.started == RESTARTS + 1
    finally:
        found.close()


@pytest.mark.slow
def test_command_that_hangs_once_is_restarted() -> None:
    found = command("hang-once", limit=2.5)
    try:
        assert ratio(found, SUPCON) <= 1
        with pytest.raises(TargetError, match="did not answer"):
            found.evaluate(SUPCON, "float64")
        assert ratio(found, SUPCON) <= 1
        assert isinstance(found.command, Lines)
        assert found.command.started == 2
    finally:
        found.close()


def test_large_request_and_answer_do_not_block() -> None:
    """The request is larger than the buffer of a pipe: writing must not wait for reading."""
    echo = "import sys\nfor line in sys.stdin:\n    print(line.strip(), flush=True)"
    lines = Lines(f"{sys.executable} -c '{echo}'")
    try:
        with pytest.raises(TargetError, match="either value or values"):
            lines.ask({"matrices": {"embeddings": [[0.125] * 1000] * 1000}}, 1, 60.0)
    finally:
        lines.close()


def test_missing_command_is_reported() -> None:
    found = External("./no-such-command", loss="supcon", call="command")
    with pytest.raises(TargetError, match=r"ended without an answer \(exit code 127\); its last message: .*not found"):
        found.evaluate(SUPCON, "float64")


def test_closing_a_command_ends_its_process() -> None:
    lines = Lines("sleep 1000")
    with pytest.raises(TargetError, match=r"did not answer within 0\.2 s"):
        lines.ask({"matrices": {}}, 1, 0.2)
    lines.close()
    lines.close()
    found = command("one")
    found.evaluate(SUPCON, "float64")
    assert isinstance(found.command, Lines)
    process = found.command._process
    assert process is not None
    found.close()
    assert process.returncode == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # by Python 3.12, if the process has threads
def test_command_has_one_process_per_forked_process() -> None:
    lines = Lines(f"{sys.executable} {COMMAND} one")
    request = {"matrices": {"embeddings": [[1.0]]}}
    reading, writing = os.pipe()
    try:
        assert lines.ask(request, 1, 60.0) == ([1.0], {})
        ours = lines._start().pid
        if not (child := os.fork()):
            try:
                lines.ask(request, 1, 60.0)
                os.write(writing, str(lines._start().pid).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        assert int(os.read(reading, 32)) != ours
        assert lines.ask(request, 1, 60.0) == ([1.0], {})
        assert lines._start().pid == ours
    finally:
        os.close(reading)
        lines.close()


def test_target_is_judged_in_the_given_dtypes() -> None:
    assert target("supcon").dtypes == ("float64", "float32")
    assert target("supcon", dtypes=("float64", "bfloat16")).dtypes == ("float64", "bfloat16")


def test_outcomes_are_kept_by_case_and_dtype() -> None:
    found = target("supcon")
    outcome = found.evaluate(SUPCON, "float32")
    assert found.outcomes == {(SUPCON.id, "float32"): outcome}
    assert found.version().endswith("losses.py")

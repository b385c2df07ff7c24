"""How a signature is read: what each parameter gets, other readings, and wrappers."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pairproof import fast
from pairproof.conformance import check_loss, cli, identify
from pairproof.conformance.implementations import forms
from pairproof.conformance.implementations.callable import External, import_jax
from pairproof.conformance.implementations.child import load_loss, load_target
from pairproof.conformance.implementations.forms import trial_case
from pairproof.conformance.implementations.gpu import ON_CPU
from pairproof.conformance.implementations.sandbox import NoCallFits, TargetError, TargetMisused, find
from pairproof.conformance.implementations.signatures import Signature
from pairproof.conformance.judge.check import CheckResult, check
from pairproof.conformance.judge.levels import ROUNDS_WEIGHTS
from pairproof.conformance.judge.options import CouldNotRun, UsageError
from pairproof.conformance.judge.parity import parity
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.truth.compare import compare
from pairproof.conformance.truth.evaluate import truth
from pairproof.conformance.truth.tolerances import bounds

FOLDER = Path(__file__).parent / "targets"
READINGS, WRAPPING = FOLDER / "readings.py", FOLDER / "wrapping.py"

pytestmark = pytest.mark.usefixtures("in_this_process")

EMBEDDINGS = "embeddings = embeddings [N, D]"

RIGHT: dict[str, tuple[str, str]] = {
    "of_required_labels": (
        "supcon",
        "features = features [items, views, D], labels = class ids [items], temperature = temperature",
    ),
    "two_views_and_labels": (
        "supcon",
        "z_i = first views [N, D], z_j = second views [N, D], labels = class ids [items], temperature = temperature",
    ),
    "two_views_and_unused_labels": (
        "nt_xent",
        "z_i = first views [N, D], z_j = second views [N, D], labels = one class per item [items], ",
    ),
    "OfCamelCase": ("nt_xent", "batchSize = batch size, temperature = temperature, zA = first views [N, D], zB = sec"),
    "of_y_and_y_hat": ("nt_xent", "y = first views [N, D], y_hat = second views [N, D], temperature = temperature"),
    "multiplied_labels": ("supcon", f"{EMBEDDINGS}, labels = class ids [N], as a one-hot matrix, "),
    "named_one_hot": ("supcon", f"{EMBEDDINGS}, one_hot_labels = class ids [N], as a one-hot matrix, "),
    "of_a_mask": ("supcon", f"{EMBEDDINGS}, mask = mask of positives [N, N], without the diagonal, "),
    "of_a_mask_of_numbers": ("supcon", f"{EMBEDDINGS}, mask = mask of positives [N, N], without the diagonal, "),
    "nt_xent_of_interleaved": ("nt_xent", "x = views of each item in neighbouring rows [N, D], "),
    "sigmoid": (
        "sigmoid",
        "zimg = first tower [N, D], ztxt = second tower [N, D], t_prime = log(1 / temperature), b = bias",
    ),
    "of_x": ("nt_xent", "x = similarities [N, N], temperature = temperature"),
    "of_x_and_labels": ("supcon", "x = similarities [N, N], labels = class ids [N], temperature = temperature"),
    "of_features_with_cosines": ("nt_xent", "features = all first views, then all second views [N, D], "),
    "anchor_and_positives": ("nt_xent", "anchor = first views [N, D], positives = second views [N, D], "),
    "of_square_x": ("info_nce", "x = similarities [N, N] / temperature"),
    "scripted": ("supcon", f"{EMBEDDINGS}, labels = class ids [N], temperature = temperature"),
    "scripted_clip": ("info_nce", "image_features = first tower [N, D], text_features = second tower [N, D], logit_"),
    "returns_a_mapping_that_is_a_dataclass": ("supcon", f"{EMBEDDINGS}, "),
    "limited_in_a_helper": (
        "info_nce",
        "img = first tower [N, D], txt = second tower [N, D], logit_scale = log(1 / te",
    ),
    "LimitedInAMethod": ("info_nce", "logit_scale = log(1 / temperature), image = first tower [N, D], text = second"),
    "supcon_of_views": ("supcon", "z1 = first views [N, D], z2 = second views [N, D], temperature = temperature"),
    "one_way": ("nt_xent", "z1 = first views [N, D], z2 = second views [N, D], temperature = temperature"),
    "sigmoid_of_logits": ("sigmoid", "logits = similarities [N, N] / temperature + bias"),
    "sigmoid_of_signs": (
        "sigmoid",
        "logits = similarities [N, N] / temperature + bias, labels = matrix of all pairs [N, N], 1 for positive and -1",
    ),
    "sigmoid_of_towers_and_signs": (
        "sigmoid",
        "image = first tower [N, D], text = second tower [N, D], labels = matrix of all pairs [N, N], 1 for positive "
        "and -1 for negative ones",
    ),
    "sigmoid_of_towers_and_pairs": (
        "sigmoid",
        "image = first tower [N, D], text = second tower [N, D], targets = matrix of all pairs [N, N], 1 for positive "
        "and 0 for negative ones",
    ),
    "sigmoid_of_logits_and_bias": ("sigmoid", "logits = similarities [N, N] / temperature, bias = bias"),
    "clip_of_both_matrices": (
        "info_nce",
        "logits_per_image = similarities [N, N] / temperature, logits_per_text = the same, transposed",
    ),
    "of_two_masks": (
        "supcon",
        "rows = embeddings [N, D], pos_mask = mask of positives [N, N], without the diagonal, neg",
    ),
    "of_scores_and_a_mask": (
        "supcon",
        "scores = similarities [N, N], mask = mask of positives [N, N], without the diagonal, temperature = temp",
    ),
    "clip_of_rows_in_labels": (
        "info_nce",
        "image = first tower [N, D], text = second tower [N, D], labels = one class",
    ),
    "clip_of_classes": ("info_nce", "image = first tower [N, D], text = second tower [N, D], labels = "),
    "clip_of_exp_of_tau": (
        "info_nce",
        "img = first tower [N, D], txt = second tower [N, D], tau = log(1 / temperature)",
    ),
    "clip_of_inverse_exp": ("info_nce", "img = first tower [N, D], txt = second tower [N, D], temperature = log(temp"),
    "clip_of_logt": ("info_nce", "img = first tower [N, D], txt = second tower [N, D], logt = log(1 / temperature)"),
    "supcon_of_several_labels": ("supcon", f"{EMBEDDINGS}, labels = class ids [N], as a one-hot matrix, "),
    "clip_of_ids": ("info_nce", "image = first tower [N, D], text = second tower [N, D], img_ids = one class per item"),
    "Model.clip_loss": (
        "info_nce",
        "self = None, z1 = first tower [N, D], z2 = second tower [N, D], temperature = temp",
    ),
    "Model.simclr_loss": ("nt_xent", "tau = temperature, z1 = first views [N, D], z2 = second views [N, D]"),
    "WithoutForward": ("supcon", "temperature = temperature, embeddings = embeddings [N, D], labels = class ids [N]"),
    "OfNestedSettings": ("nt_xent", "temperature = temperature, z_i = first views"),
    "OfAnInitialTemperature": (
        "sigmoid",
        "init_bias = bias, init_temperature = temperature, image_features = first to",
    ),
    "OfAnInitialLogarithm": (
        "info_nce",
        "scale_init_value = log(1 / temperature), image_features = first tower [N, D]",
    ),
    "of_tao": ("nt_xent", "z_i = first views [N, D], z_j = second views [N, D], tao = temperature"),
    "of_a_tuple": ("supcon", "zs_1 = first views [N, D], zs_2 = second views [N, D], lbls = class ids [items], temp"),
    "of_a_list": ("info_nce", "features_1 = first tower [N, D], features_2 = second tower [N, D], temperature = temp"),
    "of_chunks": ("nt_xent", "sim_matrix = similarities [N, N], temperature = temperature"),
    "of_negatives_of_each_anchor": (
        "info_nce",
        "user_vector = first tower [N, D], pos_vector = second tower [N, D], neg_vectors = negatives, temperature = te",
    ),
    "OfRowsInTheConstructor": ("nt_xent", "outputs1 = first views [N, D], outputs2 = second views [N, D], t = tempera"),
    "on_a_gpu": ("info_nce", "image = first tower [N, D], text = second tower [N, D], temperature = temperature"),
    "OnAGPU": ("nt_xent", "temperature = temperature, z_i = first views [N, D], z_j = second views [N, D]"),
    "OfAPairInAMethod": (
        "supcon",
        "temperature = temperature, _ = None, z = embeddings [N, D], labels = class ids [N]",
    ),
    "with_optional_arrays": ("nt_xent", "z_i = first views [N, D], z_j = second views [N, D], temperature = temp"),
    "of_three_matrices": (
        "multiple_negatives_ranking",
        "z1 = first tower [N, D], z2 = second tower [N, D], z3 = hard_negatives [N, D], temperature = temperature",
    ),
    "of_optional_documents": (
        "multiple_negatives_ranking",
        "q_reps = first tower [N, D], d_reps_pos = second tower [N, D], d_reps_neg = hard_negatives, temperature",
    ),
    "two_views_with_labels_each": (
        "supcon",
        "q = first views [N, D], q_label = class ids [items], k = second views [N, D], k_label = class ids [items], ",
    ),
    "of_output_and_target": (
        "supcon",
        "output = first views [N, D], target = second views [N, D], labels = class ids [items], temperature = temp",
    ),
    "of_x_and_y": ("info_nce", "x = first tower [N, D], y = second tower [N, D], temperature = temperature"),
    "clip_of_named_logits": ("info_nce", "x_y_logits = similarities [N, N] / temperature, y_x_logits = the same, tra"),
}
"""The loss of each right target, and the start of what its parameters get."""

ASKED: dict[str, tuple[str, str]] = {
    "of_rows_of_positives": (
        "nt_xent",
        "either class ids are used as row numbers, or p means the row of each row's positive: then --call partners",
    ),
    "of_neighbours": (
        "nt_xent",
        "either neighbouring rows are positives although the views are stacked, or the views of x are interleaved: "
        "then --call interleaved",
    ),
    "of_neighbours_with_unused_labels": (
        "nt_xent",
        "either neighbouring rows are positives, whatever labels are passed, or the views of embeddings are "
        "interleaved: then --call interleaved --normalised",
    ),
    "InterleavedSaysTheDocstring": (
        "nt_xent",
        "either rows k and k + N/2 are positives although the views are interleaved, or the views of z are stacked: "
        "then --call stacked",
    ),
    "multiplied_by_temp": (
        "supcon",
        "either similarities are multiplied by temp instead of divided, or temp means 1 / temperature: then "
        "--scale temp",
    ),
}
"""The loss of each target that is wrong as called and right in another reading, and the question."""

WRONG = {
    "class_ids_as_rows": "nt_xent",
    "multiplied_by_tau": "supcon",
    "without_exp": "info_nce",
    "without_exp_of_a_default": "info_nce",
    "of_rows_of_positives_without_self": "nt_xent",
    "one_way_with_the_self_pair": "nt_xent",
    "sigmoid_without_a_bias": "sigmoid",
    "clip_of_one_matrix": "info_nce",
}
"""The loss of each target that is wrong in every reading that the source supports."""

SOME = ("golden/*/t[!ro]*", "golden/*/trained*")
"""All cases whose names begin with t, except those of training size and with long towers."""


def ratio(external: External, case: Case, dtype: str = "float64") -> float:
    assert external.refuses(case) is None
    true = truth(case)
    return compare(case, true, external.evaluate(case, dtype), bounds(case, true, dtype), dtype).ratio


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.quick(10)
def test_signature_is_read_as_it_is_meant(name: str) -> None:
    loss, words = RIGHT[name]
    found = External(f"{READINGS}:{name}", loss=loss)
    found.settle()
    reading = found.notes[-1]
    assert reading.startswith(f"reading: {words}"), found.notes
    one_way = {"direction": "a_to_b"} if found.claim.required else {}
    case = trial_case(loss, {"temperature": 0.5, **one_way}, found.claim.required, found.claim.queue)
    if name == "supcon_of_views":
        case = replace(case, arguments={"labels": [2, 0, 2, 3, 3, 1, 1, 0]})
    if name in (
        "of_required_labels",
        "two_views_and_labels",
        "of_a_tuple",
        "two_views_with_labels_each",
        "of_output_and_target",
    ):
        case = replace(case, arguments={"labels": [2, 0, 2, 0, 0, 1, 1, 0]})
    for dtype in ("float64", "float32"):
        assert ratio(found, case, dtype) <= 1
    assert ratio(found, replace(case, keywords={**case.keywords, "temperature": 0.2})) <= 1


def test_mask_is_not_passed_beside_labels_without_a_default() -> None:
    name = f"{READINGS}:of_required_labels_or_a_mask"
    found = check_loss(
        name,
        "supcon",
        cases=("golden/supcon/*mask*", "golden/supcon/t[!r]*", "golden/supcon/trained*"),
        dtypes="float64",
    )
    assert found.exit_code == 0
    assert "has no parameter positives" in found.left_out


def test_mask_is_passed_without_the_diagonal() -> None:
    cases = ("golden/supcon/asymmetric-mask", "golden/supcon/diagonal-true-mask")
    result = check_loss(f"{READINGS}:of_a_mask", "supcon", cases=cases, dtypes="float64")
    found = {check.case: (check.status.value, check.message) for check in result.checks if check.case in cases}
    assert found == dict(zip(cases, [("passed", ""), ("skipped", "its mask has a true diagonal")], strict=True))


def test_features_without_a_default_for_labels_get_the_labels_of_the_case() -> None:
    cases = ("golden/supcon/labels-unsorted", "golden/supcon/two-views-of-classes")
    result = check_loss(f"{READINGS}:of_required_labels", "supcon", cases=cases)
    assert {(check.case, check.status.value) for check in result.judged} == {(case, "passed") for case in cases}
    assert result.claim.call == "features"
    found = identify(f"{READINGS}:of_required_labels")
    assert (found.verdict, found.loss, found.call) == ("match", "supcon", "features")


def judged(name: str, loss: str, **options: Any) -> CheckResult:
    return check_loss(f"{READINGS}:{name}", loss, cases=SOME, dtypes=("float64",), **options)


@pytest.mark.usefixtures("without_reasons")
def test_question_is_asked_although_a_case_is_skipped_in_a_dtype() -> None:
    name = "InterleavedSaysTheDocstring"
    result = check_loss(f"{READINGS}:{name}", ASKED[name][0], cases=("golden/nt_xent/opposite-to-all",))
    assert [check.status.value for check in result.checks] == ["failed", "skipped"]
    assert result.question == ASKED[name][1]


@pytest.mark.usefixtures("without_reasons")
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.quick(1)
def test_mistake_that_another_reading_excuses_is_a_question(name: str) -> None:
    loss, question = ASKED[name]
    found = judged(name, loss)
    assert (found.exit_code, found.question) == (1, question)
    chosen = (one.split() for one in question.split(" --")[1:])
    told = judged(name, loss, **{option: value[0] if value else True for option, *value in chosen})
    assert (told.exit_code, told.question) == (0, "")
    assert len(told.judged) == len(found.judged) > 2


@pytest.mark.usefixtures("without_reasons")
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.quick(2)
def test_wrong_loss_stays_wrong_without_a_question(name: str) -> None:
    found = judged(name, WRONG[name])
    assert (found.exit_code, found.question) == (1, "")


def test_partners_by_name_are_passed_with_the_call_labels() -> None:
    found = External(f"{FOLDER / 'shapes.py'}:by_positive_index", loss="nt_xent", call="labels")
    found.settle()
    assert found.claim.call == "partners"
    assert ratio(found, trial_case("nt_xent", {"temperature": 0.5})) <= 1


@pytest.mark.parametrize(
    ("name", "loss", "words"),
    [
        ("of_a_mask", "supcon", "mask = mask of positives [N, N]"),
        ("multiplied_labels", "supcon", "labels = class ids [N], as a one-hot matrix"),
        ("two_views_and_labels", "nt_xent", "labels = one class per item [items]"),
        ("of_three_matrices", "multiple_negatives_ranking", "z3 = hard_negatives [N, D]"),
    ],
)
def test_identify_reads_signatures_alike(name: str, loss: str, words: str) -> None:
    found = identify(f"{READINGS}:{name}")
    assert (found.verdict, found.loss) == ("match", loss)
    assert any(note.startswith("reading: ") and words in note for note in found.notes)


def test_readings_are_offered_only_if_the_source_supports_them() -> None:
    def offered(name: str, loss: str) -> list[str]:
        found = External(f"{READINGS}:{name}", loss=loss)
        found.settle()
        return [next(iter(one.options)) for one in found.readings]

    assert offered("of_rows_of_positives", "nt_xent") == ["call"]
    assert offered("class_ids_as_rows", "nt_xent") == []
    assert offered("multiplied_by_tau", "supcon") == []
    assert offered("multiplied_by_temp", "supcon") == ["scale"]


@pytest.mark.usefixtures("without_reasons")
def test_reading_and_question_are_printed_and_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    words, question = "e = embeddings [N, D], p = class ids [N], tau = temperature", ASKED["of_rows_of_positives"][1]
    given = f"check {READINGS}:of_rows_of_positives --loss nt_xent --dtype float64".split()
    given += [word for pattern in SOME for word in ("--case", pattern)]
    for more in ((), ("--quiet",)):
        with pytest.raises(SystemExit) as ended:
            cli.main([*given, *more, "--json", str(tmp_path / "found.json")])
        assert ended.value.code == 1
        lines = capsys.readouterr().out.splitlines()
        assert lines.count(f"reading: {words}") == 1
        assert f"question: {question}" in lines
    data = json.loads((tmp_path / "found.json").read_text())
    assert (data["reading"], data["question"]) == (words, question)


def test_parameter_of_another_name_gets_the_inverse_of_the_temperature() -> None:
    with pytest.raises(TargetMisused, match="--scale"):
        External(f"{READINGS}:by_a_named_scale", loss="info_nce")
    found = External(f"{READINGS}:by_a_named_scale", loss="info_nce", scale="alpha")
    found.settle()
    assert found.notes[-1].endswith("alpha = 1 / temperature")
    assert ratio(found, trial_case("info_nce", {"temperature": 0.5})) <= 1
    with pytest.raises(TargetMisused, match="--scale beta: the target has no such parameter; it has img, txt, alpha"):
        External(f"{READINGS}:by_a_named_scale", loss="info_nce", scale="beta")


@pytest.mark.parametrize(
    ("name", "loss", "words"),
    [
        ("inner_products_one_way", "info_nce", "info_nce --set similarity=dot --set direction=a_to_b --temperature 1"),
        pytest.param(
            "of_neighbours_at_a_fixed_temperature",
            "nt_xent",
            "--loss nt_xent --call interleaved --temperature 0.05",
            marks=pytest.mark.slow,
        ),
        pytest.param("at_a_fixed_temperature_with_self", "nt_xent", "", marks=pytest.mark.slow),
    ],
)
def test_arguments_that_explain_the_values_are_told_with_the_missing_temperature(
    name: str, loss: str, words: str
) -> None:
    with pytest.raises(UsageError, match="pass the temperature that is built in") as raised:
        judged(name, loss)
    assert str(raised.value).endswith(words)
    assert ("; its values are those of --loss" in str(raised.value)) == bool(words)


def of_hard_negatives(
    query: torch.Tensor, key: torch.Tensor, hard_negatives: torch.Tensor | None = None, temperature: float = 0.1
) -> torch.Tensor:
    assert hard_negatives is None
    return fast.info_nce_loss(query, key, temperature=temperature)


def test_optional_arrays_that_are_never_passed_are_reported() -> None:
    found = judged("with_optional_arrays", "nt_xent")
    assert found.exit_code == 0
    assert {f"{name}, which is never passed" for name in ("class_labels", "queue")} <= {*found.not_tried}
    hard = check_loss(of_hard_negatives, "info_nce", cases=("golden/info_nce/two-towers",), fuzz=0)
    assert "hard_negatives, which is never passed (--loss multiple_negatives_ranking passes it)" in hard.not_tried


@pytest.mark.parametrize(("name", "arrays"), [("supcon", "torch"), ("supcon_of_numpy", "numpy")])
def test_arrays_are_tried_whatever_the_module_imports(name: str, arrays: str) -> None:
    found = External(f"{WRAPPING}:{name}", loss="supcon")
    found.settle()
    assert (found.claim.arrays, found.gradients_judged) == (arrays, arrays == "torch")
    assert ratio(found, trial_case("supcon", {"temperature": 0.5})) <= 1
    assert f"arrays: {arrays}, the first kind that raises no error; override with --arrays" in found.notes
    assert any(note.startswith("arrays: not torch, because that fails: ") for note in found.notes) == (name != "supcon")
    identified = identify(f"{WRAPPING}:{name}")
    assert (identified.verdict, identified.loss) == ("match", "supcon")


def test_parity_tries_the_arrays_in_turn() -> None:
    found = parity(f"{WRAPPING}:supcon", only=("repetition",), seed=0)
    assert "arrays: torch, the first kind that raises no error; override with --arrays" in found.notes


@pytest.mark.slow
@pytest.mark.usefixtures("own_process")
def test_function_of_jax_gets_arrays_of_jax(tmp_path: Path) -> None:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed: make peers")
    (tmp_path / "of_jax.py").write_text(
        "import jax.numpy as jnp\n"
        "def clip(a, b, temperature):\n"
        "    a, b = (x / jnp.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))\n"
        "    logits = a @ b.T / temperature\n"
        "    rows = jnp.log(jnp.exp(logits).sum(axis=1)) + jnp.log(jnp.exp(logits).sum(axis=0))\n"
        "    return (rows - 2 * jnp.diagonal(logits)).mean() / 2\n"
    )
    for used in (False, True):
        if used:
            import_jax().numpy.zeros(1)
        found = load_loss(f"{tmp_path / 'of_jax.py'}:clip", loss="info_nce")
        try:
            assert found.claim.arrays == "jax"
            assert ratio(found, trial_case("info_nce", {"temperature": 0.5})) <= 1
        finally:
            found.close()
    assert found.notes[-1].endswith("in the process that judges it: jax is in use and does not survive a fork")


def test_error_of_the_most_plausible_call_comes_first() -> None:
    with pytest.raises(CouldNotRun) as raised:
        check_loss(f"{READINGS}:needs_a_gpu", "nt_xent")
    first, *others = str(raised.value).splitlines()
    assert first.startswith("called with views on a small batch, it fails: RuntimeError: Found no NVIDIA driver")
    assert not any("NVIDIA" in line for line in others)
    assert others[-1] == "It needs a GPU, and there is none here: where there is one, pass --device cuda."


def test_option_that_another_call_lacks_does_not_hide_the_error() -> None:
    with pytest.raises(
        CouldNotRun, match="called with similarities on a small batch, it fails: RuntimeError: Found no NV"
    ):
        check_loss(f"{READINGS}:of_similarities_on_a_gpu", "nt_xent")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_loss_that_moves_tensors_to_a_missing_gpu_is_judged_on_the_cpu() -> None:
    name, current_device = f"{READINGS}:on_a_gpu", torch.cuda.current_device
    found = check_loss(name, "info_nce", cases=("golden/info_nce/t[!ro]*", "usage/thread"), dtypes="float64")
    assert found.exit_code == 0
    assert "usage/thread" in {check.case for check in found.judged}
    assert found.summary.startswith(f"conforms at level policies: {name} as info_nce, on the CPU instead of a GPU: ")
    of_identify = load_target(name, None, None, None)
    of_identify.close()
    assert ON_CPU in {*found.notes} & {*of_identify.notes}
    assert torch.cuda.current_device is current_device


def test_other_errors_have_a_line_each() -> None:
    def strict(a: torch.Tensor, b: torch.Tensor, temperature: float) -> None:
        raise ValueError(f"{a.ndim} {tuple(a.shape)}")

    found = External(strict, loss="nt_xent")
    with pytest.raises(NoCallFits) as raised:
        found.settle()
    lines = str(raised.value).splitlines()
    assert lines[0] == "called with views on a small batch, it fails: ValueError: 2 (4, 3)"
    assert lines[1] == "    labels: ValueError: 2 (8, 3)"


GIVEN: dict[str, torch.Tensor | float] = {
    "temperature": 0.5,
    "bias": -10.0,
    **dict.fromkeys(("embeddings", "view_a", "view_b"), torch.rand(4, 3, dtype=torch.float64)),
    **dict.fromkeys(("labels", "partners"), torch.tensor([0, 1, 0, 1])),
    "features": torch.rand(4, 2, 3, dtype=torch.float64),
    "similarities": torch.rand(4, 4, dtype=torch.float64),
    **dict.fromkeys(("mask", "negative_mask"), torch.eye(4).roll(1, 0).bool()),
    "positive_pairs": torch.tensor([[0, 1], [1, 0]]),
}
"""An argument for each parameter of a wrapper."""


def _wrapper(path: Path, name: str, loss: str) -> str:
    """Return the wrapper that a target makes the tool print; "" if it can be called, or if an option is missing."""
    try:
        External(f"{path}:{name}", loss=loss, temperature=None).settle()
    except NoCallFits as error:
        return "\n".join(line[4:] for line in str(error).partition("check it:\n\n")[2].splitlines())
    except TargetError:
        pass
    return ""


PASSED = {
    "partners": ("embeddings, partners, tau", ("embeddings", "partners")),
    "mask": ("rows, mask, neg_mask, tau", ("embeddings", "mask", "negative_mask")),
    "labels": ("labels, rows, tau", ("labels", "embeddings")),
    "features": ("features, tau, labels=None", ("features", "labels")),
    "views": ("a, b, tau, labels=None", ("view_a", "view_b", "labels")),
    "towers": ("a, b, tau, bias", ("view_a", "view_b", "bias")),
    "similarities": ("logits, tau, labels", ("similarities", "labels")),
    "pairs": ("rows, pairs, tau", ("embeddings", "positive_pairs")),
}
"""For some calls, the parameters of a target, and the names of the arrays that it must get, without the temperature."""


@pytest.mark.parametrize("call", forms._GIVEN)
def test_wrapper_of_every_call_passes_its_arrays(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = f"{', '.join(forms._GIVEN[call])}, tau", (*forms._GIVEN[call],)
    parameters, expected = PASSED.get(call, default)
    (tmp_path / "of_one_call.py").write_text(f"def target({parameters}):\n    return locals()\n")
    monkeypatch.syspath_prepend(tmp_path)
    signature = Signature(find(f"{tmp_path / 'of_one_call.py'}:target"))
    names: dict[str, Any] = {}
    exec("\n".join(forms.wrapper("of_one_call.py:target", signature, forms.Form(call))), names)
    try:
        wrapper = names["adapted_target"]
        found = wrapper(*(GIVEN[name] for name in inspect.signature(wrapper).parameters))
    finally:
        del sys.modules["of_one_call"]
    assert found.pop("tau") == GIVEN["temperature"]
    assert {id(value) for value in found.values()} == {id(GIVEN[name]) for name in expected}


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["supcon", "nt_xent", "info_nce", "sigmoid"])
@pytest.mark.parametrize("path", [READINGS, FOLDER / "shapes.py"], ids=lambda path: path.stem)
def test_every_wrapper_runs_as_pasted(path: Path, loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    module, printed, broken = find(f"{path}:__name__"), set[str](), dict[str, Exception]()
    for name, thing in vars(sys.modules[module]).items():
        if not callable(thing) or name.startswith("_") or getattr(thing, "__module__", module) != module:
            continue
        code = _wrapper(path, name, loss)
        if not code:
            continue
        names: dict[str, Any] = {}
        exec(compile(code, f"wrapper of {name}", "exec"), names)
        wrapper = names[f"adapted_{name}"]
        printed.add(name)
        given = [GIVEN[argument] for argument in inspect.signature(wrapper).parameters]
        try:
            wrapper(*given)
        except Exception as error:  # that of the target
            called = any(frame.filename == str(path) for frame in traceback.extract_tb(error.__traceback__))
            if not called or isinstance(error, (NameError, RecursionError)):
                broken[name] = error
    assert not broken
    known = {"supcon": {"loss"}, "nt_xent": {"NeverFits"}, "info_nce": {"never_fits", "NeverFits"}}
    known["sigmoid"] = {"never_fits"}
    assert printed >= (known[loss] if path == READINGS else {"of_a_mapping"} if loss == "supcon" else set())
    sys.modules.pop(path.stem, None)


def test_wrapper_gets_facts_and_the_logarithm() -> None:
    with_scale = _wrapper(READINGS, "never_fits", "info_nce")
    assert "torch.as_tensor(1 / temperature, dtype=torch.float64).log()" in with_scale
    assert with_scale.startswith("import torch\n")
    of_views = "batch_size=len(view_a), device=view_a.device, margin=..., temperature=temperature"
    assert of_views in _wrapper(READINGS, "NeverFits", "nt_xent")
    for name, call in (("OfNestedSettings", "views"), ("Model.clip_loss", "towers")):
        lines = forms.wrapper(f"readings.py:{name}", Signature(find(f"{READINGS}:{name}")), forms.Form(call))
        assert {
            "views": "(cfg=types.SimpleNamespace(LOSS=types.SimpleNamespace(temperature=temperature)))",
            "towers": "Model.clip_loss(self=None, z1=view_a, z2=view_b, temperature=temperature)",
        }[call] in lines[-1]
    assert "margin=..., batch_size=len(embeddings), temperature=temperature" in _wrapper(READINGS, "loss", "supcon")


@pytest.mark.usefixtures("without_reasons")
@pytest.mark.parametrize("weights", ["0.75,0.25", "(0.75, 0.25)", (0.75, 0.25)])
@pytest.mark.quick(1)
def test_weights_of_the_directions_can_be_claimed(weights: object) -> None:
    name = f"{READINGS}:weighted_directions"
    cases = ("golden/info_nce/direction-weights*", "golden/info_nce/t[!r]*", "golden/info_nce/trained*")
    found = check_loss(name, "info_nce", settings={"direction_weights": weights}, cases=cases, dtypes="float64")
    assert found.exit_code == 0
    assert len(found.judged) > 5
    assert found.claim.settings["direction_weights"] == ((0.75, 0.25),)
    wrong = check_loss(name, "info_nce", settings={"direction_weights": "0.25,0.75"}, cases=cases, dtypes="float64")
    assert wrong.exit_code == 1


def test_weights_of_the_directions_are_read_from_a_value_of_the_user() -> None:
    found = External(f"{READINGS}:Weighted", loss="info_nce", init={"lamda": 0.75})
    found.settle()
    assert "direction_weights: 0.75,0.25 is claimed, because --init sets lamda" in found.notes
    assert ratio(found, trial_case("info_nce", {"temperature": 0.5, "direction_weights": (0.75, 0.25)})) <= 1


def test_random_batches_have_the_claimed_weights_of_the_directions() -> None:
    settings = {"direction_weights": "0.75,0.25"}
    name, chosen = f"{READINGS}:weighted_directions", [f"fresh-3-{k}" for k in range(6)]
    found = check_loss(name, "info_nce", settings=settings, cases=chosen, fuzz=6, dtypes="float64")
    assert found.exit_code == 0
    assert len(found.judged) >= 3


def test_weights_that_are_not_two_numbers_are_refused() -> None:
    for weights in ("0.75", "a,b", "1,2,3", "-1,1"):
        with pytest.raises(TargetMisused, match=r"direction_weights: expected two numbers such as 0\.75,0\.25"):
            External(f"{READINGS}:weighted_directions", loss="info_nce", settings={"direction_weights": weights})


@pytest.mark.parametrize(
    ("name", "loss", "words"),
    [
        ("clamped_at_1", "supcon", "temperatures below 1 are clamped"),
        ("scaled_by_at_least_1", "info_nce", "temperatures above 1 are clamped"),
        ("scaled_by_at_most_100", "info_nce", "temperatures below 0.01 are clamped"),
        ("with_an_epsilon_in_the_norms", "info_nce", "1e-08 is added to the norms"),
        ("of_unused_matrices", "multiple_negatives_ranking", "the hard negatives that are passed have no effect"),
    ],
)
def test_mistake_with_a_number_or_a_matrix_is_named(name: str, loss: str, words: str) -> None:
    cases = ("golden/*/[a-d]*",) if loss == "multiple_negatives_ranking" else SOME
    level = "range" if "0.01" in words else None
    found = check_loss(f"{READINGS}:{name}", loss, cases=cases, dtypes="float64", level=level)
    assert found.exit_code == 1
    assert words in found.summary


@pytest.mark.slow
def test_policy_is_named_although_other_rows_have_a_further_mistake() -> None:
    cases = ("golden/supcon/lonely*", "training-1-1")
    found = check_loss(f"{READINGS}:without_small_denominators", "supcon", cases=cases, dtypes="float64", seed=1)
    assert found.exit_code == 1
    assert found.diagnosis.reasons[0].setting == "no_positive=drop"


def test_error_that_no_ordinary_batch_raises_is_said_to_be_one() -> None:
    cases = ("golden/supcon/lonely-zero", "golden/supcon/two-positives")
    found = check_loss(f"{READINGS}:with_required_positives", "supcon", cases=cases, dtypes="float64")
    assert found.exit_code == 1
    assert "an error (on no batch of the level formula): ValueError: no positives" in found.summary


@pytest.mark.usefixtures("without_reasons")
@pytest.mark.slow
def test_factors_rounded_to_float32_are_judged_as_float32() -> None:
    cases = ("golden/supcon/[b-u]*",)
    found = check_loss(f"{READINGS}:with_rounded_counts", "supcon", cases=cases, dtypes="float64")
    assert (found.exit_code, ROUNDS_WEIGHTS in found.notes) == (0, True)
    wrong = check_loss(f"{READINGS}:with_wrong_counts", "supcon", cases=cases, dtypes="float64")
    assert (wrong.exit_code, ROUNDS_WEIGHTS in wrong.notes) == (1, False)


@pytest.mark.slow
def test_dcl_of_two_views_is_judged_without_labels() -> None:
    name, settings = f"{READINGS}:one_way_without_positives", {"denominator": "only_negatives"}
    found = check_loss(name, "supcon", settings=settings, dtypes="float64", fuzz=10, seed=0)
    assert (found.exit_code, found.claim.call, found.claim.unlabelled) == (0, "one_way", True)
    assert found.left_out["not every class has two rows, the views of an item"]
    assert len([check for check in found.judged if check.kind == "case"]) > 40
    assert any(check.case.startswith("training-") for check in found.judged)
    assert any("only batches whose classes are pairs of views are judged" in note for note in found.notes)


@pytest.mark.slow
def test_loss_whose_anchors_are_the_first_views_is_told_how_to_be_called() -> None:
    found = judged("first_views_only", "nt_xent")
    assert found.exit_code == 1
    (reason,) = found.diagnosis.reasons
    assert (reason.words, reason.intended) == ("only rows of the first view are anchors", "--call one_way")
    assert judged("first_views_only", "nt_xent", call="one_way").exit_code == 0


def test_labels_that_are_numbers_of_rows_are_only_those_of_pairs() -> None:
    cases = ("golden/info_nce/two-towers", "golden/info_nce/labels*")
    for name, labelled in (("clip_of_rows_in_labels", False), ("clip_of_classes", True)):
        found = check_loss(f"{READINGS}:{name}", "info_nce", cases=cases, dtypes="float64")
        assert found.exit_code == 0, name
        assert any("labels" in check.flags or "label" in check.case for check in found.judged) == labelled


@pytest.mark.slow  # test_products_that_are_exact_are_not_said_to_be_rounded is similar
def test_dot_products_in_one_direction_are_named_together() -> None:
    found = judged("inner_products_one_way", "info_nce", temperature=1.0)
    (reason,) = found.diagnosis.reasons
    assert reason.words == "the target computes info_nce with similarity=dot, direction=a_to_b"
    assert reason.intended == "--loss info_nce --set similarity=dot --set direction=a_to_b"
    settings = {"similarity": "dot", "direction": "a_to_b"}
    assert judged("inner_products_one_way", "info_nce", temperature=1.0, settings=settings).exit_code == 0


@pytest.mark.slow
def test_mean_over_all_pairs_of_the_sigmoid_loss_is_not_called_one_of_positive_pairs() -> None:
    (reason,) = judged("sigmoid_over_pairs_without_a_bias", "sigmoid").diagnosis.reasons
    assert reason.intended == "--loss sigmoid --set bias=0.0 --set reduction=mean_pairs"
    (reason,) = judged("sigmoid_over_pairs", "sigmoid").diagnosis.reasons
    assert (reason.words, reason.setting) == (
        "the mean is over the pairs, not over the anchors",
        "reduction=mean_pairs",
    )


NEIGHBOURS = "stacked views are read as interleaved"
DOT = "similarities are raw dot products: rows are not normalised"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "loss", "reasons"),
    [
        ("of_neighbours", "nt_xent", [NEIGHBOURS]),
        ("of_raw_neighbours", "nt_xent", [f"{NEIGHBOURS}; {DOT}"]),
        ("between_the_extremes", "supcon", []),
        (
            "one_way_with_an_epsilon",
            "info_nce",
            [
                "an epsilon of 1e-05 is added to the ratio within the logarithm; "
                "the anchors are only the rows of the first tower"
            ],
        ),
        (
            "sigmoid_that_multiplies",
            "sigmoid",
            [
                "logits are multiplied by the temperature instead of divided; the bias has no effect; "
                "the sum over the anchors is divided by the square of their number"
            ],
        ),
        (
            "pooled",
            "nt_xent",
            ["minus the logarithm of the mean over all anchors, not the mean of minus the logarithm"],
        ),
    ],
)
def test_only_what_is_true_is_told_of_a_wrong_loss(name: str, loss: str, reasons: list[str]) -> None:
    found = check_loss(f"{READINGS}:{name}", loss, cases=("golden/*/[a-d]*",), dtypes="float64", seed=0)
    assert found.exit_code == 1
    assert [reason.words for reason in found.diagnosis.reasons] == reasons


@pytest.mark.slow
def test_reduction_that_a_loss_does_not_have_is_a_reason() -> None:
    found = check_loss(f"{READINGS}:without_single_values", "supcon", cases="golden/supcon/[nr]*", dtypes="float64")
    (reason,) = found.diagnosis.reasons
    assert reason.words.startswith("with reduction=none, the value is that of reduction=sum (to judge the mean alone: ")
    kept = replace(found.request, settings={"reduction": "mean"})
    assert check(kept).exit_code == 0


@pytest.mark.slow
def test_claimed_weights_of_the_directions_are_no_reason() -> None:
    settings = {"direction_weights": "0.75,0.25"}
    found = judged("weighted_directions_with_rounded_gradients", "info_nce", settings=settings)
    assert found.exit_code == 1
    assert not any("weights" in reason.words for reason in found.diagnosis.reasons)
    (reason,) = judged("weighted_directions", "info_nce").diagnosis.reasons
    assert reason.intended == "--set direction_weights=0.75,0.25"
    other = judged("weighted_directions", "info_nce", settings={"direction_weights": "0.5,0.25"})
    (reason,) = other.diagnosis.reasons
    assert reason.words == "the target computes info_nce with direction_weights=(0.75, 0.25)"
    assert reason.intended == "--loss info_nce --set direction_weights=0.75,0.25"


@pytest.mark.usefixtures("own_process")
def test_process_group_of_a_target_ends_before_a_fork() -> None:
    External(f"{READINGS}:clip_of_gathered_rows", loss="info_nce").settle()
    assert torch.distributed.is_initialized()
    found = load_loss(f"{READINGS}:clip_of_gathered_rows", loss="info_nce")
    try:
        assert not torch.distributed.is_initialized()
        assert ratio(found, trial_case("info_nce", {"temperature": 0.5})) <= 1
    finally:
        found.close()


@pytest.mark.usefixtures("own_process")
def test_target_that_requires_a_process_group_gets_one_of_a_single_process() -> None:
    found = judged("clip_of_gathered_rows", "info_nce")
    assert found.exit_code == 0
    assert "process group: one of a single process, because the target requires one" in found.notes

"""How a target is called: signatures and results of public losses run without a wrapper."""

from __future__ import annotations

import inspect
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pairproof.conformance import check_loss, identify
from pairproof.conformance.implementations import callable as loading
from pairproof.conformance.implementations import forms
from pairproof.conformance.implementations.callable import External
from pairproof.conformance.implementations.child import load_loss
from pairproof.conformance.implementations.forms import trial_case
from pairproof.conformance.implementations.sandbox import TargetError, TargetMisused, find
from pairproof.conformance.implementations.signatures import Signature
from pairproof.conformance.judge.options import CouldNotRun, UsageError, read_literals
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.truth.compare import compare
from pairproof.conformance.truth.evaluate import truth
from pairproof.conformance.truth.tolerances import bounds
from pairproof.fast import info_nce_loss, supcon_loss

FOLDER = Path(__file__).parent / "targets"
SHAPES = FOLDER / "shapes.py"

A_TO_B = {"settings": {"direction": "a_to_b"}}

RUN: dict[str, tuple[str, dict[str, Any], str]] = {
    "e_and_l": ("supcon", {}, "call: labels, guessed from the loss supcon and the parameters (e, l, temperature)"),
    "returns_loss_and_accuracy": ("supcon", {}, "result: 0, of 0, 1; override with --result"),
    "returns_a_mapping": ("supcon", {}, "result: total_loss, of acc, total_loss, logits; override with --result"),
    "returns_a_dataclass": ("supcon", {}, "result: loss, of logits, loss; override with --result"),
    "returns_a_list": ("supcon", {}, "result: 1, of 0, 1; override with --result"),
    "returns_a_named_tuple": ("supcon", {}, "result: contrastive, of contrastive, other; override with --result"),
    "labels_first": ("supcon", {}, "call: labels, guessed from the parameters (y_true, embeddings, temperature)"),
    "column_labels": (
        "supcon",
        {},
        "labels: passed as a column matrix, because a vector does not fit",
    ),
    "transposed_labels": (
        "supcon",
        {},
        "labels: passed as a column matrix, because a vector does not fit",
    ),
    "one_hot_labels": (
        "supcon",
        {},
        "labels: passed as a one-hot matrix, because a vector does not fit",
    ),
    "normalises_in_place": ("supcon", {}, "arguments: the target changes them in place; it gets copies"),
    "by_scale": ("supcon", {}, "temperature: passed as scale"),
    "by_log_temperature": ("supcon", {}, "temperature: passed as log_temperature, with the value log(temperature)"),
    "WithoutCall": ("supcon", {"init": {"loss_weight": 1.0}}, "call: labels, guessed from the parameters (embeddings,"),
    "BatchSizeInTheConstructor": ("nt_xent", {}, "call: views, guessed from the parameters (z_i, z_j)"),
    "everything_in_the_call": ("nt_xent", {}, "call: views, guessed from the parameters (zis, zjs, batch_size, "),
    "returns_logits_and_labels": ("nt_xent", {}, "result: logits and labels; their mean cross-entropy is judged"),
    "interleaved": ("nt_xent", {"call": "interleaved"}, "passed by keyword"),
    "view_and_augmented": ("nt_xent", {}, "call: views, guessed from the parameters (x, x_aug, t)"),
    "queries_and_keys": ("info_nce", A_TO_B, "call: towers, guessed from the parameters (queries, keys, temp)"),
    "unknown_names": ("info_nce", {}, "call: towers, guessed from the loss info_nce and the parameters (some,"),
    "learned_scale": ("info_nce", {}, "temperature: passed as logit_scale, with the value log(1/temperature)"),
    "limited_scale": ("info_nce", {}, "temperature: passed as logit_scale, with the value log(1/temperature)"),
    "limited_then_exponentiated": ("info_nce", {}, "temperature: passed as scale, with the value log(1/temperature)"),
    "by_positive_index": ("nt_xent", {}, "call: partners, guessed from the parameters (embeddings, positive_index,"),
    "LogScale": ("info_nce", {}, "temperature: passed as log_scale, with the value log(1/temperature)"),
    "required_queue": ("info_nce", A_TO_B, "negatives: passed as [D, K], because [K, D] raises an error"),
    "OfAMapping": ("info_nce", {}, "arguments: passed as one mapping with image_embed, text_embed, logit_scale"),
    "OfSettings": ("nt_xent", {"init": {"batch": 4}}, "arguments: passed as one object with batch_size, tau, device"),
    "of_settings_in_a_mapping": ("supcon", {}, "arguments: passed as one mapping with temperature"),
    "of_a_pair": ("info_nce", {}, "arguments: passed as one pair with left, right"),
    "with_ignored_parameters": ("info_nce", {}, "reading: _input = None, message = first tower [N, D], _noise = None"),
    "ByAnotherMethod": ("info_nce", {}, "call: towers, guessed from the parameters (query, key)"),
    "of_several_scales": ("info_nce", {}, "temperature: passed as logit_scale_audio"),
    "of_similarities": ("info_nce", {}, "temperature: similarities are divided by it before the call; override"),
    "of_logits_and_labels": ("supcon", {}, "call: similarities, guessed from the parameters (logits, labels)"),
    "of_square_similarities": ("nt_xent", {}, "call: similarities, guessed from the parameters (sim_matrix,"),
}
"""The loss of each target that runs without a wrapper, the options that it needs, and a note on how it is called."""


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    yield
    sys.modules.pop("losses", None)


def settled(name: str, loss: str, **options: Any) -> External:
    found = External(f"{SHAPES}:{name}", loss=loss, **options)
    found.settle()
    return found


def ratio(external: External, case: Case, dtype: str = "float64") -> float:
    assert external.refuses(case) is None
    true = truth(case)
    return compare(case, true, external.evaluate(case, dtype), bounds(case, true, dtype), dtype).ratio


@pytest.mark.parametrize("name", RUN)
@pytest.mark.quick(10)
def test_signature_runs_without_a_wrapper(name: str) -> None:
    loss, options, note = RUN[name]
    found = settled(name, loss, **options)
    assert any(one.startswith(note) for one in found.notes) or name == "interleaved", found.notes
    case = trial_case(
        loss, {"temperature": 0.5, **options.get("settings", {})}, ["negatives"] if "queue" in name else []
    )
    assert ratio(found, case) <= 1
    if loss == "nt_xent":
        # Partners in another order.
        pairs = [[0, 3], [1, 6], [2, 5], [4, 7]]
        partners = {i: j for pair in pairs for i, j in (pair, pair[::-1])}
        case = replace(case, arguments={"partners": [partners[i] for i in range(len(partners))]})
    assert ratio(found, replace(case, keywords={**case.keywords, "temperature": 0.2})) <= 1
    assert ratio(found, case, "float32") <= 1


@pytest.mark.parametrize("name", ["e_and_l", "required_queue", "returns_a_mapping", "column_labels"])
def test_child_process_uses_the_call_that_was_chosen(name: str) -> None:
    loss, options, note = RUN[name]
    found = load_loss(f"{SHAPES}:{name}", **options, loss=loss)
    try:
        assert any(one.startswith(note) for one in found.notes), found.notes
        assert found.claim.required == ({"negatives"} if name == "required_queue" else set())
        case = trial_case(
            loss, {"temperature": 0.5, **options.get("settings", {})}, ["negatives"] if "queue" in name else []
        )
        assert ratio(found, case) <= 1
    finally:
        found.close()


@pytest.mark.parametrize(
    "name",
    [
        "of_similarities",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("WithoutCall", "returns_logits_and_labels")),
    ],
)
def test_check_of_a_signature_has_no_errors(name: str) -> None:
    loss, options, _ = RUN[name]
    result = check_loss(f"{SHAPES}:{name}", loss, cases=("golden/*/t[!ro]*", "golden/*/trained*"), **options)
    assert result.judged
    assert not [check for check in result.judged if check.status.value == "errored"]


def test_required_queue_is_judged_only_with_a_queue() -> None:
    found = settled("required_queue", "info_nce", **A_TO_B)
    case = trial_case("info_nce", {"temperature": 0.5, "direction": "a_to_b"})
    assert found.refuses(case) == "has no negatives, which the target requires"


def triplets(anchor: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor, temperature: float) -> torch.Tensor:
    a, p, n = (torch.nn.functional.normalize(x, dim=-1) for x in (anchor, positive, negative))
    logits = torch.cat([a @ p.T, a @ n.T], dim=1) / temperature
    return torch.nn.functional.cross_entropy(logits, torch.arange(len(a)))


def several(query: torch.Tensor, docs: torch.Tensor, negatives: torch.Tensor, temperature: float) -> torch.Tensor:
    return triplets(query, docs, negatives.flatten(0, 1), temperature)


def test_triplets_are_queries_documents_and_one_hard_negative_each() -> None:
    found = External(triplets, loss="multiple_negatives_ranking")
    found.settle()
    assert found.claim.required == {"hard_negatives"}
    assert "hard negatives: passed as [N, D]; only batches with one for each query are judged" in found.notes
    assert "negative = hard_negatives [N, D]" in found.notes[-1]
    one, two = (
        trial_case("multiple_negatives_ranking", {"temperature": 0.5}, ["hard_negatives"], q) for q in ("[N, D]", "")
    )
    assert ratio(found, one) <= 1
    assert found.refuses(two) == "has several hard negatives of each query"
    assert found.refuses(trial_case("multiple_negatives_ranking", {})) == (
        "has no hard_negatives, which the target requires"
    )


@pytest.mark.slow
def test_triplets_conform() -> None:
    found = check_loss(triplets, "multiple_negatives_ranking", seed=1, fuzz=8)
    assert found.verdict == "conforms"
    assert any(check.case == "usage/forward-mode" for check in found.judged)


def test_shape_with_views_in_a_docstring_means_features() -> None:
    def views_of_items(feats: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
        """SupCon of feats, [batch, views, dim]."""
        return supcon_loss(feats.transpose(0, 1).flatten(0, 1), labels.repeat(feats.shape[1]), temperature=temperature)

    found = External(views_of_items, loss="supcon")
    found.settle()
    assert found.notes[0] == "call: features, guessed from its name or docstring; override with --call"
    assert ratio(found, trial_case("supcon", {"temperature": 0.5})) <= 1


def test_hard_passages_are_hard_negatives() -> None:
    def ranked(queries: torch.Tensor, passages: torch.Tensor, hard_passages: torch.Tensor, scale: float = 20.0) -> Any:
        return triplets(queries, passages, hard_passages, 1 / scale)

    found = External(ranked, loss="multiple_negatives_ranking")
    found.settle()
    assert "passages = second tower [N, D], hard_passages = hard_negatives [N, D], scale = 1 / temp" in found.notes[-1]


def test_positives_beside_anchors_are_rows() -> None:
    def pairs(anchors: torch.Tensor, positives: torch.Tensor, temperature: float) -> torch.Tensor:
        return info_nce_loss(anchors, positives, temperature=temperature)

    found = External(pairs, loss="info_nce")
    found.settle()
    assert "anchors = first tower [N, D], positives = second tower [N, D]" in found.notes[-1]
    assert ratio(found, trial_case("info_nce", {"temperature": 0.5})) <= 1


def test_negatives_of_a_ranking_loss_are_hard_negatives() -> None:
    found = External(several, loss="multiple_negatives_ranking")
    found.settle()
    for queue in ("", "[N, D]"):
        case = trial_case("multiple_negatives_ranking", {"temperature": 0.5}, ["hard_negatives"], queue)
        assert found.refuses(case) is None
        assert ratio(found, case) <= 1


def test_negative_of_a_loss_with_a_queue_is_the_queue() -> None:
    def one_positive(anchor: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor, temperature: float) -> Any:
        a, p, n = (torch.nn.functional.normalize(x, dim=-1) for x in (anchor, positive, negative))
        logits = torch.cat([(a * p).sum(dim=1, keepdim=True), a @ n.T], dim=1) / temperature
        return torch.nn.functional.cross_entropy(logits, torch.zeros(len(a), dtype=torch.int64))

    found = External(one_positive, loss="info_nce")
    found.settle()
    assert ratio(found, trial_case("info_nce", {"temperature": 0.5}, ["negatives"])) <= 1


def test_wrapper_of_a_target_with_a_built_in_temperature_takes_none() -> None:
    def built_in(z1: torch.Tensor, z2: torch.Tensor) -> torch.Tensor:
        return (z1 * z2).sum()

    lines = forms.wrapper(built_in, Signature(built_in), forms.Form("views"))
    assert lines[-3:] == [
        "def adapted_target(view_a, view_b):",
        "    # return only the loss, as a tensor",
        "    return target(z1=view_a, z2=view_b)",
    ]


def test_direction_of_a_required_queue_is_a_to_b_unless_claimed() -> None:
    found = settled("required_queue", "info_nce")
    assert found.claim.settings == {"direction": "a_to_b"}
    assert "direction: a_to_b is claimed, the default with negatives, which the target requires" in found.notes
    queue = trial_case("info_nce", {"temperature": 0.5}, ["negatives"])
    assert queue.option("direction") == "a_to_b"
    assert ratio(found, queue) <= 1
    assert (
        found.refuses(replace(queue, keywords={**queue.keywords, "direction": "both"})) is None
    )  # the towers are swapped for the other one
    assert settled("required_queue", "info_nce", settings={"direction": "both"}).refuses(queue) == (
        "needs direction=a_to_b"
    )


def test_default_direction_of_a_target_depends_on_the_queue() -> None:
    def loss(a: torch.Tensor, b: torch.Tensor, negatives: torch.Tensor | None = None) -> torch.Tensor:
        return info_nce_loss(a, b, negatives=negatives, temperature=0.5)

    found = External(loss, loss="info_nce", temperature=0.5)
    found.settle()
    for queue, direction, other in ((False, "both", "a_to_b"), (True, "a_to_b", "both")):
        case = trial_case("info_nce", {"temperature": 0.5}, ["negatives"] if queue else [])
        assert ratio(found, case) <= 1
        stated, turned = (replace(case, keywords={**case.keywords, "direction": d}) for d in (direction, other))
        assert ratio(found, stated) <= 1
        assert found.refuses(turned) == f"needs direction={other}"


def test_first_call_that_raises_no_error_is_used_and_the_others_are_noted() -> None:
    found = settled("returns_logits_and_labels", "nt_xent")
    assert found.claim.call == "stacked"
    assert "call: not features, because that fails: ValueError: features: expected [2N, D]" in found.notes


def test_call_is_not_chosen_by_the_value() -> None:
    def swapped(z_i, z_j, temperature):  # a wrong loss of two views that would be right if it were stacked
        return (z_i * z_j).sum() * 0 + temperature

    found = External(swapped, loss="nt_xent", arrays="torch")
    found.settle()
    assert found.claim.call == "views"


def test_no_fitting_call_gives_one_error_with_a_wrapper() -> None:
    with pytest.raises(CouldNotRun) as raised:
        check_loss(f"{SHAPES}:of_a_mapping", "supcon")
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("called with labels on a small batch, it fails: ")
    start = lines.index(
        "To call it in another way, pass --call or --init. Or copy this wrapper, change it, and check it:"
    )
    assert lines[start + 2 :] == [
        "    from shapes import of_a_mapping",
        "",
        "",
        "    def adapted_of_a_mapping(embeddings, labels, temperature):",
        "        # return only the loss, as a tensor",
        "        return of_a_mapping(outputs=embeddings, epoch=labels, temperature=temperature)",
    ]
    compile("\n".join(line[4:] for line in lines[start + 2 :]), "wrapper", "exec")


@pytest.mark.parametrize("call", forms._GIVEN)
def test_wrapper_of_every_call_can_be_compiled(call: str) -> None:
    def fails(*arrays: object, **others: object) -> None: ...

    lines = forms.wrapper("mine.py:fails", Signature(fails), forms.Form(call))
    names: dict[str, Any] = {}
    exec(compile("\n".join(lines[1:]), "wrapper", "exec"), names)
    given = inspect.signature(names["adapted_fails"]).parameters
    assert given["temperature"].default is inspect.Parameter.empty
    assert ("labels" in given) == (call in ("labels", "features", "similarities"))


def test_values_that_only_the_user_knows_are_asked_for_as_options() -> None:
    class Odd:
        def __init__(self, cosine, batch_size, temperature, args):
            self.other = args.device, cosine

        def __call__(self, z_i, z_j): ...

    with pytest.raises(TargetError, match=r"\nPass --init cosine=VALUE\. Or copy this wrapper") as raised:
        load_loss(Odd, loss="nt_xent")
    assert "args=types.SimpleNamespace(device=view_a.device)" in str(raised.value)
    assert "    import types\n" in str(raised.value)


def by_annotated_scale(a: torch.Tensor, b: torch.Tensor, logit_scale: torch.Tensor) -> torch.Tensor:
    return info_nce_loss(a, b, temperature=1 / logit_scale.to(a.device))


def by_tensors(a, b, temperature):
    return by_annotated_scale(a, b, 1 / temperature)


def by_scale_of_tensors(a, b, scale):
    assert scale.dtype == a.dtype
    return by_annotated_scale(a, b, scale)


@pytest.mark.parametrize(
    ("function", "why", "code"),
    [
        (by_annotated_scale, "the annotation says so", "logit_scale=torch.as_tensor(1 / temperature, dtype=view_a"),
        (by_tensors, "a float raises an error", "temperature=torch.as_tensor(temperature, dtype=view_a.dtype)"),
        (by_scale_of_tensors, "a float raises an error", "scale=torch.as_tensor(1 / temperature, dtype=view_a.dtype)"),
    ],
)
def test_temperature_is_a_tensor_where_the_annotation_or_an_error_requires_one(
    function: Any, why: str, code: str
) -> None:
    found = External(function, loss="info_nce")
    found.settle()
    assert f"temperature and bias: tensors where they are passed, because {why}" in found.notes
    assert all(ratio(found, trial_case("info_nce", {"temperature": 0.07}), dtype) <= 1 for dtype in found.dtypes)
    assert found.target is not None
    assert code in forms.wrapper("mine.py:loss", found.target.signature, found.target.form)[-1]


class Queue: ...


def of_an_object(q: torch.Tensor, k: torch.Tensor, queue: Queue, temperature: float):
    return queue.get()


def of_unknown_arrays(q, q_label, k_label, indices, flag: bool, temperature):
    return indices.to(q.device)


@pytest.mark.parametrize(
    ("function", "loss", "error", "advice", "code"),
    [
        (
            of_an_object,
            "info_nce",
            "AttributeError: 'Tensor' object has no attribute 'get'",
            "the small batch lacks: queue. Copy this wrapper, change it, and check it:",
            "queue=negatives",
        ),
        (
            of_an_object,
            "sigmoid",
            "TypeError: missing",
            "the small batch lacks: queue. Copy this wrapper, fill in each ..., and check it:",
            "queue=...",
        ),
        (
            of_unknown_arrays,
            "supcon",
            "TypeError: missing",
            "the small batch lacks: k_label, indices. Copy this wrapper, fill in each ..., and check it:",
            "k_label=..., indices=..., flag=...",
        ),
    ],
)
def test_values_are_not_asked_for_where_arrays_are_needed(
    function: Any, loss: str, error: str, advice: str, code: str
) -> None:
    signature, call = Signature(function), "labels" if loss == "supcon" else "towers"
    lines = forms.cannot_be_called(function, signature, [(forms.plausible_forms(signature, call, loss)[0], error)])
    assert lines[1].endswith(advice)
    assert code in lines[-1]
    assert not any("--init" in line for line in lines)


class Faulty(torch.nn.Module):
    def __init__(self, temperature=0.1):
        super().__init__()
        self.temperature = temperature

    def forward(self, output, target):
        return output @ output.T / self.tau


class OutOfBounds(torch.nn.Module):
    def forward(self, zis, zjs):
        raise IndexError(f"Target {len(zis)} is out of bounds.")


class OfOtherShapes(torch.nn.Module):
    def forward(self, zis, zjs):
        raise ValueError("zis must have three dimensions")


class Doubtful(torch.nn.Module):
    def forward(self, z, y):
        raise IndexError(f"Target {len(z)} is out of bounds.")


@pytest.mark.parametrize(
    ("thing", "loss", "advice"),
    [
        (Faulty, "supcon", "The loss itself raises this error, not the call. To work around it, copy this wrapper,"),
        (
            OutOfBounds,
            "nt_xent",
            "If its parameters mean what their names say, the loss itself raises this error. Other",
        ),
        (OfOtherShapes, "nt_xent", "To call it in another way, pass --call or --init. Or copy this wrapper, change it"),
        (Doubtful, "supcon", "To call it in another way, pass --call or --init. Or copy this wrapper, change it, and"),
    ],
)
def test_error_of_the_loss_itself_is_told_from_that_of_a_wrong_call(thing: type, loss: str, advice: str) -> None:
    with pytest.raises(TargetError) as raised:
        External(thing, loss=loss, temperature=0.5).settle()
    assert f"\n{advice}" in str(raised.value)


def test_jax_is_refused_in_a_fork_of_a_process_that_has_used_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", SimpleNamespace(backends_are_initialized=lambda: True))
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            loading.import_jax()
        except TargetError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000).startswith(b"jax is in use and does not survive a fork")
    os.close(read)
    os.close(write)
    assert not loading._threads.lost


def test_class_in_a_wrapper_gets_its_constructor() -> None:
    class Odd:
        def __init__(self, margin, batch_size, temperature):
            raise RuntimeError("no")

        def __call__(self, embeddings, labels): ...

    with pytest.raises(
        TargetError, match=re.escape("target(margin=..., batch_size=len(embeddings), temperature=temperature)(")
    ):
        load_loss(Odd, loss="supcon")
    with pytest.raises(TargetError, match=r"target = \.\.\.  # a local function has no name to import"):
        load_loss(lambda embeddings, labels, temperature: labels.missing, loss="supcon")


def test_several_results_that_may_be_the_loss_are_refused_with_the_choices() -> None:
    with pytest.raises(TargetError, match=r"more than one may be the loss: 0 \(shape \[\]\), 1 .*--result NAME"):
        settled("ambiguous", "supcon")
    found = settled("ambiguous", "supcon", result="0")
    assert ratio(found, trial_case("supcon", {"temperature": 0.5})) <= 1
    with pytest.raises(TargetError, match="returned no 7; its results are 0, 1"):
        settled("ambiguous", "supcon", result="7")
    single = settled("by_scale", "supcon", result="loss")
    assert "result: it returns a single one, so --result loss has no effect" in single.notes


def test_arguments_of_the_constructor_are_passed_and_unknown_ones_refused() -> None:
    found = settled("WithoutCall", "supcon", init={"loss_weight": 1.0, "temperature": 0.2})
    assert found.claim.temperature == 0.2
    assert "temperature: 0.2 is built in, because --init sets it" in found.notes
    assert settled("by_scale", "supcon", init={"scale": 5}).claim.temperature == 0.2
    with pytest.raises(TargetMisused, match=r"--init wieght: the target has no such parameter; it has device, world_"):
        settled("WithoutCall", "supcon", init={"wieght": 1.0})


def test_init_values_are_python_literals_where_possible() -> None:
    assert read_literals(["a=1", "b=[1, 2]", "c=cosine", "d=None", "e=x=y"]) == {
        "a": 1, "b": [1, 2], "c": "cosine", "d": None, "e": "x=y",
    }  # fmt: skip
    with pytest.raises(ValueError, match="expected KEY=VALUE"):
        read_literals(["a"])


def test_base_temperature_as_identify_prints_it_is_accepted() -> None:
    result = check_loss(
        f"{SHAPES}:at_another_base", "supcon", settings={"base_temperature": "0.5"}, cases=("golden/supcon/two-*",)
    )
    assert {check.status.value for check in result.judged} == {"passed"}
    assert len(result.judged) >= 4


@pytest.mark.parametrize(("name", "call"), [("e_and_l", "labels"), ("returns_loss_and_accuracy", "labels")])
def test_identify_uses_the_same_calls(name: str, call: str) -> None:
    found = identify(f"{SHAPES}:{name}")
    assert (found.verdict, found.loss, found.call) == ("match", "supcon", call)


def test_near_name_is_suggested() -> None:
    with pytest.raises(TargetError, match=r"shapes.py has no attribute 'by_scael'; did you mean 'by_scale'\?"):
        find(f"{SHAPES}:by_scael")


def test_labels_are_passed_as_a_column_if_a_numpy_target_requires_it() -> None:
    def loss(embeddings: np.ndarray, labels: np.ndarray, temperature: float) -> tuple[float, np.ndarray]:
        if labels.ndim != 2:
            raise ValueError("expected [N, 1]")
        return float(embeddings.sum() * temperature), embeddings

    found = External(loss, loss="supcon")
    found.settle()
    assert "labels: passed as a column matrix, because a vector does not fit" in found.notes


def test_labels_without_a_default_are_those_of_the_items() -> None:
    def loss(features: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
        rows, labels = features.transpose(0, 1).flatten(0, 1), labels.repeat(features.shape[1])
        return supcon_loss(rows, labels, temperature=temperature)

    cases = ("golden/supcon/labels-unsorted", "golden/supcon/two-views-of-classes")
    result = check_loss(loss, "supcon", call="features", cases=cases)
    assert {(check.case, check.status.value) for check in result.judged} == {(case, "passed") for case in cases}


def test_contradicting_names_are_refused() -> None:
    with pytest.raises(UsageError, match="info_nce cannot be computed by a target that is called with labels"):
        check_loss(f"{FOLDER / 'losses.py'}:supcon", "info_nce")


def not_a_logarithm(a, b, logit_scale):
    scale = logit_scale * 2
    return torch.exp(a @ b.T * logit_scale).sum() + torch.exp(-scale)


def limited_by_another(a, b, logit_scale, largest):
    return a * torch.exp(torch.clamp(logit_scale, max=largest))


def test_only_a_parameter_whose_own_exponential_is_taken_is_a_logarithm() -> None:
    assert not Signature(not_a_logarithm).is_logarithm("logit_scale")
    assert Signature(limited_by_another).is_logarithm("logit_scale")

"""Identification of right and wrong losses, of peers, and of functions that are not contrastive losses."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import runpy
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from simulated import Machine

from pairproof import conformance, fast, reference
from pairproof.conformance.diagnose.explain import explain_case
from pairproof.conformance.diagnose.identify import CALLED as CALLED_AS
from pairproof.conformance.diagnose.identify import identify, name_faults
from pairproof.conformance.diagnose.positives import POSITIVES, STACKED, batch_setting
from pairproof.conformance.diagnose.search import PASSED, PROBES, Probe, Search, call_with, drawn, known_losses, ranked
from pairproof.conformance.diagnose.variants import Evaluation, temperings, variations
from pairproof.conformance.faults import FAULTS, RIGHT
from pairproof.conformance.implementations.base import Unavailable
from pairproof.conformance.implementations.callable import Batch, External, Target
from pairproof.conformance.implementations.lightly import Lightly
from pairproof.conformance.implementations.open_clip import OpenClip
from pairproof.conformance.implementations.sandbox import TargetError
from pairproof.conformance.implementations.setfit import SetFit
from pairproof.conformance.implementations.supcontrast import SupContrast, load_file
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.catalogue import COMMON, LOSSES, Loss, registered
from pairproof.conformance.suite.machine import described, machine
from pairproof.conformance.suite.records import Outcome, Truth
from pairproof.conformance.truth.evaluate import truth


def slow_except(quick, every):
    """Parameters of which all but a few are left to ``make test-all``: a search takes seconds."""
    return [pytest.param(one, id=one.__name__, marks=() if one in quick else pytest.mark.slow) for one in every]


pytestmark = pytest.mark.usefixtures("in_this_process")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def found(function, **given):
    identification = identify(function, **given)
    assert identification.lines()
    return identification


# The variants themselves


LABELS = (0, 0, 1, 0, 1, 2, 2, 1, 3)
PARTNERS = (5, 6, 7, 8, 9, 0, 1, 2, 3, 4)
PAIRS = ((0, 1), (1, 0), (2, 3), (3, 5), (4, 2), (5, 4), (6, 0), (7, 8), (0, 6), (6, 1))


def case_of(loss, call, options, temperature, rows):
    entry = LOSSES[loss]
    if call == "pairs" or entry.positives_by == "pairs":
        arguments = {"positive_pairs": PAIRS}
    elif entry.positives_by == "partners":
        arguments = {"partners": PARTNERS}
    else:
        arguments = {} if entry.two_towers else {"labels": list(LABELS)}
    rows = rows.detach().numpy()
    others = {}
    if entry.two_towers:
        rows, others = rows[:5], {"embeddings_b": rows[5:]}
    return Case("mine", loss, rows, arguments, {"temperature": temperature, **options}, others=others)


CALLED = {"towers": "views", "partners": "views", "pairs": "pairs", "labels": "labels"}
CALLS = {name: CALLED[loss.positives_by] for name, loss in LOSSES.items()}


@pytest.mark.parametrize("temperature", [0.07, pytest.param(0.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.quick(4)
def test_variant_of_every_loss_has_the_value_and_gradient_of_the_reference(loss, temperature):
    call = CALLS[loss]
    n = {"views": 10, "pairs": 9, "labels": 9}[call]
    leaf = drawn(5, [k % 4 for k in range(n)], 0.4).requires_grad_()
    batch = Batch(
        "mine",
        call,
        leaf,
        LABELS if call == "labels" else None,
        PAIRS if call == "pairs" else None,
        n_views=2 if call == "views" else 1,
    )
    compared = 0
    policies = LOSSES[loss].choices.get("no_positive", ("",))
    for variant in [variant for variant in known_losses(call) if variant.loss == loss]:
        for reduction, policy in product(LOSSES[loss].choices["reduction"], policies):
            setting = POSITIVES[variant.positives].change(batch_setting(batch))
            options = {**dict(variant.options), "reduction": reduction}
            case = case_of(loss, call, options | ({"no_positive": policy} if policy else {}), temperature, leaf)
            true = truth(case)
            value = Evaluation(setting, temperature).loss(variant, reduction, policy)
            np.testing.assert_allclose(value.detach().numpy(), true.values, rtol=1e-12)
            if true.gradient is not None:
                (gradient,) = torch.autograd.grad(value.sum(), leaf, retain_graph=True)
                right = np.concatenate([true.gradient, *true.other_gradients.values()])
                assert np.linalg.norm(gradient.numpy() - right) <= 1e-12 * np.linalg.norm(right)
            compared += 1
    assert compared >= 6


def test_variants_of_the_ranking_loss_with_hard_negatives_have_the_value_and_gradient_of_the_reference():
    """Every fifth of them, so that each value of each option occurs."""
    leaf = drawn(5, [0, 1, 2, 3] * 2, 0.4).requires_grad_()
    hard = drawn(6, [0, 0, 1, 1, 2, 2, 3, 3], 0.4)
    batch = Batch("mine", "hard", leaf, n_views=2, keywords={"hard_negatives": hard.unflatten(0, (4, 2))})
    every = [variant for variant in known_losses("hard") if variant.loss == "multiple_negatives_ranking"][::5]
    names = ("directions", "partition", "hard_negatives_scope", "hardness_mode", "doc_to_doc_hard", "similarity")
    for name in names:
        given = {dict(variant.options).get(name, LOSSES[variant.loss].default(name)) for variant in every}
        assert given - {None} == {*LOSSES["multiple_negatives_ranking"].choices[name]}
    for variant in every:
        setting = POSITIVES[variant.positives].change(batch_setting(batch))
        rows = leaf.detach().numpy()
        others = {"embeddings_b": rows[4:], "hard_negatives": hard.numpy()}
        keywords = {"temperature": 0.2, **dict(variant.options)}
        true = truth(Case("mine", variant.loss, rows[:4], {}, keywords, others=others))
        value = Evaluation(setting, 0.2).loss(variant)
        np.testing.assert_allclose(value.detach().numpy(), true.values, rtol=1e-12)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        right = np.concatenate([true.gradient, true.other_gradients["embeddings_b"]])
        assert np.linalg.norm(gradient.numpy() - right) <= 1e-12 * np.linalg.norm(right)


def test_wrong_variants_have_descriptions():
    for call in {probes.call for probes in PROBES}:
        for right in known_losses(call):
            wrong = [*variations(right, call), *temperings(right)]
            # Only a loss that parts describe has variants of its parts; the others have fewer variants.
            assert len(wrong) > (30 if right.in_parts else 20)
            for variant in wrong:
                # Adding supcon_epsilon's epsilon is not a mistake by itself, so it has no description.
                known = variant.guard == "each 1e-08" and right.guard != variant.guard
                assert len(variant.words()) == len(right.words()) + (not known)


def test_positives_that_cannot_be_read_from_a_batch_are_none():
    batch = Batch("odd", "labels", drawn(1, LABELS, 0.5), LABELS)
    assert POSITIVES[STACKED].change(batch_setting(batch)) is None


# The catalogue


def interleaved(function):
    return lambda view_a, view_b, **given: function(
        torch.stack([view_a, view_b], dim=1).flatten(0, 1), torch.arange(2 * len(view_a)) ^ 1, **given
    )


def stacked(function):
    return lambda view_a, view_b, **given: function(
        torch.cat([view_a, view_b]), torch.arange(2 * len(view_a)).roll(len(view_a)), **given
    )


def in_fast(loss, **options):
    function = getattr(fast, f"{loss}_loss")
    shaped = stacked(function) if LOSSES[loss].positives_by == "partners" else function
    return lambda *arrays, **given: shaped(*arrays, **options, **given)


def in_reference(loss, **options):
    function = getattr(reference, f"{loss}_loss")

    def shaped(*arrays, **given):
        if LOSSES[loss].positives_by == "partners":
            rows = np.concatenate(arrays)
            arrays = rows, np.roll(np.arange(len(rows)), len(rows) // 2)
        return np.array(function(*arrays, **options, **given).loss)

    return shaped


def with_temperature(function):
    return lambda first, second, temperature: function(first, second, temperature=temperature)


def built_in(function, temperature):
    return lambda first, second: function(first, second, temperature=temperature)


VARIANTS = [
    (loss, options)
    for loss, entry in LOSSES.items()
    for options in (
        {},
        *({"similarity": s} for s in entry.choices["similarity"] if s != entry.keywords["similarity"]),
        *({"beta": beta} for beta in (0.0, 0.5, 2.0) if loss == "hard_negative"),
        *({"sigma": 0.1}, {"detach_weights": False}, {"sigma": 1.0, "detach_weights": False}) * (loss == "dclw"),
        {"reduction": "sum"},
        {"reduction": "none"},
        {"base_temperature": 0.3},
        *({"denominator": d} for d in ("one_positive", "only_negatives") if loss in ("supcon", "supcon_in")),
        *({"inside_reduction": "sum"} for _ in range(loss == "supcon_in")),
        *({"no_positive": p} for p in ("drop", "nan") if loss.startswith("supcon")),
        *({"reduction": "mean_pairs"} for _ in range(loss == "nt_xent_pairwise")),
        *({"direction": d} for d in ("a_to_b", "b_to_a") if loss == "info_nce"),
    )
]


def same_name(identification, loss, options):
    """Whether the answer is right.

    supcon with the denominator one_positive is also called pairwise NT-Xent; the ranking loss without hard negatives
    is InfoNCE in one direction.
    """
    options_found = {key: value for key, value in identification.options.items() if value is not None}
    wanted = {key: str(value) for key, value in options.items()}
    if loss == "multiple_negatives_ranking":
        loss, wanted = "info_nce", wanted | {"direction": "a_to_b"}
    if loss == "supcon" and wanted.get("denominator") == "one_positive":
        loss = "nt_xent_pairwise"
        del wanted["denominator"]
    return identification.verdict == "match" and (identification.loss, options_found) == (loss, wanted)


def is_quick(loss, options):
    """Whether an option is tested in every run: an option that several losses share is tested for one of them.

    The defaults of every loss are tested with a built-in temperature below.
    """
    own = options.keys() & {"direction", "denominator", "inside_reduction"} or options == {"reduction": "mean_pairs"}
    return own or loss == "supcon"


@pytest.mark.parametrize(
    ("loss", "options"),
    [pytest.param(*v, marks=() if is_quick(*v) else pytest.mark.slow) for v in VARIANTS],
    ids=str,
)
@pytest.mark.quick(3)
def test_every_fast_loss_is_identified_with_its_options(loss, options):
    function = with_temperature(in_fast(loss, **options))
    identification = found(function, call=CALLS[loss], arrays="torch")
    assert same_name(identification, loss, options), identification.lines()
    assert identification.match.gradient_error < 1e-6
    assert identification.temperature is None


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.quick(4)
def test_every_reference_loss_is_identified_by_its_values(loss):
    function = with_temperature(in_reference(loss))
    identification = found(function, call=CALLS[loss], arrays="numpy")
    assert same_name(identification, loss, {}), identification.lines()
    assert identification.match.gradient_error is None


def is_quick_temperature(loss, arrays, temperature):
    """Whether a built-in temperature is tested in every run: one of each loss, and one without gradients."""
    return temperature == 0.1 and (arrays == "torch" or loss == "nt_xent")


@pytest.mark.parametrize(
    ("loss", "arrays", "temperature"),
    [
        pytest.param(*given, marks=() if is_quick_temperature(*given) else pytest.mark.slow)
        for given in product(LOSSES, ("torch", "numpy"), (0.05, 0.1, 0.5, 1.0))
    ],
)
@pytest.mark.quick(2)
def test_built_in_temperature_is_recovered(loss, arrays, temperature):
    function = in_fast(loss) if arrays == "torch" else in_reference(loss)
    identification = found(built_in(function, temperature), call=CALLS[loss], arrays=arrays)
    assert identification.temperature == pytest.approx(temperature, rel=1e-6)
    assert same_name(identification, loss, {}), identification.lines()
    assert not any("close, but not exact" in remark for remark in identification.remarks)


def test_instance_is_identified_by_its_values():
    identification = found(fast.SupConLoss(temperature=0.2), call="labels")
    assert (identification.loss, identification.temperature) == ("supcon", pytest.approx(0.2))


def test_temperature_of_a_constructor_and_of_similarities_is_not_called_an_argument():
    class Loss(torch.nn.Module):
        def __init__(self, temperature=0.2):
            super().__init__()
            self.temperature = temperature

        def forward(self, embeddings, labels):
            return fast.supcon_loss(embeddings, labels, temperature=self.temperature)

    def of_similarities(similarities):
        return F.cross_entropy(similarities, torch.arange(len(similarities)))

    for target, words in (
        (Loss, "computes supcon; takes the temperature as an argument of its constructor"),
        (of_similarities, "; takes the temperature as the divisor of the similarities that it gets"),
    ):
        assert any(line.endswith(words) for line in found(target).lines()), found(target).lines()


def test_named_scale_is_recognised_as_the_temperature():
    def loss(view_a, view_b, sharpness=10.0):
        return fast.nt_xent_loss(
            torch.cat([view_a, view_b]), fast.stacked_partners(2 * len(view_a)), temperature=1 / sharpness
        )

    named = identify(loss, scale="sharpness")
    assert (named.verdict, named.loss, named.temperature) == ("match", "nt_xent", None)
    assert any("sharpness = 1 / temperature" in note for note in named.notes)


def test_external_target_keeps_its_call():
    external = External(in_fast("nt_xent"), loss="nt_xent", call="views", temperature=0.2)
    assert found(external).loss == "nt_xent"


def test_float32_answers_have_a_float32_tolerance():
    function = in_fast("supcon")
    single = found(lambda e, y: function(e.float(), y, temperature=0.1), call="labels", arrays="torch")
    assert (single.verdict, single.loss) == ("match", "supcon")
    assert single.temperature == pytest.approx(0.1, rel=1e-4)
    assert any("float32" in line for line in single.evidence)


# Peers


def test_pytorch_metric_learning_is_identified():
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    reducers = importlib.import_module("pytorch_metric_learning.reducers")
    supcon = found(losses.SupConLoss(temperature=0.1), call="labels")
    assert (supcon.loss, supcon.options) == ("supcon", {"no_positive": "drop"})
    assert supcon.temperature == pytest.approx(0.1)
    assert any("one class" in remark for remark in supcon.remarks)
    pairs = found(losses.NTXentLoss(temperature=0.05), call="labels")
    assert (pairs.loss, pairs.options) == ("nt_xent_pairwise", {"reduction": "mean_pairs"})
    assert pairs.temperature == pytest.approx(0.05)
    anchors = found(losses.NTXentLoss(temperature=0.07, reducer=reducers.PerAnchorReducer()), call="labels")
    assert (anchors.loss, anchors.options) == ("nt_xent_pairwise", {})


@pytest.mark.slow
def test_original_supcon_code_is_identified():
    path = Path(os.environ.get("PAIRPROOF_PEERS", ".peers")) / next(iter(SupContrast.files))
    if not path.is_file():
        pytest.skip(f"no {path}: make peers installs it")
    module = load_file(path)
    hidden = found(module.SupConLoss(temperature=0.1))
    assert (hidden.call, hidden.verdict, hidden.loss) == ("features", "match", "supcon")
    assert hidden.options == {"similarity": "dot", "no_positive": "nan", "base_temperature": "0.07"}
    assert hidden.temperature == pytest.approx(0.1)
    assert any("includes the self pair" in remark for remark in hidden.remarks)
    passed = found(module.SupConLoss)
    assert (passed.options, passed.temperature) == (hidden.options, None)

    def first_view(features, labels=None, temperature=0.1):
        loss = module.SupConLoss(temperature=temperature, base_temperature=temperature, contrast_mode="one")
        return loss(features, labels)

    first = found(first_view)
    assert first.temperature is None
    assert "only rows of the first view are anchors" in first.wrong


def test_info_nce_pytorch_is_identified():
    package = pytest.importorskip("info_nce")
    for target, temperature in ((package.InfoNCE(), 0.1), (package.InfoNCE(temperature=0.5), 0.5)):
        identification = found(target)
        assert (identification.loss, identification.options) == ("info_nce", {"direction": "a_to_b"})
        assert identification.temperature == pytest.approx(temperature)


def test_wrappers_of_pytorch_metric_learning_are_identified():
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    for symmetric, loss, options in ((True, "nt_xent", {}), (False, "info_nce", {"direction": "a_to_b"})):
        wrapped = losses.SelfSupervisedLoss(losses.NTXentLoss(temperature=0.1), symmetric=symmetric)
        identification = found(wrapped)
        assert (identification.call, identification.loss, identification.options) == ("views", loss, options)
        assert (identification.verdict, identification.temperature) == ("match", pytest.approx(0.1))

    def through_a_memory(embeddings, labels):
        memory = losses.CrossBatchMemory(losses.NTXentLoss(temperature=0.1), embeddings.shape[1], len(embeddings))
        return memory(embeddings, labels)

    identification = found(through_a_memory)
    assert (identification.loss, identification.options) == ("nt_xent_pairwise", {"reduction": "mean_pairs"})
    assert identification.wrong == ["no gradient flows into the rows that anchors are contrasted with"]


def test_views_with_required_labels_are_identified():
    def by_views(features, labels, temperature=0.1):
        items, n_views, _ = features.shape
        return fast.supcon_loss(
            features.reshape(items * n_views, -1), labels.repeat_interleave(n_views), temperature=temperature
        )

    identification = found(by_views)
    assert (identification.call, identification.loss, identification.options) == ("features", "supcon", {})
    assert identification.verdict == "match"


def peer_of(kind):
    try:
        return kind({}, "cpu")
    except Unavailable as error:
        pytest.skip(str(error))


def test_setfit_is_identified():
    loss = peer_of(SetFit).loss(lambda rows: {"sentence_embedding": rows}, temperature=0.1)

    def adapted(embeddings, labels):
        return loss([embeddings], labels=labels)

    identification = found(adapted)
    assert identification.loss == "supcon"
    assert identification.options == {"no_positive": "nan", "base_temperature": "0.07"}
    assert identification.temperature == pytest.approx(0.1)


def test_open_clip_is_identified_by_its_logit_scale():
    identification = found(peer_of(OpenClip).loss)
    assert (identification.call, identification.verdict, identification.loss) == ("views", "match", "info_nce")
    assert (identification.options, identification.temperature) == ({"similarity": "dot"}, None)


def test_lightly_is_identified():
    identification = found(peer_of(Lightly).loss(temperature=0.1))
    assert (identification.verdict, identification.loss, identification.options) == ("match", "nt_xent", {})
    assert identification.temperature == pytest.approx(0.1)


@pytest.mark.slow
def test_infonce_is_identified():
    package = pytest.importorskip("infonce", reason="infonce is not installed: make peers")
    stacked = found(package.InfoNCE(0.1), call="stacked")
    assert (stacked.call, stacked.verdict, stacked.loss) == ("stacked", "match", "nt_xent")
    assert stacked.temperature == pytest.approx(0.1)

    def with_classes(embeddings, labels, temperature=0.1):
        return package.SupervisedInfoNCE(temperature)(embeddings, labels)

    supervised = found(with_classes)
    assert (supervised.verdict, supervised.loss) == ("wrong", "supcon_in")
    assert "exp(0) of the diagonal leaks into the denominator" in supervised.wrong


@pytest.mark.slow
def test_optax_is_identified_with_its_gradient():
    """Runs in a separate process: JAX starts threads, and later tests may fork."""
    if importlib.util.find_spec("optax") is None or importlib.util.find_spec("jax") is None:
        pytest.skip("optax or jax is not installed: make peers")
    command = [sys.executable, "-m", "pairproof.conformance.cli", "identify", "optax.losses:ntxent"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())  # lines are wrapped at 80 columns
    assert (
        "computes nt_xent_pairwise with reduction=mean_pairs; takes the temperature as an argument differs" in printed
    )
    assert "the largest relative error of their gradients is" in printed
    assert "out of range: exponentials underflow" in printed


def test_cross_entropy_implementations_are_identified():
    def clip(image_features, text_features):
        logits = F.normalize(image_features, dim=1) @ F.normalize(text_features, dim=1).T / 0.05
        own = torch.arange(len(logits))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    def simclr(z_i, z_j, *, half=1.0):
        rows = F.normalize(torch.cat([z_i, z_j]), dim=1)
        logits = (rows @ rows.T / 0.5).fill_diagonal_(-torch.inf)
        return F.cross_entropy(logits, torch.arange(len(rows)).roll(len(z_i)), reduction="sum") / (half * len(z_i))

    towers = found(clip)
    assert (towers.verdict, towers.loss, towers.options) == ("match", "info_nce", {})
    assert towers.temperature == pytest.approx(0.05)
    views = found(simclr)
    assert (views.loss, views.temperature) == ("nt_xent", pytest.approx(0.5))
    assert views.wrong == ["the values are 2 times those of the loss"]


# Wrong losses


def parts(embeddings, labels, temperature, *, unit=True):
    rows = F.normalize(embeddings, dim=1) if unit else embeddings
    logits = rows @ rows.T / temperature
    own = torch.eye(len(rows), dtype=torch.bool)
    return rows @ rows.T, logits, (labels[:, None] == labels) & ~own, own


def averaged(values, positive):
    return ((values * positive).sum(1) / positive.sum(1).clamp(min=1)).mean()


def keeps_itself(embeddings, labels, temperature=0.1):
    _, s, positive, _ = parts(embeddings, labels, temperature)
    return averaged(s.logsumexp(1, keepdim=True) - s, positive)


def leaks_one(embeddings, labels, temperature=0.1):
    _, s, positive, own = parts(embeddings, labels, temperature)
    return averaged(s.masked_fill(own, 0.0).logsumexp(1, keepdim=True) - s, positive)


def forgets_to_divide(embeddings, labels, temperature=0.1):
    _, s, positive, own = parts(embeddings, labels, temperature)
    below = s.masked_fill(own, -torch.inf).logsumexp(1, keepdim=True)
    return ((below - s) * positive).sum(1).mean()


def divides_twice(embeddings, labels, temperature=0.1):
    _, s, positive, own = parts(embeddings, labels, temperature)
    below = s.masked_fill(own, -torch.inf).logsumexp(1, keepdim=True)
    return (((below - s) * positive).sum(1) / positive.sum(1).clamp(min=1) ** 2).mean()


def forgets_the_positive(embeddings, labels, temperature=0.1):
    similarity, s, positive, own = parts(embeddings, labels, temperature)
    below = s.masked_fill(own, -torch.inf).logsumexp(1, keepdim=True)
    return averaged(below - similarity, positive)


def squares_the_temperature(embeddings, labels, temperature=0.4):
    return fast.supcon_loss(embeddings, labels, temperature=temperature**2)


def takes_columns(embeddings, labels, temperature=0.1):
    rows = F.normalize(embeddings, dim=0)
    return fast.supcon_loss(rows, labels, temperature=temperature, similarity="dot")


def takes_one_positive(embeddings, labels, temperature=0.1):
    _, s, positive, own = parts(embeddings, labels, temperature)
    kept = positive.any(1)
    return F.cross_entropy(s.masked_fill(own, -torch.inf)[kept], positive.int().argmax(1)[kept])


def adds_epsilon(embeddings, labels, temperature=0.1):
    _, s, positive, own = parts(embeddings, labels, temperature)
    ratio = s.exp() / s.exp().masked_fill(own, 0).sum(1, keepdim=True)
    return averaged(-torch.log(ratio + 1e-4), positive)


def adds_two_epsilons(embeddings, labels, temperature=0.1):
    return with_two_epsilons(1e-6, 1e-8)(embeddings, labels, temperature)


def with_two_epsilons(above, below):
    """SupCon with one number added to each numerator, and another one to each denominator."""

    def loss(embeddings, labels, temperature=0.1):
        _, s, positive, own = parts(embeddings, labels, temperature)
        denominators = s.exp().masked_fill(own, 0).sum(1, keepdim=True) + below
        return averaged(denominators.log() - (s.exp() + above).log(), positive)

    return loss


def detaches_the_others(embeddings, labels, temperature=0.1):
    rows = F.normalize(embeddings, dim=1)
    s = rows @ rows.detach().T / temperature
    own = torch.eye(len(rows), dtype=torch.bool)
    below = s.masked_fill(own, -torch.inf).logsumexp(1, keepdim=True)
    return averaged(below - s, (labels[:, None] == labels) & ~own)


def mixes_up_the_sign(embeddings, labels, temperature=0.1):
    return -fast.supcon_loss(embeddings, labels, temperature=temperature)


WRONG = [
    (keeps_itself, "the anchor itself is kept in the denominator"),
    (leaks_one, "exp(0) of the diagonal leaks"),
    (forgets_to_divide, "not divided by their number"),
    pytest.param(divides_twice, "divided by the square of their number", marks=pytest.mark.slow),
    pytest.param(forgets_the_positive, "temperature is not applied to the numerator", marks=pytest.mark.slow),
    (squares_the_temperature, "the temperature is applied twice"),
    pytest.param(takes_columns, "rows are divided by norms over the batch", marks=pytest.mark.slow),
    pytest.param(takes_one_positive, "only the first positive of each anchor is used", marks=pytest.mark.slow),
    pytest.param(adds_epsilon, "epsilon of 1e-04 is added to the ratio", marks=pytest.mark.slow),
    (adds_two_epsilons, "an epsilon of 1e-06 is added to the numerator, and one of 1e-08 to the denominator"),
    (detaches_the_others, "no gradient flows into the rows that anchors are contrasted with"),
    (mixes_up_the_sign, "-1 times"),
]


@pytest.mark.parametrize(("function", "words"), WRONG, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.quick(1)
def test_mistake_is_reported_without_known_faults(function, words):
    identification = found(function, call="labels")
    assert identification.verdict == "wrong"
    assert any(words in line for line in identification.wrong), identification.lines()
    assert identification.exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("function", [keeps_itself, leaks_one, divides_twice])
def test_built_in_temperature_of_a_wrong_loss_is_recovered(function):
    identification = found(lambda e, y: function(e, y, 0.2), call="labels", arrays="torch")
    assert identification.verdict == "wrong"
    assert identification.temperature == pytest.approx(0.2, rel=1e-6)


@pytest.mark.parametrize(
    ("above", "below"),
    [
        (1e-6, 1e-6),
        (3e-7, 1e-7),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1e-7, 3e-6), (0.3, 0.1))),
    ],
)
def test_two_epsilons_are_named_or_left_unexplained(above, below):
    """Neither a temperature, nor another epsilon, nor the gradient is reported to be wrong."""
    identification = found(with_two_epsilons(above, below), call="labels", arrays="torch")
    named = [f"an epsilon of {above:.0e} is added to the numerator and to the denominator"]
    assert identification.wrong == (named if above == below else [])
    assert identification.temperature is None
    unexplained = any("close, but not exact" in remark for remark in identification.remarks)
    assert unexplained == (identification.verdict == "match")
    assert identification.equals == []


def is_another_loss(identification, fault):
    """Whether the answer is a loss of the catalogue, but not the one that the fault claims to be."""
    options = {key: str(value) for key, value in identification.options.items()}
    claimed = {key: str(value) for key, value in fault.settings.items()}
    return identification.verdict == "match" and (identification.loss, options) != (fault.loss, claimed)


def answer_of(function, call, probe):
    """The value for a probe, and the gradient; nothing if the function does not accept it."""
    try:
        answer = call_with(Target(function, call, "torch"), probe)
    except TargetError:
        return []
    return [answer.total, *([] if answer.gradient is None else answer.gradient.flatten().tolist())]


def is_right_on_every_probe(fault, options):
    """Whether a fault is the correct loss wherever it accepts what identify passes: its mistake needs another argument.

    The options are those that identify has found.
    """
    if options:
        towers = getattr(fast, LOSSES[fault.loss].function)

        def loss(view_a, view_b, temperature):
            return towers(view_a, view_b, temperature=temperature, **options)

    else:
        loss = RIGHT[fault.loss, fault.call]
    own = [probes for probes in PROBES if CALLED_AS.get(probes.call, probes.call) == fault.call]
    batches = [batch for probes in own for batch in (*probes.alike, *probes.further, *probes.edges)]
    accepted = 0
    for probe in (Probe(batch, at) for batch in batches for at in (0.1, 0.5)):
        given, right = (answer_of(f, fault.call, probe) for f in (fault.function, loss))
        if given and given != pytest.approx(right, rel=1e-9, abs=1e-12, nan_ok=True):
            return False
        accepted += bool(given)
    return accepted >= 8


@pytest.mark.slow
def test_known_faults_are_named_or_reported_as_another_loss():
    """A fault that is the correct loss on every probe is reported as that loss."""
    chosen, missed, right, refused = FAULTS[::4], [], 0, 0
    for fault in chosen:
        try:
            identification = found(fault.function, call=fault.call, faults=FAULTS)
        except TargetError:  # it refuses labels with several positives
            refused += 1
            continue
        named = any(name.startswith(f"{fault.name}:") for name in identification.faults)
        if named or identification.wrong or is_another_loss(identification, fault):
            continue
        if is_right_on_every_probe(fault, identification.options):
            assert (identification.verdict, identification.loss, identification.faults) == ("match", fault.loss, [])
            right += 1
        else:
            missed.append(fault.name)
    assert len(missed) <= 0.2 * (len(chosen) - right), missed
    assert refused <= 2


@pytest.mark.slow
def test_fault_that_refuses_a_batch_is_named_and_the_correct_loss_is_not():
    """Of the faults that have the answers of NT-Xent, only the one that is made for 8 rows refuses other batches."""

    def eight(view_a, view_b, temperature=0.1):
        z = F.normalize(torch.cat([view_a, view_b]), dim=1)
        logits = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
        return F.cross_entropy(logits, torch.tensor([4, 5, 6, 7, 0, 1, 2, 3]))

    identification = found(eight, call="views", faults=FAULTS)
    assert [name.split(":")[0] for name in identification.faults] == ["nt_xent/eight-rows"]


@pytest.mark.slow
def test_public_identify_names_known_faults():
    (fault,) = [fault for fault in FAULTS if fault.name == "supcon/self-kept"]
    assert conformance.identify(fault.function, call=fault.call).faults == [f"{fault.name}: {fault.words}"]
    assert identify(fault.function, call=fault.call).faults == []


@pytest.mark.slow
def test_right_losses_are_not_named_as_faults():
    for loss in LOSSES:
        call, function = CALLS[loss], with_temperature(in_fast(loss))
        identification = found(function, call=call, arrays="torch", faults=FAULTS)
        assert identification.faults == []
        # A remark on a difference makes it compare the target with the faults.
        identification.remarks.append("differs on something")
        name_faults(identification, Search(Target(function, call, "torch")), FAULTS)
        alike = [fault for fault in FAULTS if any(n.startswith(f"{fault.name}:") for n in identification.faults)]
        wrongly = [fault.name for fault in alike if not is_another_loss(identification, fault)]
        assert wrongly == []


# Unusual arguments and answers


def ce_of(queries, keys, temperature, others=None):
    """The cross-entropy of every query with its key as the class; other keys are further classes."""
    return F.cross_entropy(
        queries @ (keys if others is None else torch.cat([keys, others])).T / temperature, rows(keys)
    )


def rows(keys):
    return torch.arange(len(keys))


def unit(*matrices):
    return [F.normalize(matrix, dim=1) for matrix in matrices]


def ntxent_of(embeddings, partners, temperature):
    (z,) = unit(embeddings)
    return F.cross_entropy((z @ z.T / temperature).fill_diagonal_(-torch.inf), partners)


def with_partners(embeddings, partners, temperature=0.1):
    return ntxent_of(embeddings, partners, temperature)


def ignores_partners(embeddings, partners, temperature=0.1):
    return ntxent_of(embeddings, rows(embeddings) ^ 1, temperature)


def pairs_two_rows(embeddings, temperature=0.1):
    return ntxent_of(embeddings, rows(embeddings) ^ 1, temperature)


def moco(q, k, queue, temperature=0.1):
    q, k, queue = unit(q, k, queue)
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.int64))


def moco_with_transposed_queue(q, k, queue, temperature=0.1):
    if queue.shape[0] != q.shape[1]:
        raise ValueError("the queue must be [D, K]")
    return moco(q, k, queue.T, temperature)


def moco_without_normalising(q, k, queue):
    q, k = unit(q, k)
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], dim=1) / 0.2
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.int64))


def moco_that_ignores_its_queue(q, k, queue, temperature=0.1):
    return ce_of(*unit(q, k), temperature)


def moco_with_keys(q, k, queue, temperature=0.1):
    q, k, queue = unit(q, k, queue)
    return ce_of(q, k, temperature, queue)


def cosines_by_distances(z_i, z_j, temperature=0.1):
    z = torch.cat([z_i, z_j])
    logits = (1 - torch.cdist(z, z, compute_mode="donot_use_mm_for_euclid_dist") ** 2 / 2) / temperature
    own = torch.eye(len(z), dtype=torch.bool)
    return F.cross_entropy(logits.masked_fill(own, -torch.inf), rows(z).roll(len(z_i)))


def refuses_rows_of_other_norms(z_i, z_j):
    if not torch.allclose(z_i.norm(dim=1), torch.ones(len(z_i), dtype=z_i.dtype)):
        raise ValueError("normalise the rows")
    return cosines_by_distances(z_i, z_j, 0.3)


def nan_for_duplicates(embeddings, labels, temperature=0.1):
    value = fast.supcon_loss(embeddings, labels, temperature=temperature)
    return value if len(embeddings.unique(dim=0)) == len(embeddings) else value * torch.nan


def weighted(z_i, z_j, temperature=0.1):
    z_i, z_j = unit(z_i, z_j)
    return 0.3 * ce_of(z_i, z_j, temperature) + 0.7 * ce_of(z_j, z_i, temperature)


def weighted_with_built_in_temperature(z_i, z_j):
    return 3 * weighted(z_i, z_j, 0.07)


def half_inside(z_i, z_j, temperature=0.1):
    z_i, z_j = unit(z_i.half(), z_j.half())
    return (ce_of(z_i, z_j, temperature) + ce_of(z_j, z_i, temperature)).float() / 2


def bfloat16_inside(z_i, z_j):
    z_i, z_j = unit(z_i.bfloat16(), z_j.bfloat16())
    return (ce_of(z_i, z_j, 0.07) + ce_of(z_j, z_i, 0.07)) / 2


UNIT = (
    "rows: passed with norm 1, because no loss explains the answers to rows of other norms; "
    "to check the target, pass --normalised"
)
MOCO = "computes info_nce with direction=a_to_b"
ADDED = "the other keys of the batch are added to the negatives"
WEIGHTS = "computes info_nce with direction_weights=(0.3, 0.7)"
PRECISE = "evidence: its values or gradients have the precision of"
ODD = [
    (with_partners, "computes nt_xent; takes the temperature as an argument", ""),
    (
        ignores_partners,
        "computes nt_xent; takes the temperature as an argument",
        "2k and 2k + 1 are treated as partners",
    ),
    (
        pairs_two_rows,
        "but stacked views are read as interleaved",
        "right for interleaved views: --call inter",
    ),
    (moco, f"{MOCO}; takes the temperature as an argument", ""),
    (moco_with_transposed_queue, f"{MOCO}; takes the temperature as an argument", "negatives: passed as [D, K]"),
    pytest.param(
        moco_without_normalising,
        f"{MOCO}, temperature 0.2 (built in, recovered)",
        "passed are not normalised",
        marks=pytest.mark.slow,
    ),
    (moco_that_ignores_its_queue, f"{MOCO}; takes", "but the negatives that are passed are replaced by the other keys"),
    (moco_with_keys, f"{MOCO}; takes the temperature as an argument", f"but {ADDED}"),
    pytest.param(
        cosines_by_distances, "computes nt_xent; takes the temperature as an argument", UNIT, marks=pytest.mark.slow
    ),
    (refuses_rows_of_other_norms, "computes nt_xent, temperature 0.3 (built in, recovered)", UNIT),
    (nan_for_duplicates, "computes supcon; takes", "left out, because it returns NaN or infinity: duplicated rows"),
    (weighted, f"{WEIGHTS}; takes the temperature as an argument", ""),
    pytest.param(
        *(weighted_with_built_in_temperature, f"{WEIGHTS}, temperature 0.07 (built in, recovered)"),
        "but the values are 3",
        marks=pytest.mark.slow,
    ),
    (half_inside, "computes info_nce; takes the temperature as an argument", f"{PRECISE} float16"),
    pytest.param(bfloat16_inside, "computes info_nce, temperature 0.07", f"{PRECISE} bfloat16", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("function", "computes", "words"), ODD, ids=lambda x: getattr(x, "__name__", ""))
def test_unusual_arguments_and_answers_are_identified(function, computes, words):
    identification = found(function)
    text = "\n".join(identification.lines())
    assert computes in text
    assert words in text
    assert (identification.verdict == "wrong") == ("but " in text), text
    assert identification.equals == []
    assert identification.match.gradient_error <= (0.3 if PRECISE in words else 1e-6)


# Published losses as small programs write them

RANKING = "multiple_negatives_ranking"
JOINT, EVERY = "query_to_doc+doc_to_query", "query_to_doc+query_to_query+doc_to_query+doc_to_doc"
NAMED = {
    "simclr": ("nt_xent", {}, "SimCLR"),
    "dcl": ("supcon", {"denominator": "only_negatives"}, "DCL"),
    "dclw": ("dclw", {}, "DCLW"),
    "hcl": ("hard_negative", {}, "HCL"),
    "debiased": ("hard_negative", {"beta": "0.0"}, "debiased"),
    "sincere": ("nt_xent_pairwise", {}, "SINCERE"),
    "suncet": ("supcon_in", {"inside_reduction": "sum"}, "SuNCEt"),
    "n_pairs": ("info_nce", {"similarity": "dot", "direction": "a_to_b"}, "N-pairs"),
    "simcse": ("info_nce", {"direction": "a_to_b"}, "SimCSE"),
    "convirt": ("info_nce", {"direction_weights": "(0.75, 0.25)"}, "ConVIRT"),
    "clip": ("info_nce", {}, "CLIP"),
    "moco": ("info_nce", {"direction": "a_to_b"}, "MoCo"),
    "siglip": ("sigmoid", {}, "SigLIP"),
    "mnrl": ("info_nce", {"direction": "a_to_b"}, "MultipleNegativesRankingLoss"),
    "symmetric": ("info_nce", {}, "MultipleNegativesSymmetricRankingLoss"),
    "gte": (RANKING, {"directions": EVERY}, "GTE"),
    "with_other_queries": (RANKING, {"directions": "query_to_doc+query_to_query"}, ""),
    "mnrl_with_hard_negatives": (RANKING, {}, "MultipleNegativesRankingLoss"),
    "symmetric_with_hard_negatives": (
        *(RANKING, {"directions": JOINT, "partition": "per_direction"}),
        "MultipleNegativesSymmetricRankingLoss",
    ),
    "own_hard_negatives": (RANKING, {"hard_negatives_scope": "own"}, ""),
    "own_hard_negatives_only": (RANKING, {"hard_negatives_scope": "own_only"}, ""),
    "hardened": (RANKING, {"hardness_mode": "in_batch_negatives", "hardness_strength": "9.0"}, ""),
}
"""By the name of a function in tests/targets/published.py: the loss, its options, and the published name, if any."""

QUICK = ("convirt", "mnrl", "gte", "symmetric_with_hard_negatives", "own_hard_negatives")
PUBLISHED_LOSSES = runpy.run_path(str(Path(__file__).parent / "targets/published.py"))


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMED])
@pytest.mark.quick(1)
def test_published_loss_is_identified_with_its_name(name):
    identification = found(PUBLISHED_LOSSES[name])
    loss, options, published = NAMED[name]
    assert (identification.verdict, identification.loss, identification.options) == ("match", loss, options)
    assert published in identification.names if published else not identification.names
    assert identification.match.gradient_error < 1e-6
    if name in ("mnrl", "simcse"):
        assert identification.equals == ["multiple_negatives_ranking with its defaults"]


@pytest.mark.slow
def test_loss_is_not_called_by_the_name_of_another_temperature_or_option():
    """N-pairs has dot products that are not divided, and a wrong loss has no name."""
    at_half = found(lambda a, b: PUBLISHED_LOSSES["n_pairs"](a, b / 2), call="views", arrays="torch")
    assert (at_half.options, at_half.names) == (NAMED["n_pairs"][1], [])

    def keeps_itself(queries, documents, temperature=0.01):
        cosines = [unit(x)[0] @ unit(y)[0].T for x, y in ((queries, documents), (queries, queries))]
        documents = unit(documents)[0] @ unit(documents)[0].T
        blocks = torch.cat([cosines[0], cosines[0].T, cosines[1], documents.fill_diagonal_(-torch.inf)], dim=1)
        return ((blocks / temperature).logsumexp(dim=1) - cosines[0].diagonal() / temperature).mean()

    wrong = found(keeps_itself)
    assert (wrong.verdict, wrong.names) == ("wrong", [])


def test_the_same_function_is_reported_with_its_base_temperature_and_its_policy():
    def scaled(a, b, temperature=0.1):
        return ce_of(*unit(a, b), temperature) * temperature / 0.07

    identification = found(scaled)
    assert (identification.names, identification.equals) == (
        [],
        ["multiple_negatives_ranking with base_temperature=0.07"],
    )

    def dropped(embeddings, labels, temperature=0.1):
        positives = (labels[:, None] == labels).fill_diagonal_(False)
        kept, (z,) = positives.any(dim=1), unit(embeddings)
        logits = z @ z.T / temperature
        negatives = logits.masked_fill(labels[:, None] == labels, -torch.inf).logsumexp(dim=1, keepdim=True)
        losses = F.softplus(negatives - logits) * positives
        return (losses.sum(dim=1)[kept] / positives.sum(dim=1)[kept]).mean()

    identification = found(dropped)
    assert identification.names == ["SINCERE"]
    assert identification.equals == ["supcon with denominator=one_positive, no_positive=drop"]


def ignores_hard_negatives(anchors, positives, hard_negatives, temperature=0.1):
    return ce_of(*unit(anchors, positives), temperature)


def only_hard_negatives(anchors, positives, hard_negatives, temperature=0.1):
    return moco(anchors, positives, hard_negatives.flatten(0, 1), temperature)


@pytest.mark.parametrize(
    ("function", "verdict", "words"),
    [
        pytest.param(
            *(ignores_hard_negatives, "wrong", "the hard negatives that are passed have no effect"),
            marks=pytest.mark.slow,
        ),
        (only_hard_negatives, "match", "all hard negatives of the batch, without the other documents"),
    ],
)
@pytest.mark.slow
def test_hard_negatives_without_documents_or_effect_are_reported(function, verdict, words):
    identification = found(function)
    assert (identification.verdict, identification.loss) == (verdict, "info_nce")
    assert any(words in line for line in identification.lines())


# Functions that are not contrastive losses


def triplet(embeddings, labels):
    distances = torch.cdist(embeddings, embeddings)
    same = labels[:, None] == labels
    return F.relu(distances[same].mean() - distances[~same].mean() + 1.0)


def noise(embeddings, labels):
    return (torch.randn_like(embeddings) * embeddings).sum()


def constant(embeddings, labels):
    return embeddings.sum() * 0 + 1.5


def spread(embeddings, labels, temperature):
    return (embeddings.std(dim=0) / temperature).sum()


def byol(p, z):
    return 2 - 2 * F.cosine_similarity(p, z.detach()).mean()


def simsiam(p1, p2):
    return (1 - F.cosine_similarity(p1, p2)).mean()


def cosine_embedding(x1, x2):
    return F.cosine_embedding_loss(x1, x2, torch.ones(len(x1)))


def mean_square(x1, x2):
    return F.mse_loss(F.normalize(x1, dim=1), F.normalize(x2, dim=1))


@pytest.mark.slow
@pytest.mark.parametrize("function", [byol, simsiam, cosine_embedding, mean_square])
def test_similarity_without_contrast_is_reported_as_unknown(function):
    """Without negatives the answers fit the loss at many temperatures, so none is reported."""
    identification = found(function)
    assert (identification.verdict, identification.exit_code) == ("none", 1)
    assert identification.temperature is None
    assert "the answers do not depend on the temperature, so the loss has no contrast" in identification.nearest


def supcon_through_a_mask(embeddings, labels):
    z = F.normalize(embeddings, dim=1)
    logits = z @ z.T / 0.1
    own = torch.eye(len(z), dtype=torch.bool)
    positive = (labels[:, None] == labels) & ~own
    shares = torch.exp(logits) * ~own
    shares = shares / shares.sum(1, keepdim=True)
    logs = torch.where(positive, -torch.log(shares * positive), 0.0)
    return (logs.sum(1) / positive.sum(1).clamp(min=1)).mean()


def test_gradient_that_is_not_finite_is_reported():
    identification = found(supcon_through_a_mask, call="labels", arrays="torch")
    assert (identification.verdict, identification.loss) == ("wrong", "supcon")
    assert identification.wrong == ["the gradient is NaN or infinite, although the value is finite"]
    assert identification.faults == []
    assert "only values were compared: no gradient could be compared" in identification.evidence


@pytest.mark.slow
def test_factor_that_depends_on_the_temperature_is_reported():
    for times, power, words in ((1, -1, "1/temperature"), (1, 2, "temperature^2"), (3, -2, "3/temperature^2")):

        def multiplied(e, y, temperature, factor=(times, power)):
            return fast.supcon_loss(e, y, temperature=temperature) * factor[0] * temperature ** factor[1]

        identification = found(multiplied, call="labels", arrays="torch")
        assert identification.wrong == [f"the loss is multiplied by {words}"]
        assert not any("differs" in remark for remark in identification.remarks)
        assert identification.match.factor_for(0.001) == pytest.approx(times * 0.001**power)
    other = found(
        lambda e, y, temperature: fast.supcon_loss(e, y, temperature=temperature) * (1 + temperature),
        call="labels",
        arrays="torch",
    )
    assert other.wrong == ["the loss is multiplied by 1.5 at temperature 0.5, 1.2 at temperature 0.2"]
    assert not any("differs" in remark for remark in other.remarks)
    assert other.match.factor_for(0.001) is None


@pytest.mark.parametrize("factor", [0.1 / 0.3, 5.0, 10.0, 0.3])
def test_ordinary_factor_is_not_reported_as_a_base_temperature(factor):
    identification = found(lambda e, y: factor * fast.supcon_loss(e, y, temperature=0.1), call="labels", arrays="torch")
    assert (identification.verdict, identification.options) == ("wrong", {})
    assert identification.wrong[0].startswith("the values are ")


def test_unusual_divisor_of_the_sum_is_reported():
    identification = found(
        lambda e, y: fast.supcon_loss(e, y, temperature=0.1, reduction="sum") / (len(y) - 1),
        call="labels",
        arrays="torch",
    )
    assert identification.wrong == ["reduction: the sum over the anchors is divided by their number minus 1"]


class Counting:
    calls = 0

    def __call__(self, embeddings, labels):
        self.calls += 1
        return fast.supcon_loss(embeddings, labels, temperature=0.1 * self.calls)


def test_new_instances_and_state_are_reported():
    assert any("a new instance is constructed for each probe" in note for note in found(Counting, call="labels").notes)
    assert any("it is random, or keeps state" in remark for remark in found(Counting(), call="labels").remarks)


def test_errors_of_all_calls_are_reported_if_the_target_cannot_be_called():
    def four(features, labels=None):
        rows, _views, _columns, _more = features.shape
        return features.sum() * rows

    with pytest.raises(TargetError, match=r"called with labels .* not enough values .*\n    features, torch "):
        found(four)


@pytest.mark.parametrize("function", slow_except([noise], [triplet, noise, constant, spread]))
def test_unknown_loss_is_reported_as_unknown(function):
    identification = found(function, call="labels")
    assert (identification.verdict, identification.exit_code) == ("none", 1)
    assert any("computes no loss of the catalogue" in line for line in identification.lines())
    # None of them is near a variant, so that no variant is named.
    assert identification.nearest == ""


def test_failing_target_raises_an_error():
    def breaks(embeddings, labels):
        raise RuntimeError("no such luck")

    with pytest.raises(TargetError, match="no such luck"):
        identify(breaks, call="labels", arrays="torch")
    with pytest.raises(TargetError, match="returned 2 results, and more than one may be the loss"):
        identify(lambda e, y: (e.sum(), e.mean()), call="labels", arrays="torch")


# A loss that is registered by a user


def pulled_baseline(logits, member, positive, *, sharpness="soft"):
    """Softplus of the gap: the mean logit of the negatives minus that of the positives. Not a published loss.

    With sharpness "hard", it is relu(gap + 1) instead.
    """
    near = (logits * positive).sum(1) / positive.sum(1).clamp(min=1)
    negative = member & ~positive
    gap = (logits * negative).sum(1) / negative.sum(1).clamp(min=1) - near
    return (F.softplus(gap) if sharpness == "soft" else F.relu(gap + 1)) * positive.any(1)


def pulled_loss(embeddings, labels, temperature=0.4, similarity="cosine", sharpness="soft", reduction="mean"):
    rows = F.normalize(embeddings, dim=1) if similarity == "cosine" else embeddings
    own = torch.eye(len(rows), dtype=torch.bool)
    each = pulled_baseline(rows @ rows.T / temperature, ~own, (labels[:, None] == labels) & ~own, sharpness=sharpness)
    return each.mean() if reduction == "mean" else each.sum()


PULLED = Loss(
    name="pulled",
    module="pulled",
    source="this file",
    positives_by="labels",
    keywords={**COMMON, "no_positive": "zero", "sharpness": "soft"},
    own_choices={"sharpness": ("soft", "hard")},
    baseline=pulled_baseline,
)


@pytest.mark.slow
def test_loss_that_is_not_registered_is_unknown():
    assert found(pulled_loss, call="labels", arrays="torch").verdict == "none"


@pytest.mark.slow
def test_registered_loss_is_identified_with_its_options():
    with registered(PULLED):
        for options in ({}, {"sharpness": "hard"}, {"similarity": "dot"}, {"reduction": "sum"}):
            function = lambda e, y, temperature, options=options: pulled_loss(e, y, temperature, **options)  # noqa: E731
            identification = found(function, call="labels", arrays="torch")
            assert (identification.verdict, identification.loss) == ("match", "pulled")
            assert (identification.options, identification.temperature) == (options, None)
            assert identification.match.gradient_error < 1e-6
        squared = found(lambda e, y: pulled_loss(e, y, 0.3, similarity="dot") * 3, call="labels", arrays="torch")
        assert (squared.loss, squared.temperature) == ("pulled", pytest.approx(0.3))
        upside_down = found(lambda e, y, temperature: pulled_loss(e, y, 1 / temperature), call="labels", arrays="torch")
        assert upside_down.wrong == ["logits are multiplied by the temperature instead of divided"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"similarity": "dot"}, "similarities are raw dot products"),
        ({"temperature": 0.16}, "the temperature is applied twice (0.4)"),
        ({"reduction": "sum"}, "the sum over 8 anchors is not divided by their number"),
        ({"sharpness": "hard"}, "sharpness=hard is computed instead of sharpness=soft"),
    ],
)
def test_failure_of_a_registered_loss_is_explained(options, words):
    labels = (0, 0, 0, 1, 1, 1, 1, 2)
    rows = drawn(17, [0] * len(labels), 0.0).requires_grad_()

    def values_of(**given):
        value = pulled_loss(rows, torch.tensor(labels), **given)
        return [value.item()], torch.autograd.grad(value, rows)[0].numpy()

    right, gradient = values_of()
    with registered(PULLED):
        case = Case("mine", "pulled", rows.detach().numpy(), {"labels": list(labels)}, {"temperature": 0.4})
        true = Truth(right[0], {}, gradient, similarities=lambda: None, sensitivity=lambda: np.zeros((8, 8)))
        assert words in explain_case(case, Outcome(*values_of(**options)), true)


# Explanations of failing checks


def diagnosis(wrong, *, loss="supcon", keywords=None, values_only=False, labels=(0, 0, 0, 1, 1, 1, 1, 2), **given):
    rows = drawn(17, [0] * len(labels), 0.0).numpy()
    arguments = {"labels": list(labels)} if loss != "nt_bxent" else {"positive_pairs": [(0, 1), (1, 0), (2, 5), (0, 3)]}
    case = Case("mine", loss, rows, arguments, {"temperature": 0.4, **(keywords or {})}, **given)
    leaf = torch.tensor(rows, requires_grad=True)
    value = wrong(leaf, torch.tensor(labels))
    (gradient,) = torch.autograd.grad(value.sum(), leaf, retain_graph=True)
    values = value.detach().reshape(-1).tolist()
    outcome = Outcome(values, None if values_only else gradient.numpy())
    if len(values) > 1:
        outcome = Outcome(values, gradient.numpy(), dict(enumerate(values)))
    return explain_case(case, outcome, truth(case))


def ours(loss, **options):
    function = getattr(fast, f"{loss}_loss")
    return lambda e, y: function(e, y, **{"temperature": 0.4, **options})


@pytest.mark.parametrize(
    ("wrong", "keywords", "words"),
    [
        (ours("nt_xent_pairwise"), {}, "the denominator of anchor 0 lacks the other positives: 6 terms instead of 7"),
        (ours("supcon", denominator="only_negatives"), {}, "the denominator of anchor 0 lacks the positives: 5 terms"),
        (lambda e, y: keeps_itself(e, y, 0.4), {}, "the denominator of anchor 0 contains the anchor itself: 8 terms"),
        (lambda e, y: leaks_one(e, y, 0.4), {}, "leaks into the denominator of anchor 0: 8 terms instead of 7"),
        (ours("supcon"), {"denominator": "one_positive"}, "contains the other positives: 7 terms instead of 6"),
        (ours("supcon", reduction="sum"), {}, "the sum over 8 anchors is not divided by their number"),
        (
            ours("supcon", no_positive="drop"),
            {},
            "anchor 7 has no positives and was left out of the mean (if intended: --set no_positive=drop)",
        ),
        (ours("supcon"), {"no_positive": "drop"}, "anchor 7 has no positives and was counted"),
        (ours("supcon_in"), {}, "the mean over the positives is taken inside the logarithm, not outside it"),
        (ours("supcon", similarity="dot"), {}, "similarities are raw dot products: rows are not normalised"),
        (lambda e, y: 2 * ours("supcon")(e, y), {}, "values are 2 times too large"),
        (lambda e, y: squares_the_temperature(e, y, 0.4), {}, "the temperature is applied twice (0.4)"),
        (lambda e, y: forgets_to_divide(e, y, 0.4), {}, "is not divided by their number (anchor 0 has 2 positives)"),
        (lambda e, y: detaches_the_others(e, y, 0.4), {}, "the value is right, but no gradient flows into the rows"),
        (lambda e, y: ours("supcon")(e, y) * 0.4 / 0.07, {}, "multiplied by temperature/0.07"),
    ],
)
def test_failing_check_is_explained(wrong, keywords, words):
    explanation = diagnosis(wrong, keywords=keywords)
    assert explanation is not None
    assert words in explanation, explanation


def test_mean_over_pairs_is_explained_with_counts():
    explanation = diagnosis(ours("nt_xent_pairwise", reduction="mean_pairs"), loss="nt_xent_pairwise")
    assert explanation == "the mean is over 18 pairs, not over 8 anchors"


def test_values_without_gradients_need_a_closer_match():
    assert "lacks the other positives" in diagnosis(ours("nt_xent_pairwise"), values_only=True)
    assert diagnosis(lambda e, y: ours("supcon")(e, y) * 1.0317, values_only=True) == ""
    scaled = diagnosis(lambda e, y: ours("supcon")(e, y) * 0.4 / 0.07, values_only=True)
    assert "multiplied by temperature/0.07" in scaled
    averaged = ours("supcon", no_positive="drop")
    explanation = diagnosis(averaged, keywords={"reduction": "sum", "no_positive": "drop"}, values_only=True)
    assert explanation == "the sum over 7 anchors is divided by their number, but the sum is required"


def test_first_wrong_anchor_is_named_if_anchors_have_values():
    labels = (0, 0, 1, 1, 1, 2, 2)
    explanation = diagnosis(
        ours("supcon", reduction="none", denominator="one_positive"), keywords={"reduction": "none"}, labels=labels
    )
    assert explanation == "the denominator of anchor 2 lacks the other positives: 5 terms instead of 6"


def test_unknown_mistake_has_no_explanation():
    assert diagnosis(lambda e, y: ours("supcon")(e, y) + (e**3).sum() * 0.01) == ""


def test_nan_and_infinity_are_explained():
    labels = (0, 0, 1, 2)
    case = Case("mine", "supcon", drawn(3, [0] * 4, 0.0).numpy(), {"labels": list(labels)}, {"temperature": 0.1})
    explanation = explain_case(case, Outcome([float("nan")]), truth(case))
    assert explanation.startswith("anchors 2 and 3 have no positives, and the loss becomes NaN")
    steep = Case("mine", "supcon", case.embeddings, {"labels": [0, 0, 1, 1]}, {"temperature": 0.001})
    assert "exponentials overflow" in explain_case(steep, Outcome([float("inf")]), truth(steep))


def test_overflow_is_reported_beside_an_anchor_without_positives():
    steep = Case("mine", "supcon", drawn(3, [0] * 4, 0.0).numpy(), {"labels": [0, 0, 1, 2]}, {"temperature": 0.001})
    explanation = explain_case(steep, Outcome([float("nan")]), truth(steep))
    assert "no positives" in explanation
    assert "exponentials overflow" in explanation


def test_gradient_that_is_not_finite_is_explained():
    def spoilt(e, y):
        value = ours("supcon")(e, y)
        return value + (e[2, 0] * 0).sqrt() * 0

    explanation = diagnosis(spoilt)
    assert explanation.startswith(
        "the value is right, but the gradient is NaN or infinite in 1 of 8 rows of embeddings"
    )


def test_digits_that_the_right_formula_loses_are_not_explained_by_a_mistake():
    solved = np.array([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]])
    case = Case("mine", "supcon", solved, {"labels": [0, 0, 1, 1]}, {"temperature": 0.02})
    explanation = explain_case(case, Outcome([0.0]), truth(case))
    expected = "the formula is right, but digits are lost: a straightforward evaluation in float64 gives the same"
    assert explanation.startswith(expected)


def test_cause_of_a_simple_factor_is_reported_as_possible():
    explanation = diagnosis(lambda e, y: 0.5 * ours("supcon")(e, y), labels=(0, 0, 0, 1, 1, 1))
    expected = "values are 2 times too small, possibly because the sum over 6 anchors is divided by 12"
    assert explanation.startswith(expected)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_first_of_the_probes_that_differ_equally_is_named_on_every_machine(seed):
    def loss(embeddings, labels, temperature):
        return fast.supcon_loss(embeddings, labels, temperature=temperature) * (1.01 if len(embeddings) > 9 else 1)

    with Machine(seed):
        search = Search(Target(loss, "labels", "torch"))
        (nearest,) = search.explain(known_losses("labels")[0], {passed: passed for passed in PASSED})
    assert nearest.error == pytest.approx(0.01 / 1.01)
    assert nearest.worst[0] == "14 rows in classes of 6 to 2, temperature 0.5"


def test_command_prints_the_identification_and_sets_the_exit_code(tmp_path):
    from typer.testing import CliRunner

    from pairproof.conformance.cli import app

    file = tmp_path / "losses.py"
    file.write_text(
        "import torch\n\nfrom pairproof.fast import supcon_loss\n\n\n"
        "def mine(embeddings, labels):\n    return supcon_loss(embeddings, labels, temperature=0.3)\n\n\n"
        "def constant(embeddings, labels, temperature):\n    return torch.sum(embeddings) * 0 + 1.5\n",
        encoding="utf-8",
    )
    found = CliRunner().invoke(app, ["identify", f"{file}:mine"])
    assert found.exit_code == 0, found.output
    assert "computes supcon, temperature 0.3 (built in, recovered)" in found.output
    assert f" on {described(machine())}" in " ".join(found.output.split())
    assert CliRunner().invoke(app, ["identify", f"{file}:constant"]).exit_code == 1
    absent = CliRunner().invoke(app, ["identify", f"{file}:absent"])
    assert absent.exit_code == 3
    assert "absent" in absent.output
    assert CliRunner().invoke(app, ["identify", "no colon"]).exit_code == 2
    for option, what in (("--call", "call"), ("--arrays", "kind of arrays")):
        misspelt = CliRunner().invoke(app, ["identify", f"{file}:mine", option, "labls"])
        assert misspelt.exit_code == 2
        assert f"unknown {what} 'labls'; known: " in misspelt.output


@pytest.mark.parametrize("last_bit", [-1, 0, 1])
def test_candidates_that_differ_only_by_rounding_are_ranked_by_words_and_order(last_bit: int) -> None:
    """The formulas of two variants can be equal on all probes, and their errors then differ in the last bits."""
    for size in (0.0, 1e-16, 0.01, 3.0):
        sizes = {"far": size + 0.5, "first": size, "second": size + last_bit * math.ulp(size), "third": size}
        names = list(sizes)
        assert ranked(names, sizes.__getitem__) == ["first", "second", "third", "far"]
        assert ranked(names, sizes.__getitem__, ["far", "third", "second", "first"].index)[0] == "third"

"""Our losses hold to pairproof's proved values, gradients included."""

import pairproof.conformance

from mylib.losses import SupConLoss, nt_xent


@pairproof.conformance.parametrize(SupConLoss, loss="supcon", checks=259)
def test_supcon(check):
    check()


@pairproof.conformance.parametrize(nt_xent, loss="nt_xent", checks=174)
def test_nt_xent(check):
    check()

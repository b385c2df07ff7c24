"""Compare our losses with the proved values and gradients of pairproof."""

import pairproof.conformance

from mylib.losses import SupConLoss, nt_xent


@pairproof.conformance.parametrize(SupConLoss, loss="supcon", checks=522)
def test_supcon(check):
    check()


@pairproof.conformance.parametrize(nt_xent, loss="nt_xent", checks=431)
def test_nt_xent(check):
    check()

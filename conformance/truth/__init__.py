"""The expected results of a case: proved values and gradients, tolerances, and the comparison with an outcome."""

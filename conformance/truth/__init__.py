"""What each case must give: proved values and gradients, tolerances, and the comparison with an outcome."""

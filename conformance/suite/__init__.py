"""The catalogue of losses, the cases, and the files that store them."""

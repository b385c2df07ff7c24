"""A library with two contrastive losses of its own."""

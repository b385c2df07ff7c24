"""A library with two contrastive losses."""

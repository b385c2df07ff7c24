"""The suite: the catalogue of losses, the cases, and the files they are stored in."""

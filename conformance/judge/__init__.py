"""Judge implementations, and losses of users, on the cases of the suite."""

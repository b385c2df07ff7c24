"""Judge the implementations and a user's loss."""

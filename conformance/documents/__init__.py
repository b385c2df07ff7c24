"""Published documents (notebooks, articles, public tests): the figures they print, and their claims in words."""

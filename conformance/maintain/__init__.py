"""Commands that change the fixtures: add a case, rebuild what is derived."""

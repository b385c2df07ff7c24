"""Commands that change the fixtures: add a case, add a loss, rebuild derived files."""

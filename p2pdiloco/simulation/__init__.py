"""The production protocol code in virtual time."""

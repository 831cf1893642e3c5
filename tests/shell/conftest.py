"""What all tests of the shell need."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_power_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy disk an fsync takes a tenth of a second, and these nodes save often."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

"""The lab that the tests here need: skipped with a sentence where it cannot be had, never in CI."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.lab import Lab, open_lab, why_not


@contextmanager
def required_lab() -> Iterator[Lab]:
    """An empty lab that leaves nothing behind."""
    if reason := why_not():
        if "CI" in os.environ:
            pytest.fail(f"these tests are required here, but {reason}")
        pytest.skip(reason)
    with open_lab() as lab:
        assert lab.namespaces()
        yield lab
    assert not lab.namespaces()

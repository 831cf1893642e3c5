"""How the tests are shared out where several workers run them, as `make test` does."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """The tests of a file stay with one worker, in their order; simulated ones share nothing."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, _ = nodeid.partition("::")
        return nodeid if "/simulation/" in file else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers begin with what may take longest, so that none is left with it in the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=_allowed_s, reverse=True)


def _allowed_s(item: pytest.Item) -> float:
    timeout = item.get_closest_marker("timeout")
    return float(timeout.args[0]) if timeout else 0.0

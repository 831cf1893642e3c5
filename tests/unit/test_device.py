"""Which device is taken, and what is said about one that is not there."""

import pytest

from p2pdiloco.errors import UserError
from p2pdiloco_daemon.learner import device
from p2pdiloco_daemon.learner.device import available_devices, choose_device


@pytest.mark.parametrize(
    ("available", "chosen"),
    [(["cpu"], "cpu"), (["cpu", "mps"], "mps"), (["cpu", "cuda", "cuda:0", "cuda:1"], "cuda")],
)
def test_auto_is_the_fastest(
    available: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "available_devices", lambda: available)
    assert choose_device("auto") == chosen


def test_a_device_that_is_there_is_taken() -> None:
    assert "cpu" in available_devices()
    assert choose_device("cpu") == "cpu"


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "available_devices", lambda: ["cpu", "mps"])
    with pytest.raises(UserError, match="--device cuda:7 cannot be used; this machine has: cpu, m"):
        choose_device("cuda:7")

"""Namespaces behave as the networks they stand for, and nothing of them is left."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from required_lab import required_lab
from swarm_processes import wait_until

from benchmarks.lab import Host, Lab, Rate, namespaces, open_lab

pytestmark = pytest.mark.loopback

PORT = 4001
SILENCE_S, ARRIVAL_S = 0.3, 20.0


@pytest.fixture
def lab() -> Iterator[Lab]:
    with required_lab() as lab:
        yield lab


def answer(caller: Host, callee: Host, timeout_s: float = SILENCE_S) -> str:
    """What a dial of a port that nobody listens on meets: "refused" shows that it arrived."""
    try:
        caller.call(lambda: socket.create_connection((callee.address, PORT), timeout_s)).close()
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "nothing"
    return "open"


def arrives(caller: Host, callee: Host) -> bool:
    """A lost packet is sent again after a second."""
    return answer(caller, callee, ARRIVAL_S) == "refused"


def seconds_to_send(num_bytes: int, source: Host, target: Host) -> float:
    """Until the last byte has arrived."""
    server = target.call(lambda: socket.create_server(("0.0.0.0", 0)))
    address = (target.address, server.getsockname()[1])
    with server, source.call(lambda: socket.create_connection(address)) as sender:
        receiver, _ = server.accept()
        started = time.monotonic()
        with receiver, ThreadPoolExecutor(1) as thread:
            thread.submit(sender.sendall, bytes(num_bytes))
            received = 0
            while received < num_bytes:
                received += len(receiver.recv(1 << 20))
        return time.monotonic() - started


def test_who_can_dial_whom(lab: Lab) -> None:
    town, other = lab.public("town"), lab.public("other")
    home, guarded = lab.behind_nat("home"), lab.firewalled("guarded")
    inside = (home, guarded)
    assert all(arrives(host, town) for host in (other, *inside))
    assert all(answer(town, host) == "nothing" for host in inside)
    assert answer(home, guarded) == answer(guarded, home) == "nothing"


def test_a_cut_drops_and_mending_lets_through(lab: Lab) -> None:
    a, b, c = (lab.public(name) for name in "abc")
    lab.cut([a], [b, c])
    assert answer(a, b) == answer(b, a) == answer(c, a) == "nothing"
    assert arrives(b, c)
    lab.mend()
    assert arrives(a, b)


def test_a_one_way_cut_lets_what_comes_back_through(lab: Lab) -> None:
    a, b = lab.public("a"), lab.public("b")
    lab.cut([a], [b], one_way=True)
    program = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM);"
        f"s.sendto(b'x', ('{{}}', {PORT}))"
    )

    def datagram_arrives(source: Host, target: Host) -> bool:
        receiver = target.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        with receiver:
            receiver.bind(("0.0.0.0", PORT))
            receiver.settimeout(2 * SILENCE_S)
            command = [*source.prefix, sys.executable, "-c", program.format(target.address)]
            subprocess.run(command, check=True)
            try:
                return receiver.recv(9) == b"x"
            except TimeoutError:
                return False

    assert datagram_arrives(b, a)
    assert not datagram_arrives(a, b)


def test_a_host_that_is_unplugged_reaches_nobody_until_it_is_plugged_in(lab: Lab) -> None:
    town, home = lab.public("town"), lab.behind_nat("home")
    lab.unplug(home)
    assert answer(home, town) == "nothing"
    lab.plug(home)
    assert arrives(home, town)


def test_a_moved_host_is_at_another_address_only(lab: Lab) -> None:
    town, home = lab.public("town"), lab.behind_nat("home")
    old = Host("old", town.namespace)
    old.address = town.address
    lab.move(town)
    assert town.address != old.address
    assert arrives(home, town)
    assert answer(home, old) == "nothing"
    lab.move(home)
    assert arrives(home, town)


def test_a_link_carries_what_it_was_given_in_each_direction(lab: Lab) -> None:
    """From below only: how long it takes more depends on what else this machine does."""
    slow, fast = lab.public("slow", Rate(up=10, down=40)), lab.public("fast")
    megabit = 125_000
    assert seconds_to_send(8 * megabit, slow, fast) > 0.6
    assert seconds_to_send(32 * megabit, fast, slow) > 0.6


def test_processes_left_running_are_ended_and_an_exception_passes() -> None:
    process = None
    with pytest.raises(ZeroDivisionError), required_lab() as lab:
        host = lab.public("host")
        process = subprocess.Popen([*host.prefix, "sleep", "1000"])
        wait_until("the process to be in the lab", host.process_ids)
        assert lab.process_ids() == [process.pid]
        raise ZeroDivisionError
    assert process is not None and process.wait() == -signal.SIGKILL


def test_what_a_killed_owner_left_is_removed_by_the_next_lab(lab: Lab) -> None:
    """`lab` only asks whether a lab can be had."""
    program = (
        "from benchmarks.lab import open_lab; import signal, os\n"
        "with open_lab() as lab:\n"
        "    lab.public('town')\n"
        "    print(*lab.namespaces(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".", *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert killed.returncode == -signal.SIGKILL
    left = killed.stdout.split()
    assert len(left) == 2
    with open_lab():
        assert not set(left) & set(namespaces())
    assert not lab.hosts


@pytest.mark.parametrize("name", ["", "Town", "9", "a-very-long-name", "a b"])
def test_a_name_that_no_interface_can_have_is_refused(lab: Lab, name: str) -> None:
    with pytest.raises(ValueError, match="a host's name"):
        lab.public(name)

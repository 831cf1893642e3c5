"""A private internet for real processes: network namespaces with shaped links, NATs and firewalls.

One namespace is the internet: it routes between subnets of 44.128.0.0/16, which go-libp2p takes for
public (documentation and private ranges it does not). Each host is a namespace with one link to it,
or to a home router of its own that masquerades and drops whatever was not asked for. Nothing here
reaches the machine's own network. Needs root and Linux; `why_not` says what is missing.

Not here: latency and loss (netem is missing in many kernels; the simulator has both).
"""

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import TypeVar

from p2pdiloco_daemon.demo.forked_command import enter_network

T = TypeVar("T")

SUBNETS_MAX = 255
"""Of 44.128.0.0/16, one for each link to the internet; a host that moves takes another one."""

HOST_NAME_LENGTH_MAX = 12
"""Names are also those of interfaces, which have 15 characters at most."""

LAN = "192.168.1"
"""In every home the same, as in life: a private address of one means another machine elsewhere."""

QUEUE_S = 0.1
"""What a shaped link holds back before it drops: a home router's buffer, on the small side."""

_BURST_BYTES = 32 * 1024
_PREFIX = "p2plab"
_serials = count()

_INTERNET = """
table inet lab {
  set cut { type ifname . ifname; }
  chain forward {
    type filter hook forward priority 0;
    iifname . oifname @cut drop
  }
}
"""

_HOME_ROUTER = """
table inet home {
  chain forward {
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    iifname "lan" accept
  }
  chain input {
    type filter hook input priority 0; policy drop;
    ct state established,related accept
    iifname "lan" accept
  }
}
table ip nat {
  chain postrouting {
    type nat hook postrouting priority 100;
    oifname "wan" masquerade MODE
  }
}
"""

_FIREWALL = """
table inet firewall {
  chain input {
    type filter hook input priority 0; policy drop;
    ct state established,related accept
    iifname "lo" accept
  }
}
"""


class LabError(Exception):
    """The machine refuses what a lab needs; the message has the command and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What a link carries, in Mbit/s; None leaves it unshaped."""

    up: float | None = None
    down: float | None = None


UNSHAPED = Rate()


class Host:
    """A namespace of the lab in which processes can run; made by `Lab`."""

    def __init__(self, name: str, namespace: str) -> None:
        self.name = name
        self.namespace = namespace
        self.address = ""
        """On the internet; behind a NAT it is the router's."""

    @property
    def network(self) -> Path:
        """What a process enters to run here."""
        return _namespace_file(self.namespace)

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put before a command to run it here; the process keeps its id."""
        return ("ip", "netns", "exec", self.namespace)

    def call(self, function: Callable[[], T]) -> T:
        """The result of `function` in a thread of this namespace; sockets it makes stay here."""
        return _call_in(self.namespace, function)

    def process_ids(self) -> list[int]:
        """Of everything that runs here now."""
        return _process_ids(self.namespace)


class Lab:
    """An internet and its hosts; made by `open_lab`."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self._tag = f"{_PREFIX}{os.getpid()}-{next(_serials)}-"
        self._internet = f"{self._tag}internet"
        self._subnets = iter(range(1, SUBNETS_MAX + 1))
        self._routers: dict[str, str] = {}

    def begin(self) -> None:
        """Makes the internet."""
        _add_namespace(self._internet)
        _load_rules(self._internet, _INTERNET)
        _forward(self._internet)

    def namespaces(self) -> list[str]:
        """Those that there are of it."""
        return [name for name in namespaces() if name.startswith(self._tag)]

    def public(self, name: str, rate: Rate = UNSHAPED) -> Host:
        """A host that everybody can dial."""
        host = self._new_host(name)
        self._attach(host, host.namespace, "eth0", rate)
        return host

    def firewalled(self, name: str, rate: Rate = UNSHAPED) -> Host:
        """A host with a public address that lets nobody in: it can only dial."""
        host = self.public(name, rate)
        _load_rules(host.namespace, _FIREWALL)
        return host

    def behind_nat(self, name: str, rate: Rate = UNSHAPED, *, symmetric: bool = False) -> Host:
        """A host behind a home router of its own, at the same private address as every other such.

        `symmetric` gives each outgoing connection a random port, which no hole punch can foresee.
        """
        host = self._new_host(name)
        router = f"{self._tag}{name}-nat"
        self._routers[name] = router
        _add_namespace(router)
        _load_rules(router, _HOME_ROUTER.replace("MODE", "fully-random" if symmetric else ""))
        _forward(router)
        _pair(router, "lan", host.namespace, "eth0")
        _address(router, "lan", f"{LAN}.1")
        _address(host.namespace, "eth0", f"{LAN}.2", gateway=f"{LAN}.1")
        self._attach(host, router, "wan", rate)
        return host

    def narrow(self, host: Host, mbit: float) -> None:
        """From now on the host's link carries so much each way."""
        namespace, interface = self._uplink_of(host)
        _shape(namespace, interface, mbit)
        _shape(self._internet, host.name, mbit)

    def move(self, host: Host) -> None:
        """Gives the host (or its home router) an address in another subnet; the old one is gone."""
        self._number(host, *self._uplink_of(host))

    def unplug(self, host: Host) -> None:
        """Takes the carrier from the host's link, as pulling the plug of its router would."""
        _ip("-n", self._internet, "link", "set", "dev", host.name, "down")

    def plug(self, host: Host) -> None:
        """Undoes `unplug`."""
        _ip("-n", self._internet, "link", "set", "dev", host.name, "up")

    def cut(self, from_: Sequence[Host], to: Sequence[Host], *, one_way: bool = False) -> None:
        """Drops what goes from any of `from_` to any of `to`, and what comes back unless `one_way`.

        Both sides keep their carrier and hear of nothing.
        """
        pairs = [(a.name, b.name) for a, b in product(from_, to)]
        if not one_way:
            pairs += [(b, a) for a, b in pairs]
        dropped = ", ".join(f'"{a}" . "{b}"' for a, b in pairs)
        _load_rules(self._internet, f"add element inet lab cut {{ {dropped} }}")

    def mend(self) -> None:
        """Undoes every `cut`."""
        _load_rules(self._internet, "flush set inet lab cut")

    def process_ids(self) -> list[int]:
        """Of everything that runs in the lab now."""
        return [pid for host in self.hosts.values() for pid in host.process_ids()]

    def end(self) -> None:
        """Kills what still runs in the lab, and removes every namespace with all it holds."""
        _remove(self._tag)

    def _new_host(self, name: str) -> Host:
        if not re.fullmatch(rf"[a-z][a-z0-9-]{{0,{HOST_NAME_LENGTH_MAX - 1}}}", name):
            raise ValueError(
                f"a host's name has up to {HOST_NAME_LENGTH_MAX} letters, digits and dashes, "
                f"got {name!r}"
            )
        if name in self.hosts:
            raise ValueError(f"there is a host {name!r} already")
        host = self.hosts[name] = Host(name, f"{self._tag}{name}")
        _add_namespace(host.namespace)
        return host

    def _uplink_of(self, host: Host) -> tuple[str, str]:
        """-> (namespace, interface) at the host's end of its link to the internet."""
        router = self._routers.get(host.name)
        return (router, "wan") if router else (host.namespace, "eth0")

    def _attach(self, host: Host, namespace: str, interface: str, rate: Rate) -> None:
        _pair(self._internet, host.name, namespace, interface)
        self._number(host, namespace, interface)
        _shape(namespace, interface, rate.up)
        _shape(self._internet, host.name, rate.down)

    def _number(self, host: Host, namespace: str, interface: str) -> None:
        subnet = f"44.128.{next(self._subnets)}"
        _address(self._internet, host.name, f"{subnet}.1")
        _address(namespace, interface, f"{subnet}.2", gateway=f"{subnet}.1")
        host.address = f"{subnet}.2"


@contextlib.contextmanager
def open_lab() -> Iterator[Lab]:
    """A lab without hosts; afterwards nothing of it is left, whatever was raised inside.

    Labs whose process was killed are removed first. LabError where the machine refuses.
    """
    for owner in _owners():
        if not Path(f"/proc/{owner}").exists():
            _remove(f"{_PREFIX}{owner}-")
    lab = Lab()
    try:
        lab.begin()
        yield lab
    finally:
        lab.end()


@functools.cache
def why_not() -> str | None:
    """A sentence that says why this machine allows no lab; None where it does."""
    if sys.platform != "linux":
        return f"network namespaces exist on Linux only, this is {sys.platform}"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [name for name in ("ip", "tc", "nft") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install the packages iproute2 and nftables"
    try:
        with open_lab() as lab:
            lab.behind_nat("trial", Rate(up=1, down=1))
            lab.firewalled("guarded")
    except (LabError, OSError) as error:
        return f"this machine refuses network namespaces: {error}"
    return None


def namespaces() -> list[str]:
    """Of all labs on this machine, this process's and others'."""
    return [name for name in _all_namespaces() if name.startswith(_PREFIX)]


def _owners() -> set[int]:
    """Process ids of whoever made the labs that there are."""
    found = (re.match(rf"{_PREFIX}(\d+)-", name) for name in _all_namespaces())
    return {int(match[1]) for match in found if match}


def _all_namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line]


def _remove(prefix: str) -> None:
    names = [name for name in _all_namespaces() if name.startswith(prefix)]
    for name in names:
        for pid in _process_ids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for name in names:
        with contextlib.suppress(LabError):  # another process removes the same leftovers
            _ip("netns", "del", name)


def _process_ids(namespace: str) -> list[int]:
    try:
        return [int(pid) for pid in _ip("netns", "pids", namespace).split()]
    except LabError:  # it was removed meanwhile
        return []


def _add_namespace(name: str) -> None:
    _ip("netns", "add", name)
    _ip("-n", name, "link", "set", "dev", "lo", "up")


def _pair(namespace: str, interface: str, other: str, other_interface: str) -> None:
    """A cable between two namespaces."""
    ends = (interface, "type", "veth", "peer", "name", other_interface, "netns", other)
    _ip("-n", namespace, "link", "add", "name", *ends)
    _ip("-n", namespace, "link", "set", "dev", interface, "up")
    _ip("-n", other, "link", "set", "dev", other_interface, "up")


def _address(namespace: str, interface: str, address: str, gateway: str | None = None) -> None:
    _ip("-n", namespace, "address", "flush", "dev", interface)
    _ip("-n", namespace, "address", "add", f"{address}/24", "dev", interface)
    if gateway:
        _ip("-n", namespace, "route", "replace", "default", "via", gateway)


def _shape(namespace: str, interface: str, mbit: float | None) -> None:
    """Limits what leaves through the interface."""
    if mbit is None:
        return
    rate = ("rate", f"{mbit * 1000:.0f}kbit", "burst", str(_BURST_BYTES))
    queue = ("latency", f"{QUEUE_S * 1000:.0f}ms")
    _run(
        ["tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf", *rate, *queue]
    )


def _load_rules(namespace: str, rules: str) -> None:
    _run(["ip", "netns", "exec", namespace, "nft", "-f", "-"], rules)


def _forward(namespace: str) -> None:
    _call_in(namespace, lambda: Path("/proc/sys/net/ipv4/ip_forward").write_text("1"))


def _call_in(namespace: str, function: Callable[[], T]) -> T:
    """Calls in a thread of its own, since a thread that has entered a namespace stays there."""

    def work() -> T:
        enter_network(_namespace_file(namespace))
        return function()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def _namespace_file(namespace: str) -> Path:
    return Path("/run/netns", namespace)


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments])


def _run(command: Sequence[str], standard_input: str = "") -> str:
    done = subprocess.run(command, input=standard_input, capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout

"""What a node does beside its events, for ever: finding the others, saving, measuring."""

import asyncio
import logging
from itertools import islice
from pathlib import Path

from p2pdiloco.protocol import events
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco_bootstrap.discovery import Discovery
from p2pdiloco_bootstrap.host import Host
from p2pdiloco_bootstrap.serving import Traffic
from p2pdiloco_daemon.learner.learner import Learner
from p2pdiloco_daemon.node import Expected, NodeShell
from p2pdiloco_daemon.report import LearnerReport
from p2pdiloco_daemon.storage.holdings import Holdings

HOUSEKEEPING_S = 2.0
DISCOVERY_S = (1.0, 60.0)
"""First and longest pause between looks into the DHT; it doubles."""
LEARNER_ROLE = "learner"
PEERS_REMEMBERED = 16
"""Members whose addresses are kept: a restart finds the swarm when no first peer is left."""

logger = logging.getLogger(__name__)


class SettleRequest:
    """The page's request to settle, passed on to the node once there is one."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def __call__(self) -> None:
        self.asked.set()


async def settle_when_asked(
    request: SettleRequest, learner: Learner, shell: NodeShell, report: LearnerReport
) -> None:
    await request.asked.wait()
    learner.pause()
    report.paused = True
    shell.post(events.SettleAsked())


async def compare_with_partners(shell: NodeShell) -> None:
    """In a run that gossips: how far the others are from us in what they predict."""
    gossiper = shell.node.gossiper
    if shell.gossip and gossiper:
        await shell.gossip.compare(lambda: gossiper.partners)


def tell_of_sleep(shell: NodeShell, look_again: asyncio.Event, seconds: float) -> None:
    """For log and page; and has `discover` look for the others at once."""
    text = (
        f"this machine slept, or the process was stopped, for {seconds:.0f} s; "
        "looking for the others again"
    )
    shell.notes.append((asyncio.get_running_loop().time(), text))
    logger.warning("%s", text)
    look_again.set()


async def discover(
    host: Host, run_id: str, shell: NodeShell, holdings: Holdings, look_again: asyncio.Event
) -> None:
    """Announces this node and finds the others, for ever, with growing pauses; `look_again` ends
    one and makes the next ones short.
    """
    discovery = Discovery(host, run_id)
    host.consult(discovery)
    remembered = await holdings.disk.run(holdings.load_peers)
    for peer, addresses in remembered.items():
        host.remember(peer, addresses)
    if remembered:
        shell.post(events.PeersFound(tuple(remembered)))
    pause_s, longest_s = DISCOVERY_S
    while True:
        members: tuple[PeerId, ...] = ()
        try:
            await discovery.announce((LEARNER_ROLE,))
            found = {
                PeerId(m.peer): m.addresses
                for m in await discovery.members()
                if LEARNER_ROLE in m.roles and m.peer != host.peer_id
            }
            members = tuple(found)
            known = dict(islice((found | remembered | found).items(), PEERS_REMEMBERED))
            if known != remembered:
                remembered = known
                holdings.save_peers(known)
            offset = await discovery.clock_offset()
            if offset and (problem := offset.problem()):
                logger.warning("%s", problem)
        except Expected as error:
            logger.warning("discovery: %s", error or "no answer from the DHT")
        shell.post(events.PeersFound(members))
        try:
            async with asyncio.timeout(pause_s):
                await look_again.wait()
        except TimeoutError:
            pause_s = min(2 * pause_s, longest_s)
        else:
            look_again.clear()
            pause_s = DISCOVERY_S[0]


async def keep_house(
    holdings: Holdings, shell: NodeShell, traffic: Traffic, directory: Path
) -> None:
    """Saves the ledger, measures disk and uplink, every few seconds."""
    state, sent_before = shell.node.state, traffic.up.total()
    while True:
        await asyncio.sleep(HOUSEKEEPING_S)
        shell.save()
        await holdings.measure_disk(directory)
        sent = traffic.up.total()
        rate_mb_s = (sent - sent_before) / HOUSEKEEPING_S / 1e6
        carried_mb_s = (traffic.uplink.carried or 0.0) / 1e6
        state.uplink_mb_s = max(rate_mb_s, carried_mb_s, 0.98 * state.uplink_mb_s)
        sent_before = sent

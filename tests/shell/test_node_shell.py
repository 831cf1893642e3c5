"""The shell around a core that wants whatever the test wants: each action is answered."""

import asyncio
import threading
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from memory_swarm import FRAGMENTS, GENESIS, A, B, C, Living, Network, open_node, rot
from merge_history import Donor, History, P, make_history
from virtual_clock import run_virtual

from p2pdiloco.compress.codec import encode
from p2pdiloco.errors import PeerError
from p2pdiloco.protocol import actions, events, wire
from p2pdiloco.protocol.lineage import Chain, Contributor, Record
from p2pdiloco.protocol.naming import PeerId, RoundId
from p2pdiloco.protocol.node import Node
from p2pdiloco_bootstrap.shelf import Contribution, RecordsPage
from p2pdiloco_daemon import fetch
from p2pdiloco_daemon.learner import learner as learners
from p2pdiloco_daemon.node import INBOX_MAX, SENDS_PER_PEER_MAX
from p2pdiloco_daemon.storage import disk_queue
from p2pdiloco_daemon.storage.replica import make_state, pack_state, require_sound

E = TypeVar("E", bound=events.Event)

ROUND = RoundId(P, 1, 0, 0)
LEFT = wire.Left()
DELTA = np.full(FRAGMENTS[P].size, 0.1, np.float32)
SAME = encode(DELTA, "float32")


class ScriptedCore(Node):
    """Does what the test wants, and remembers what it was told."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wanted: list[actions.Action] = []
        self.told: asyncio.Queue[events.Event] = asyncio.Queue()

    def handle(self, event: events.Event, now: float) -> list[actions.Action]:
        self.state.now = now
        if event == events.LeaveAsked():
            self.state.gone = True
        elif event != events.Woke():
            self.told.put_nowait(event)
        wanted, self.wanted = self.wanted, []
        return wanted

    @property
    def deadline(self) -> float | None:
        return None if self.state.gone else self.state.now + 60


class Bench:
    """A living shell, its core and its network."""

    def __init__(self, living: Living, network: Network) -> None:
        assert isinstance(living.node, ScriptedCore)
        self.core = living.node
        self.shell = living.shell
        self.holdings = living.holdings
        self.learner = living.learner
        self.tasks = living.tasks
        self.network = network

    def count_messages(self, *peers: PeerId) -> list[str]:
        """Makes the peers take messages; the list grows by the sender of each."""
        arrived: list[str] = []

        def take(sender: str, body: bytes) -> bool:
            arrived.append(sender)
            return True

        self.network.shelves |= dict.fromkeys(peers, Donor())
        self.network.inboxes |= dict.fromkeys(peers, take)
        return arrived

    def want(self, *wanted: actions.Action) -> None:
        self.core.wanted += wanted
        self.shell.post(events.Woke())

    async def told(self, kind: type[E]) -> E:
        async with asyncio.timeout(300):
            event = await self.core.told.get()
        assert isinstance(event, kind), event
        return event

    async def answer(self, wanted: actions.Action, kind: type[E]) -> E:
        self.want(wanted)
        return await self.told(kind)


Scenario = Callable[[Bench], Coroutine[None, None, None]]


def play(directory: Path, scenario: Scenario) -> None:
    async def main() -> None:
        network = Network()
        async with open_node(network, directory, A, ScriptedCore) as living:
            await scenario(Bench(living, network))

    run_virtual(main())


# -------------------------------------------------------------------- messages in


def test_messages_beyond_the_bound_are_not_taken_and_own_events_are(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        body = wire.pack(LEFT)
        assert all(bench.shell.take_message(B, body) for _ in range(INBOX_MAX))
        assert not bench.shell.take_message(B, body)
        bench.shell.post(events.LearnerStarted())
        for _ in range(INBOX_MAX):
            assert await bench.told(events.MessageArrived) == events.MessageArrived(B, LEFT)
        await bench.told(events.LearnerStarted)
        assert bench.shell.take_message(B, body)

    play(tmp_path, scenario)


def test_garbage_is_refused_at_the_door(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.raises(PeerError):
            bench.shell.take_message(B, b"\xff" * 100)
        assert bench.core.told.empty()

    play(tmp_path, scenario)


# -------------------------------------------------------------------- messages out


def test_a_peer_that_never_answers_holds_nobody_up(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        arrived = bench.count_messages(B, C)
        bench.network.hung.add(B)
        bench.want(*[actions.Send(peer, LEFT) for _ in range(100) for peer in (B, C)])
        await asyncio.sleep(0.1)
        assert len(arrived) == SENDS_PER_PEER_MAX
        assert bench.shell.dropped_sends == {"left": 2 * (100 - SENDS_PER_PEER_MAX)}
        bench.want(*[actions.Send(peer, LEFT) for peer in (B, C)])
        await asyncio.sleep(0.1)
        assert len(arrived) == SENDS_PER_PEER_MAX + 1
        await asyncio.sleep(60)
        bench.network.hung.clear()
        bench.want(actions.Send(B, LEFT))
        await asyncio.sleep(0.1)
        assert len(arrived) == SENDS_PER_PEER_MAX + 2

    play(tmp_path, scenario)


def test_leaving_waits_for_the_goodbyes(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        arrived = bench.count_messages(B)
        bench.core.wanted.append(actions.Send(B, LEFT))
        await bench.shell.leave(2.0)
        assert arrived == [A]
        assert asyncio.get_running_loop().time() < 0.1

    play(tmp_path, scenario)


def test_a_node_alone_leaves_at_once(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.shell.leave(2.0)
        assert asyncio.get_running_loop().time() < 0.1

    play(tmp_path, scenario)


def test_leaving_keeps_its_deadline_and_ends_what_is_under_way(tmp_path: Path) -> None:
    async def main() -> float:
        network = Network()
        network.hung.add(B)
        network.shelves[B] = Donor()
        async with open_node(network, tmp_path, A, ScriptedCore) as living:
            bench = Bench(living, network)
            bench.want(actions.Send(B, LEFT), actions.PullContribution(ROUND, B))
            await living.shell.leave(2.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(2.0, abs=0.1)


# -------------------------------------------------------------------- pulling and merging


def hold(bench: Bench, version: int = 0, history: History | None = None) -> None:
    bench.holdings.replica.put(history.states[version] if history else GENESIS[P])


def offer(bench: Bench, payload: bytes) -> None:
    bench.network.shelves[B] = Donor(offered=Contribution(10, 100, payload))


def test_a_contribution_is_pulled_with_its_counters(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        hold(bench)
        offer(bench, SAME)
        pulled = await bench.answer(actions.PullContribution(ROUND, B), events.ContributionPulled)
        assert pulled == events.ContributionPulled(ROUND, B, 10, 100)

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"garbage", "payload"),
        (encode(DELTA[1:], "float32"), "values"),
        (encode(np.zeros_like(DELTA), "float32"), "zero"),
        (encode(DELTA * 1e6, "float32"), "plausible"),
        (b"x" * 10_000, "announces"),
    ],
)
def test_wrong_bytes_are_held_against_the_peer(tmp_path: Path, payload: bytes, reason: str) -> None:
    async def scenario(bench: Bench) -> None:
        hold(bench)
        offer(bench, payload)
        failed = await bench.answer(actions.PullContribution(ROUND, B), events.PullFailed)
        assert failed.hostile and reason in failed.reason

    play(tmp_path, scenario)


@pytest.mark.parametrize("trouble", ["gone", "refused", "hung"])
def test_a_peer_that_has_not_got_it_is_not_hostile(tmp_path: Path, trouble: str) -> None:
    async def scenario(bench: Bench) -> None:
        hold(bench)
        if trouble != "gone":
            bench.network.shelves[B] = Donor()
        if trouble == "hung":
            bench.network.hung.add(B)
        failed = await bench.answer(actions.PullContribution(ROUND, B), events.PullFailed)
        assert not failed.hostile and B in failed.reason

    play(tmp_path, scenario)


def test_our_own_contribution_goes_over_no_network(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        hold(bench)
        failed = await bench.answer(actions.PullContribution(ROUND, A), events.PullFailed)
        assert not failed.hostile
        await bench.holdings.prepare(ROUND, GENESIS[P].anchor - DELTA, 3, 30)
        pulled = await bench.answer(actions.PullContribution(ROUND, A), events.ContributionPulled)
        assert (pulled.steps, pulled.tokens) == (3, 30)

    play(tmp_path, scenario)


def test_a_round_is_merged_committed_and_served(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        hold(bench)
        offer(bench, SAME)
        await bench.answer(actions.PullContribution(ROUND, B), events.ContributionPulled)
        parts = (Contributor(B, 100, 10),)
        merged = await bench.answer(actions.MergeRound(ROUND, parts), events.RoundMerged)
        state = bench.holdings.replica.state(P)
        assert state == GENESIS[P]
        record = replace(
            make_history(1).records[0],
            payload_digest=merged.payload_digest,
            state_digest=merged.state_digest,
        )
        bench.want(actions.CommitRecord(record))
        await asyncio.sleep(0.1)
        state = bench.holdings.replica.state(P)
        assert state and (state.version, state.digest) == (1, merged.state_digest)
        served = await bench.network.shelves[A].merge(P, 1, merged.payload_digest)
        assert isinstance(served, bytes) and len(served) == merged.payload_bytes

    play(tmp_path, scenario)


def test_a_merge_whose_base_is_gone_fails(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        history = make_history(1)
        hold(bench)
        offer(bench, SAME)
        await bench.answer(actions.PullContribution(ROUND, B), events.ContributionPulled)
        hold(bench, 1, history)
        wanted = actions.MergeRound(ROUND, (Contributor(B, 100, 10),))
        failed = await bench.answer(wanted, events.MergeFailed)
        assert "version 1, not 0" in failed.reason

    play(tmp_path, scenario)


# -------------------------------------------------------------------- the learner


PREPARE = actions.PrepareContribution(ROUND)


def test_without_a_learner_nothing_is_prepared(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        failed = await bench.answer(PREPARE, events.ContributionFailed)
        assert failed.reason == "the learner is not running"

    play(tmp_path, scenario)


def test_a_snapshot_becomes_a_contribution(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        hold(bench)
        bench.shell.learner = bench.learner
        bench.want(PREPARE)
        await asyncio.sleep(1)
        assert bench.learner.asked == {P: (1, 0)}
        local = GENESIS[P].anchor - DELTA
        bench.shell.on_learner(learners.Snapshot(1, P, 0, 3, 30, local))
        prepared = await bench.told(events.ContributionPrepared)
        assert (prepared.round, prepared.steps, prepared.tokens) == (ROUND, 3, 30)
        kept = bench.holdings.contribution(ROUND)
        assert kept and len(kept.payload) == prepared.num_bytes
        bench.want(actions.DropContribution(P))
        await asyncio.sleep(1)
        assert bench.holdings.contribution(ROUND) is None

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("taken", "reason"),
    [
        (learners.SnapshotRefused(1, P, "a newer version is here"), "a newer version is here"),
        (learners.Snapshot(1, P, 0, 3, 30, np.full_like(DELTA, np.nan)), "finite"),
    ],
)
def test_a_snapshot_that_is_of_no_use_is_answered(
    tmp_path: Path, taken: learners.LearnerEvent, reason: str
) -> None:
    async def scenario(bench: Bench) -> None:
        hold(bench)
        bench.shell.learner = bench.learner
        bench.want(PREPARE)
        await asyncio.sleep(1)
        bench.shell.on_learner(taken)
        assert reason in (await bench.told(events.ContributionFailed)).reason

    play(tmp_path, scenario)


def test_a_learner_that_dies_leaves_no_snapshot_unanswered(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.shell.learner = bench.learner
        rounds = [ROUND, replace(ROUND, fragment=2)]
        bench.want(*[actions.PrepareContribution(round_id) for round_id in rounds])
        await asyncio.sleep(1)
        bench.shell.on_learner(learners.Died("killed", 1.0))
        for round_id in rounds:
            assert (await bench.told(events.ContributionFailed)).round == round_id
        await bench.told(events.LearnerStopped)
        bench.shell.on_learner(learners.Snapshot(1, P, 0, 3, 30, DELTA))
        await asyncio.sleep(1)
        assert bench.core.told.empty()

    play(tmp_path, scenario)


def test_what_the_learner_says_reaches_the_core_in_order(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.shell.on_learner(learners.Ready(1, "cpu", 0))
        bench.shell.on_learner(learners.Installed(P, 4, 0, 0))
        bench.shell.on_learner(learners.StepsDone(9, 4, 40, 2.0, 0.0, 1.0))
        await bench.told(events.LearnerStarted)
        assert await bench.told(events.FragmentInstalled) == events.FragmentInstalled(P, 4, 0)
        assert await bench.told(events.StepsDone) == events.StepsDone(4, 40, 0.5, 1.0)

    play(tmp_path, scenario)


def test_a_fragment_is_installed_at_the_version_that_is_held(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        history = make_history(2)
        hold(bench, 2, history)
        bench.want(actions.InstallFragment(P, 1))
        bench.shell.learner = bench.learner
        bench.want(actions.InstallFragment(P, 1))
        await asyncio.sleep(1)
        version, values = bench.learner.arrivals[P]
        assert version == 2 and values is history.states[2].anchor

    play(tmp_path, scenario)


# -------------------------------------------------------------------- records


FETCH = actions.FetchRecords(B, P, 0)


def test_records_and_snapshots_arrive(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        history = make_history(2)
        packed = tuple(record.pack() for record in history.records)
        bench.network.shelves[B] = Donor(RecordsPage(packed, ((0, GENESIS[P].digest),)))
        fetched = await bench.answer(FETCH, events.RecordsFetched)
        assert fetched.records == history.records
        assert fetched.snapshots == (events.SnapshotInfo(0, GENESIS[P].digest),)

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (RecordsPage((b"garbage",), ()), "not a merge record"),
        (RecordsPage((b"",) * 300, ()), "expected a page of merge records"),
        (RecordsPage((), ((0, "0" * 64),) * 9), "9 snapshots"),
        (None, "404"),
    ],
)
def test_records_that_are_none_are_answered(
    tmp_path: Path, page: RecordsPage | None, reason: str
) -> None:
    async def scenario(bench: Bench) -> None:
        bench.network.shelves[B] = Donor(page)
        failed = await bench.answer(FETCH, events.RecordsFailed)
        assert reason in failed.reason and len(failed.reason) <= 180

    play(tmp_path, scenario)


def test_a_silent_donor_of_records_is_given_up(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.network.hung.add(B)
        assert "silent" in (await bench.answer(FETCH, events.RecordsFailed)).reason

    play(tmp_path, scenario)


# -------------------------------------------------------------------- catching up


def catch_up(
    history: History, snapshot: int | None, records: tuple[Record, ...], *donors: PeerId
) -> actions.CatchUp:
    info = None
    if snapshot is not None:
        info = events.SnapshotInfo(snapshot, history.states[snapshot].digest)
    return actions.CatchUp(P, info, history.records[: snapshot or 0], records, donors)


def held_digest(bench: Bench) -> str | None:
    state = bench.holdings.replica.state(P)
    return state.digest if state else None


def test_a_joiner_loads_a_snapshot_and_applies_what_followed(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        history = make_history(4)
        bench.network.shelves[B] = Donor.of(history)
        bench.want(catch_up(history, 2, history.records[2:], B))
        for version in (2, 3, 4):
            reached = await bench.told(events.StateReached)
            assert reached.version == version
            assert reached.record == (history.records[version - 1] if version > 2 else None)
        assert held_digest(bench) == history.states[4].digest

    play(tmp_path, scenario)


def test_a_liar_among_the_donors_is_named_and_does_no_harm(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        history = make_history(1)
        hold(bench)
        bench.network.shelves[B] = Donor(merges={1: bytes(len(history.payloads[0]))})
        bench.network.shelves[C] = Donor.of(history)
        bench.want(catch_up(history, None, history.records, B, C))
        assert (await bench.told(events.WrongBytes)).peer == B
        assert (await bench.told(events.StateReached)).version == 1
        assert held_digest(bench) == history.states[1].digest

    play(tmp_path, scenario)


def test_the_state_of_another_version_is_not_held(tmp_path: Path) -> None:
    """In a run that gossips a donor's word alone says which digest is that of which version."""

    async def scenario(bench: Bench) -> None:
        history = make_history(3)
        donor = bench.network.shelves[B] = Donor.of(history)
        donor.states[2] = donor.states[3]
        named = events.SnapshotInfo(2, history.states[3].digest)
        bench.want(actions.CatchUp(P, named, (), (), (B,)))
        assert (await bench.told(events.WrongBytes)).peer == B
        failed = await bench.told(events.CatchUpFailed)
        assert "a state of v3; expected v2" in failed.reason
        assert held_digest(bench) is None

    play(tmp_path, scenario)


def test_only_liars_fail_the_catch_up(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        history = make_history(1)
        bench.network.shelves[B] = Donor(states={0: bytes(len(Donor.of(history).states[0]))})
        bench.want(catch_up(history, 0, history.records, B))
        assert (await bench.told(events.WrongBytes)).peer == B
        failed = await bench.told(events.CatchUpFailed)
        assert not failed.diverged and held_digest(bench) is None

    play(tmp_path, scenario)


def test_no_donor_fails_the_catch_up(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        history = make_history(2)
        hold(bench)
        donor = bench.network.shelves[B] = Donor.of(history)
        del donor.merges[2]
        bench.want(catch_up(history, None, history.records, B))
        assert (await bench.told(events.StateReached)).version == 1
        assert not (await bench.told(events.CatchUpFailed)).diverged
        assert held_digest(bench) == history.states[1].digest

    play(tmp_path, scenario)


def test_a_payload_that_cannot_be_so_large_is_not_fetched(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        history = make_history(1)
        hold(bench)
        bomb = replace(history.records[0], payload_bytes=1 << 39)
        failed = await bench.answer(catch_up(history, None, (bomb,), B), events.CatchUpFailed)
        assert "too large" in failed.reason

    play(tmp_path, scenario)


def test_a_state_that_comes_out_differently_is_a_divergence(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        history = make_history(1)
        hold(bench)
        bench.network.shelves[B] = Donor.of(history)
        other = replace(history.records[0], state_digest="0" * 64)
        failed = await bench.answer(catch_up(history, None, (other,), B), events.CatchUpFailed)
        assert failed.diverged
        assert held_digest(bench) == GENESIS[P].digest

    play(tmp_path, scenario)


# -------------------------------------------------------------------- memory that went wrong


def hold_rotten(bench: Bench, version: int = 0, history: History | None = None) -> None:
    sound = history.states[version] if history else GENESIS[P]
    held = make_state(P, version, sound.anchor.copy(), sound.momentum.copy())
    bench.holdings.replica.put(held)
    rot(held)


def test_no_contribution_is_made_from_a_damaged_state(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        hold_rotten(bench)
        bench.shell.learner = bench.learner
        bench.want(PREPARE)
        await asyncio.sleep(1)
        bench.shell.on_learner(learners.Snapshot(1, P, 0, 3, 30, GENESIS[P].anchor - DELTA))
        assert await bench.told(events.StateDamaged) == events.StateDamaged(P, 0)
        assert "damaged in memory" in (await bench.told(events.ContributionFailed)).reason

    play(tmp_path, scenario)


def test_no_merge_is_made_from_a_damaged_state(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        hold_rotten(bench)
        offer(bench, SAME)
        await bench.answer(actions.PullContribution(ROUND, B), events.ContributionPulled)
        bench.want(actions.MergeRound(ROUND, (Contributor(B, 100, 10),)))
        assert await bench.told(events.StateDamaged) == events.StateDamaged(P, 0)
        assert "damaged in memory" in (await bench.told(events.MergeFailed)).reason

    play(tmp_path, scenario)


def test_an_honest_peer_is_not_blamed_for_a_damaged_state(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        hold_rotten(bench)
        state = bench.holdings.replica.state(P)
        assert state
        state.anchor.setflags(write=True)
        state.anchor[0] = np.nan
        offer(bench, SAME)
        bench.want(actions.PullContribution(ROUND, B))
        await bench.told(events.StateDamaged)
        assert not (await bench.told(events.PullFailed)).hostile

    play(tmp_path, scenario)


def test_no_merge_is_applied_to_a_damaged_state(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        history = make_history(2)
        hold_rotten(bench, 1, history)
        bench.network.shelves[B] = Donor.of(history)
        bench.want(catch_up(history, None, history.records[1:], B))
        assert await bench.told(events.StateDamaged) == events.StateDamaged(P, 1)
        assert not (await bench.told(events.CatchUpFailed)).diverged

    play(tmp_path, scenario)


def test_our_own_disk_answers_and_heals(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        history = make_history(6)
        bench.network.shelves[B] = Donor.of(history)
        bench.want(catch_up(history, 0, history.records, B))
        for _ in range(7):
            await bench.told(events.StateReached)
        del bench.network.shelves[B]
        held = bench.holdings.replica.state(P)
        rot(held)
        bench.core.state.registers[P].chain = Chain(0, GENESIS[P].digest, list(history.records))
        fetched = await bench.answer(actions.FetchRecords(A, P, 0), events.RecordsFetched)
        assert fetched.records == history.records
        newest = fetched.snapshots[0]
        assert newest == events.SnapshotInfo(4, history.states[4].digest)
        bench.want(catch_up(history, 4, history.records[4:]))
        for version in (4, 5, 6):
            assert (await bench.told(events.StateReached)).version == version
        assert held_digest(bench) == history.states[6].digest
        healed = bench.holdings.replica.state(P)
        assert healed is not held and healed
        require_sound(healed)

    play(tmp_path, scenario)


# -------------------------------------------------------------------- a donor that fails half-way


class Fainting(Donor):
    """Gives so many chunks of states, then has nothing."""

    num_chunks = 0

    async def state(self, fragment: int, version: int, digest: str) -> bytes | None:
        self.num_chunks -= 1
        return self.states.get(version) if self.num_chunks >= 0 else None


@pytest.mark.parametrize("restart", [False, True])
def test_what_arrived_of_a_state_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    monkeypatch.setattr(fetch, "CHUNK_BYTES", 16)
    history = make_history(4)
    wanted = catch_up(history, 4, (), B)
    num_chunks = -(-len(pack_state(history.states[4])) // 16)

    async def begin(bench: Bench) -> None:
        donor = bench.network.shelves[B] = Fainting.of(history)
        assert isinstance(donor, Fainting)
        donor.num_chunks = 5
        failed = await bench.answer(wanted, events.CatchUpFailed)
        assert "bert has not got" in failed.reason
        if not restart:
            await finish(bench)

    async def finish(bench: Bench) -> None:
        before = bench.network.state_chunks[A]
        bench.network.shelves[B] = Donor(RecordsPage((), ()), states=Donor.of(history).states)
        fetched = await bench.answer(FETCH, events.RecordsFetched)
        assert fetched.begun == events.SnapshotInfo(4, history.states[4].digest)
        assert (await bench.answer(wanted, events.StateReached)).version == 4
        assert held_digest(bench) == history.states[4].digest
        assert bench.network.state_chunks[A] - before == num_chunks - 5
        fetched = await bench.answer(FETCH, events.RecordsFetched)
        assert fetched.begun is None

    play(tmp_path, begin)
    if restart:
        play(tmp_path, finish)


def test_wrong_chunks_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "CHUNK_BYTES", 16)

    async def scenario(bench: Bench) -> None:
        history = make_history(4)
        packed = pack_state(history.states[4])
        bench.network.shelves[B] = Donor(RecordsPage((), ()), states={4: packed[:-1] + b"?"})
        bench.want(catch_up(history, 4, (), B))
        await bench.told(events.WrongBytes)
        await bench.told(events.CatchUpFailed)
        assert (await bench.answer(FETCH, events.RecordsFetched)).begun is None
        bench.network.shelves[C] = Donor.of(history)
        reached = await bench.answer(catch_up(history, 4, (), C), events.StateReached)
        assert reached.version == 4

    play(tmp_path, scenario)


# -------------------------------------------------------------------- what the disk has


def test_nobody_is_told_of_a_merge_that_is_being_written(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        history, arrived = make_history(1), bench.count_messages(B)
        hold(bench)
        writing = threading.Event()
        before = asyncio.create_task(bench.holdings.disk.run(writing.wait))
        await asyncio.sleep(0)
        await bench.holdings.apply(history.records[0], history.payloads[0])
        bench.want(actions.Send(B, LEFT))
        page = asyncio.create_task(bench.network.shelves[A].records(P, 0))
        for _ in range(20):
            await asyncio.sleep(0)
        assert arrived == [] and not page.done()
        writing.set()
        await before
        await page
        await asyncio.sleep(0.1)
        assert arrived == [A]

    play(tmp_path, scenario)


def test_a_disk_that_takes_too_long_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_queue, "DISK_PATIENCE_S", 0)

    async def scenario(bench: Bench) -> None:
        history = make_history(1)
        hold(bench)
        writing = threading.Event()
        before = asyncio.create_task(bench.holdings.disk.run(writing.wait))
        await asyncio.sleep(0)
        await bench.holdings.apply(history.records[0], history.payloads[0])
        await bench.holdings.written()
        assert "the disk is too slow" in (bench.holdings.disk.error or "")
        writing.set()
        await before
        await bench.holdings.disk.run(lambda: None)
        await asyncio.sleep(0.1)
        assert bench.holdings.disk.error is None

    play(tmp_path, scenario)


# -------------------------------------------------------------------- what nobody expected


def test_an_unexpected_exception_ends_the_node_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(page: RecordsPage) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr("p2pdiloco_daemon.node.unpack_page", broken)

    async def scenario(bench: Bench) -> None:
        bench.network.shelves[B] = Donor(RecordsPage((), ()))
        bench.want(FETCH)
        await asyncio.sleep(60)

    with pytest.raises(ExceptionGroup) as caught:
        play(tmp_path, scenario)
    bug = caught.value.exceptions[0]
    assert isinstance(bug, ZeroDivisionError)
    assert "_fetch_records" in "".join(traceback.format_exception(bug))


def test_notes_are_kept_for_the_page(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.want(actions.Note("something happened"))
        await asyncio.sleep(1)
        assert [text for _, text in bench.shell.notes] == ["something happened"]

    play(tmp_path, scenario)

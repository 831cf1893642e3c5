"""From a node's directory to a checkpoint that plain transformers loads, and text from it."""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from p2pdiloco.errors import StoreError, UserError
from p2pdiloco.learn.models import build_model
from p2pdiloco.optim.fragments import fragments_of
from p2pdiloco.protocol.lineage import Contributor, Record
from p2pdiloco.protocol.naming import PeerId
from p2pdiloco.signed_spec import SignedSpec, bytes_to_sign, canonical_bytes
from p2pdiloco.spec import RunSpec
from p2pdiloco_bootstrap.identity import Identity
from p2pdiloco_bootstrap.invite import make_invite
from p2pdiloco_daemon.export import (
    export_checkpoint,
    newest_states,
    sample_checkpoint,
    write_checkpoint,
)
from p2pdiloco_daemon.genesis import genesis_path, make_genesis
from p2pdiloco_daemon.storage.place import open_place
from p2pdiloco_daemon.storage.replica import FragmentState, Replica, payload_digest, unpack_state
from p2pdiloco_daemon.storage.store import Store

PROMPT = "In the beginning; Grüße, 日本\n"
MERGED = 2


@dataclass(frozen=True)
class Node:
    """A directory as a node leaves it: genesis of all fragments, one merge of fragment 2 after."""

    directory: Path
    spec: RunSpec
    states: tuple[FragmentState, ...]
    record: Record
    payload: bytes

    @property
    def anchors(self) -> list[np.ndarray]:
        return [state.anchor for state in self.states]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    draft, directory = RunSpec(name="test", seed=7), tmp_path_factory.mktemp("node")
    owner = Identity.generate()
    spec = draft.with_genesis(make_genesis(draft, tmp_path_factory.getbasetemp()))
    spec_bytes = canonical_bytes(spec)
    signed = SignedSpec(spec_bytes, owner.public_key, owner.sign(bytes_to_sign(spec_bytes)))
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{owner.peer_id}"
    invite = make_invite(owner, signed.run_id, [address], time.time() + 60)
    open_place(directory, invite).keep_spec(signed)
    states = genesis_states(spec, tmp_path_factory.getbasetemp())
    payload, merged = merge_once(spec, states[MERGED])
    record = record_of(signed.run_id, payload, merged, states[MERGED])
    with Store(directory, len(states)) as store:
        for state in states:
            store.save_snapshot(state, None)
        store.save_merge(MERGED, 1, payload, record.pack())
    return Node(directory, spec, (*states[:MERGED], merged, *states[MERGED + 1 :]), record, payload)


def genesis_states(spec: RunSpec, directory: Path) -> list[FragmentState]:
    assert spec.genesis
    return [
        unpack_state(genesis_path(directory, p.index).read_bytes(), p.index, p.size, digest)
        for p, digest in zip(fragments_of(spec), spec.genesis.state_digests, strict=True)
    ]


def merge_once(spec: RunSpec, state: FragmentState) -> tuple[bytes, FragmentState]:
    replica = Replica(
        fragments_of(spec),
        outer_learning_rate=spec.outer.learning_rate,
        outer_momentum=spec.outer.momentum,
        wire=spec.sync.wire,
        merge_rule=spec.sync.merge,
    )
    replica.put(state)
    noise = np.random.default_rng(0).normal(0, 0.01, state.anchor.size).astype(np.float32)
    payload = replica.encode_outer_gradient(state.fragment, 0, state.anchor + noise)
    return payload, replica.apply(state.fragment, 1, payload)


def record_of(run_id: str, payload: bytes, after: FragmentState, before: FragmentState) -> Record:
    peer = PeerId(Identity.generate().peer_id)
    return Record(
        run_id=run_id,
        fragment=after.fragment,
        version=1,
        parent=before.digest,
        payload_digest=payload_digest(payload),
        payload_bytes=len(payload),
        state_digest=after.digest,
        contributors=(Contributor(peer, 100, 1),),
        refused=(),
        term=0,
        attempt=0,
        tokens_total=100,
        reason="all have answered",
        synchronizer=peer,
    )


@pytest.fixture(scope="module")
def exported(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written while the daemon of the node has its directory."""
    directory = tmp_path_factory.mktemp("export") / "model"
    with Store(node.directory, len(node.states)):
        export_checkpoint(node.directory, directory)
    return directory


def test_plain_transformers_loads_the_same_model(node: Node, exported: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported).eval()
    ours = build_model(node.spec.model, seed=0, sequence_length=128).eval()
    tensors = dict(ours.named_parameters())
    for fragment, anchor in zip(fragments_of(node.spec), node.anchors, strict=True):
        for slot in fragment.slots:
            tensors[slot.name].data = torch.tensor(anchor[slot.span]).view(slot.shape)
    tokens = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, expected = model(tokens).logits, ours(tokens).logits
    assert torch.equal(logits, expected)
    assert model.dtype == torch.float32


def test_the_byte_tokenizer_gives_the_bytes(exported: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported)
    every_character = "".join(map(chr, range(1, 0x500))) + PROMPT + " the  end ."
    for text in (PROMPT, every_character, "  a b", "\n\n\t"):
        ids = tokenizer(text)["input_ids"]
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert (len(tokenizer), tokenizer.model_max_length) == (256, 128)


def test_it_generates_with_plain_transformers(exported: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert tokens.shape == (1, len(PROMPT.encode()) + 4)


def test_the_newest_anchors_have_the_merges_after_the_snapshots(node: Node) -> None:
    states = newest_states(node.spec, fragments_of(node.spec), node.directory)
    anchors = [state.anchor for state in states]
    for anchor, expected in zip(anchors, node.anchors, strict=True):
        np.testing.assert_array_equal(anchor, expected)


def test_a_merge_that_leads_elsewhere_is_told(node: Node, tmp_path: Path) -> None:
    damaged = shutil.copytree(node.directory, tmp_path / "damaged")
    wrong = replace(node.record, state_digest="0" * 64)
    with Store(damaged, len(node.states)) as store:
        store.save_merge(MERGED, 1, node.payload, wrong.pack())
    with pytest.raises(
        StoreError, match=r"merge 1 of fragment 2 on disk gives .* expected 00000000"
    ):
        newest_states(node.spec, fragments_of(node.spec), damaged)


def test_samples_follow_from_the_seed_and_go_beyond_the_trained_length(exported: Path) -> None:
    first = sample_checkpoint(exported, PROMPT, num_tokens=200, seed=1)
    assert first == sample_checkpoint(exported, PROMPT, num_tokens=200, seed=1)
    assert first != sample_checkpoint(exported, PROMPT, num_tokens=200, seed=2)
    assert len(first) > 0


def test_a_command_leaves_no_temporary_file(exported: Path, tmp_path: Path) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    kept = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    subprocess.run(
        [sys.executable, "-m", "p2pdiloco_daemon.cli.main", "sample", str(exported)],
        env={**kept, "TMPDIR": str(place)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    assert not list(place.iterdir())


def test_weights_that_are_cut_short_are_told(exported: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(exported, tmp_path / "damaged")
    os.truncate(damaged / "model.safetensors", 1000)
    with pytest.raises(UserError, match=r"damaged cannot be loaded: .*; export it again"):
        sample_checkpoint(damaged, PROMPT, num_tokens=1, seed=0)


def test_a_place_that_is_taken_is_left_alone(node: Node, tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        export_checkpoint(node.directory, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["diary.txt"]


def test_an_empty_directory_is_filled_and_a_broken_attempt_forgotten(
    node: Node, tmp_path: Path
) -> None:
    target, unfinished = tmp_path / "model", tmp_path / "model.tmp"
    target.mkdir()
    unfinished.mkdir()
    (unfinished / "half").write_bytes(b"x")
    write_checkpoint(node.spec, fragments_of(node.spec), node.anchors, target)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not (target / "half").exists()


def test_what_is_missing_is_told(node: Node, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has not joined a run yet"):
        export_checkpoint(tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match="fragment 0 of the model yet"):
        newest_states(node.spec, fragments_of(node.spec), tmp_path)
    with pytest.raises(UserError, match="is no exported model"):
        sample_checkpoint(tmp_path, "", 1, 0)

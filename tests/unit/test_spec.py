"""The run spec: what is accepted, what is refused and in which words."""

import hashlib
import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from p2pdiloco.errors import PeerError, UserError
from p2pdiloco.protocol.wire import PROTOCOL_VERSION
from p2pdiloco.signed_spec import SignedSpec, bytes_to_sign, canonical_bytes, spec_from_bytes
from p2pdiloco.spec import GenesisSpec, RlSpec, RunSpec, SyncSpec, TensorLayout
from p2pdiloco.spec_file import differences, parse_spec, read_spec_file

OWNER = "ab" * 32

TENSORS = (TensorLayout(name="weight", shape=(10, 100)),)


def sign(owner: str, data: bytes) -> bytes:
    return hashlib.sha256(owner.encode() + data).digest()


def verify(owner: str, data: bytes, signature: bytes) -> bool:
    return sign(owner, data) == signature


def complete_spec(name: str = "kjv") -> RunSpec:
    draft = RunSpec(name=name)
    digests = tuple(f"{p:064x}" for p in range(draft.sync.num_fragments))
    return draft.with_genesis(genesis(digests))


def genesis(digests: tuple[str, ...], num_parameters: int = 12) -> GenesisSpec:
    tensors = (TensorLayout(name="a", shape=(2, 3)), TensorLayout(name="b", shape=(6,)))
    return GenesisSpec(num_parameters=num_parameters, tensors=tensors, state_digests=digests)


def signed_spec(spec: RunSpec) -> SignedSpec:
    spec_bytes = canonical_bytes(spec)
    return SignedSpec(spec_bytes, OWNER, sign(OWNER, bytes_to_sign(spec_bytes)))


def refusal(text: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_spec(text, "run.toml")
    return str(caught.value)


def test_diloco_merges_the_whole_model_at_once() -> None:
    assert SyncSpec(strategy="diloco", num_fragments=1).strategy == "diloco"
    with pytest.raises(ValidationError, match="num_fragments must be 1 for diloco"):
        SyncSpec(strategy="diloco")


def test_a_factored_run_names_its_first_mix_alone() -> None:
    assert SyncSpec(strategy="factored").gossips and SyncSpec(strategy="gossip").gossips
    assert not SyncSpec().gossips
    with pytest.raises(ValidationError, match="mix must name one mix for factored"):
        SyncSpec(strategy="factored", mix="GlobalM1LocalM2")


def test_only_quorum_can_be_paced() -> None:
    with pytest.raises(ValidationError, match="pacing must be fixed for gossip"):
        SyncSpec(strategy="gossip", pacing="calibrated", slack_steps=4)


def test_a_name_is_enough() -> None:
    spec = parse_spec('name = "kjv"', "run.toml")
    assert spec.model.preset == "tiny"
    assert (spec.sync.inner_steps, spec.sync.num_fragments) == (12, 6)


def test_an_empty_rl_table_is_enough() -> None:
    spec = parse_spec('name = "a"\n[sync]\nnum_fragments = 1\n[rl]', "run.toml")
    assert spec.rl == RlSpec()
    assert parse_spec('name = "a"', "run.toml").rl is None


def test_lists_become_tuples() -> None:
    spec = parse_spec('name = "a"\n[inner]\nbetas = [0.8, 0.9]', "run.toml")
    assert spec.inner.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = ", "run.toml: not valid TOML: Invalid value (at end of document)"),
        ("", "run.toml: name: missing; add it"),
        (
            'name = "Big Run"',
            "run.toml: name: expected match pattern '^[a-z0-9][a-z0-9-]{0,62}$', got \"Big Run\"",
        ),
        (
            'name = "a"\n[sync]\ninner_steps = -5',
            "run.toml: sync.inner_steps: expected greater than or equal to 1, got -5",
        ),
        (
            'name = "a"\n[sync]\ninner_steps = "24"',
            'run.toml: sync.inner_steps: expected a valid integer, got "24"',
        ),
        (
            'name = "a"\n[sync]\ninner_step = 5',
            "run.toml: sync.inner_step: unknown key; did you mean inner_steps?",
        ),
        (
            'name = "a"\n[sync]\nbatch_size = 5',
            "run.toml: sync.batch_size: unknown key; did you mean inner.batch_size?",
        ),
        (
            'name = "a"\n[outer]\nxyzzy = 5',
            "run.toml: outer.xyzzy: unknown key; known here: learning_rate, momentum",
        ),
        (
            'name = "a"\n[sync]\nwire = "int2"',
            "run.toml: sync.wire: expected 'float32', 'bf16', 'int8' or 'int4', got \"int2\"",
        ),
        (
            'name = "a"\n[sync]\ngrace_factor = 1.0',
            "run.toml: sync.grace_factor: expected less than 1, got 1.0",
        ),
        (
            'name = "a"\n[inner]\nlearning_rate = nan',
            "run.toml: inner.learning_rate: expected a finite number, got NaN",
        ),
        (
            'name = "a"\n[sync]\nquorum = 0',
            "run.toml: sync.quorum: expected greater than or equal to 1, got 0",
        ),
        (
            'name = "a"\n[sync]\noverlap_steps = 12',
            "run.toml: sync: overlap_steps must be smaller than inner_steps = 12, got 12",
        ),
        (
            'name = "a"\n[sync]\npacing = "calibrated"',
            "run.toml: sync: slack_steps must be above 0 for pacing calibrated, got 0",
        ),
        (
            'name = "a"\n[sync]\nslack_steps = 3',
            "run.toml: sync: slack_steps must be 0 for pacing fixed, got 3",
        ),
        (
            'name = "a"\n[sync]\npacing = "calibrated"\nslack_steps = 12',
            "run.toml: sync: slack_steps must be smaller than inner_steps = 12, got 12",
        ),
        (
            'name = "a"\n[sync]\nquorum = 65',
            "run.toml: sync.quorum must be at most limits.max_contributors = 64, got 65",
        ),
        (
            'name = "a"\n[rl]',
            (
                "run.toml: rl needs sync.num_fragments 1, because a step is rolled out with one "
                "version of the whole model, got 6"
            ),
        ),
        (
            'name = "a"\n[sync]\nstrategy = "gossip"\n[rl]',
            "run.toml: rl needs sync.strategy quorum, got gossip",
        ),
        (
            'name = "a"\n[sync]\nnum_fragments = 1\ngossip_below_quorum = true\n[rl]',
            "run.toml: rl needs sync.pacing fixed and no sync.gossip_below_quorum",
        ),
        (
            'name = "a"\n[sync]\nnum_fragments = 1\n[rl]\nanswer_tokens_max = 128',
            (
                "run.toml: rl.answer_tokens_max must be smaller than data.sequence_length = 128, "
                "which a whole trajectory may have, got 128"
            ),
        ),
        (
            'name = "a"\n[data]\nsequence_length = 131072\n[sync]\nnum_fragments = 1\n[rl]',
            (
                "run.toml: rl needs data.sequence_length, of a whole trajectory, to be at most "
                "65536, got 131072"
            ),
        ),
        (
            'name = "a"\n[rl]\nnum_groups = 1024',
            (
                "run.toml: rl: a step has at most 4096 trajectories, got num_groups 1024 * "
                "group_size 16"
            ),
        ),
        (
            'name = "a"\n[rl]\ntemperature = 1e-44',
            "run.toml: rl.temperature: expected greater than or equal to 0.001, got 1e-44",
        ),
        (
            'name = "a"\n[rl]\nenvironment = "chess"',
            (
                "run.toml: rl.environment: expected match pattern "
                "'^(guess|(sums|calculator)(:[1-9][0-9]{0,7})?|reasoning-gym:[a-z0-9_]{1,64})$', "
                'got "chess"'
            ),
        ),
        (
            'name = "a"\n[model]\npreset = "tiny"\ncheckpoint = "x"',
            (
                "run.toml: model: set exactly one of preset, config, checkpoint; "
                "got preset and checkpoint"
            ),
        ),
        (
            'name = "a"\n[genesis]\nnum_parameters = 5',
            "run.toml: genesis: written by `p2pdiloco bootstrap`, not by hand; remove the table",
        ),
        (
            'name = "a"\nprotocol_version = 2',
            (
                "run.toml: protocol_version: the run needs version 2, this p2pdiloco speaks "
                "version 1; update p2pdiloco on this machine"
            ),
        ),
    ],
)
def test_a_mistake_is_named(text: str, words: str) -> None:
    assert refusal(text) == words


def test_more_fragments_than_steps_are_refused() -> None:
    words = refusal('name = "a"\n[sync]\nnum_fragments = 25')
    assert words.startswith("run.toml: sync: num_fragments must be at most inner_steps = 12")


def test_every_mistake_is_listed() -> None:
    lines = refusal('name = "a"\n[sync]\nquorum = 0\n[outer]\nmomentum = 1.0').splitlines()
    assert [line.split(": ")[1] for line in lines] == ["outer.momentum", "sync.quorum"]


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file; `p2pdiloco new .*` writes a commented one"):
        read_spec_file(tmp_path / "run.toml")


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read as UTF-8 text"):
        read_spec_file(path)


def test_a_spec_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        setattr(RunSpec(name="a"), "name", "b")  # noqa: B010


def test_canonical_bytes_come_back() -> None:
    spec = complete_spec()
    assert spec_from_bytes(canonical_bytes(spec)) == spec


def test_the_run_id_depends_on_spec_and_owner() -> None:
    spec_bytes = canonical_bytes(complete_spec())
    ids = {
        SignedSpec(spec_bytes, OWNER, b"").run_id,
        SignedSpec(spec_bytes, "cd" * 32, b"").run_id,
        SignedSpec(canonical_bytes(complete_spec("b")), OWNER, b"").run_id,
    }
    assert len(ids) == 3
    assert all(len(run_id) == 32 for run_id in ids)


def test_a_signed_spec_comes_back() -> None:
    signed = signed_spec(complete_spec())
    assert SignedSpec.unpack(signed.pack(), verify, signed.run_id) == signed
    assert signed.spec == complete_spec()


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (b"\xc1", "expected a signed spec in msgpack"),
        (b"\x93\x01\x02\x03", "fields spec, owner and signature"),
        (b"\x00" * 600_000, "at most 524288 bytes, got 600000"),
    ],
)
def test_garbage_is_not_a_signed_spec(buffer: bytes, words: str) -> None:
    with pytest.raises(PeerError, match=words):
        SignedSpec.unpack(buffer, verify)


def test_an_owner_that_is_no_key_is_refused() -> None:
    with pytest.raises(PeerError, match="64 hex digits"):
        SignedSpec.unpack(SignedSpec(b"{}", "owner", b"").pack(), verify)


def test_another_signature_is_refused() -> None:
    signed = signed_spec(complete_spec())
    forged = SignedSpec(signed.spec_bytes, OWNER, b"forged")
    with pytest.raises(PeerError, match="not signed by its owner"):
        SignedSpec.unpack(forged.pack(), verify)


def test_the_spec_of_another_run_is_refused() -> None:
    ours, other = signed_spec(complete_spec()), signed_spec(complete_spec("b"))
    with pytest.raises(PeerError, match=f"expected run {ours.run_id}, got run {other.run_id}"):
        SignedSpec.unpack(other.pack(), verify, ours.run_id)


def test_a_draft_is_not_a_run() -> None:
    with pytest.raises(PeerError, match="a draft, not a run"):
        spec_from_bytes(canonical_bytes(RunSpec(name="a")))


def test_a_spec_in_another_form_is_refused() -> None:
    with pytest.raises(PeerError, match="not in canonical form"):
        spec_from_bytes(canonical_bytes(complete_spec()) + b" ")


def test_a_spec_of_a_newer_protocol_is_refused_before_its_unknown_keys() -> None:
    newer = f'{{"protocol_version":{PROTOCOL_VERSION + 1},"unheard_of":1}}'
    with pytest.raises(PeerError, match="update p2pdiloco on this machine"):
        spec_from_bytes(newer.encode())


@pytest.mark.parametrize("spec_bytes", [b"", b"[]", b"7", b"\xff", b"[" * 100_000, b"{}"])
def test_garbage_is_not_a_spec(spec_bytes: bytes) -> None:
    with pytest.raises(PeerError):
        spec_from_bytes(spec_bytes)


def test_an_unknown_key_in_a_list_of_tables_is_named() -> None:
    values = json.loads(canonical_bytes(complete_spec()))
    values["genesis"]["tensors"][1]["shade"] = 1
    with pytest.raises(PeerError, match=r"genesis\.tensors\.1\.shade: unknown key; did you mean"):
        spec_from_bytes(json.dumps(values).encode())


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_a_number_of_a_model_s_configuration_is_finite(number: float) -> None:
    values = json.loads(canonical_bytes(complete_spec()))
    values["genesis"]["config"] = {"model_type": "llama", "rope": [{"theta": number}]}
    with pytest.raises(PeerError, match=r"genesis\.config: numbers must be finite"):
        spec_from_bytes(json.dumps(values).encode())
    draft = f'name = "a"\n[model]\nconfig = {{ model_type = "llama", eps = {number} }}'
    assert refusal(draft) == "run.toml: model.config: numbers must be finite, got NaN or infinity"


def test_genesis_must_name_every_fragment() -> None:
    with pytest.raises(ValueError, match="must name 6 fragments, got 1"):
        RunSpec(name="a").with_genesis(genesis(("0" * 64,)))


def test_genesis_must_count_its_parameters() -> None:
    with pytest.raises(ValueError, match="num_parameters must be 12, got 13"):
        genesis(("0" * 64,), num_parameters=13)


def test_differences_name_each_key() -> None:
    ours, theirs = RunSpec(name="a"), RunSpec(name="b", seed=7)
    assert differences(ours, theirs) == ['name: ours "a", theirs "b"', "seed: ours 0, theirs 7"]
    assert differences(ours, ours) == []


def test_a_spec_of_another_version_is_told_from_a_damaged_one() -> None:
    values = json.loads(canonical_bytes(complete_spec()))
    del values["sync"]["pacing"], values["seed"]
    with pytest.raises(PeerError, match=r"lacks seed, sync\.pacing: it was written by ano"):
        spec_from_bytes(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())

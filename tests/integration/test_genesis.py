"""From a draft to a run: the first weights are made once, in a child process, and kept."""

import shutil
from pathlib import Path

import pytest
from pydantic import JsonValue

from p2pdiloco.errors import UserError
from p2pdiloco.learn.models import build_model, parameter_shapes
from p2pdiloco.optim.fragments import fragments_of
from p2pdiloco.signed_spec import SignedSpec
from p2pdiloco.spec import DataSpec, ModelSpec, RlSpec, RunSpec, SyncSpec
from p2pdiloco_bootstrap.identity import Identity, verify_with_key
from p2pdiloco_daemon.genesis import SIGNED_SPEC_FILE, genesis_path, make_genesis, prepare_run
from p2pdiloco_daemon.storage.replica import unpack_state

pytestmark = pytest.mark.loopback

DRAFT = RunSpec(name="a")


def test_a_draft_becomes_a_run_once(tmp_path: Path) -> None:
    owner = Identity.generate()
    signed = prepare_run(DRAFT, owner, tmp_path)
    kept = (tmp_path / SIGNED_SPEC_FILE).read_bytes()
    assert SignedSpec.unpack(kept, verify_with_key) == signed

    genesis = signed.spec.genesis
    assert genesis is not None
    for fragment, digest in zip(fragments_of(signed.spec), genesis.state_digests, strict=True):
        packed = bytearray(genesis_path(tmp_path, fragment.index).read_bytes())
        state = unpack_state(packed, fragment.index, fragment.size, digest)
        assert not state.momentum.any()

    assert prepare_run(DRAFT, owner, tmp_path) == signed
    with pytest.raises(UserError, match=r"(?s)has started cannot be changed.*seed: the run 0"):
        prepare_run(RunSpec(name="a", seed=3), owner, tmp_path)
    with pytest.raises(UserError, match="owner: the run"):
        prepare_run(DRAFT, Identity.generate(), tmp_path)


def test_only_the_owner_needs_the_checkpoint_that_a_run_starts_from(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    build_model(ModelSpec(preset="tiny"), 3, 128).save_pretrained(checkpoint)  # type: ignore[operator]
    draft = RunSpec(name="a", model=ModelSpec(checkpoint=str(checkpoint)))
    signed = prepare_run(draft, Identity.generate(), tmp_path / "run")
    shutil.rmtree(checkpoint)
    spec = signed.spec
    built = build_model(spec.architecture, spec.seed, spec.data.sequence_length)
    layout = {tensor.name: tensor.shape for tensor in spec.genesis.tensors} if spec.genesis else {}
    assert parameter_shapes(built) == layout


def test_a_run_whose_tasks_leave_no_room_for_an_answer_is_told(tmp_path: Path) -> None:
    draft = RunSpec(
        name="a",
        data=DataSpec(sequence_length=14),
        sync=SyncSpec(num_fragments=1),
        rl=RlSpec(),
    )
    with pytest.raises(UserError, match="sequence_length 14, of a whole trajectory, leaves no"):
        prepare_run(draft, Identity.generate(), tmp_path)
    assert not (tmp_path / SIGNED_SPEC_FILE).exists()
    roomier = draft.model_copy(update={"data": DataSpec(sequence_length=15)})
    assert prepare_run(roomier, Identity.generate(), tmp_path).spec.rl == RlSpec()


def test_a_model_that_cannot_be_built_is_told(tmp_path: Path) -> None:
    draft = RunSpec(name="a", model=ModelSpec(config={"model_type": "no-such-model"}))
    with pytest.raises(UserError, match="no-such-model"):
        prepare_run(draft, Identity.generate(), tmp_path)
    assert not (tmp_path / SIGNED_SPEC_FILE).exists()


def test_a_model_beyond_the_memory_is_told(tmp_path: Path) -> None:
    config: dict[str, JsonValue] = {
        "model_type": "llama",
        "hidden_size": 1 << 40,
        "num_attention_heads": 4,
    }
    draft = RunSpec(name="a", model=ModelSpec(config=config))
    with pytest.raises(UserError, match="not enough memory"):
        make_genesis(draft, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_with_more_tokens_than_the_model_is_told(tmp_path: Path) -> None:
    config: dict[str, JsonValue] = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    draft = RunSpec(name="a", model=ModelSpec(config=config))
    with pytest.raises(
        UserError, match=r"'bytes' has 256 tokens, .* for 100; .* vocab_size of 256"
    ):
        make_genesis(draft, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_damaged_run_file_is_told(tmp_path: Path) -> None:
    (tmp_path / SIGNED_SPEC_FILE).write_bytes(b"\x00garbage")
    with pytest.raises(UserError, match=r"run\.spec: .*restore it from a backup"):
        prepare_run(DRAFT, Identity.generate(), tmp_path)

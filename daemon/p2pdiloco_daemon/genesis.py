"""How a draft becomes a run: genesis weights, their digests in the spec, the owner's signature.

The weights are made once, by the owner, in a child process that ends when they are on disk: torch's
random numbers differ between instruction sets, so they are data that everybody fetches, not a seed.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from p2pdiloco.errors import PeerError, UserError
from p2pdiloco.signed_spec import SignedSpec, bytes_to_sign, canonical_bytes
from p2pdiloco.spec import GenesisSpec, RunSpec, TensorLayout
from p2pdiloco.spec_file import differences
from p2pdiloco_bootstrap.identity import Identity, verify_with_key
from p2pdiloco_daemon.children.bound import bound_command

if TYPE_CHECKING:
    import torch

SIGNED_SPEC_FILE = "run.spec"

_OUT_OF_MEMORY = (
    "there is not enough memory for this model; describe a smaller one, close other programs, or "
    "start the run on a larger machine"
)


def prepare_run(draft: RunSpec, owner: Identity, directory: Path) -> SignedSpec:
    """The run of this draft in `directory`: the one that is there, or a new one."""
    existing = read_signed_spec(directory)
    if existing is not None:
        _require_same_run(existing, draft, owner, directory)
        return existing
    directory.mkdir(parents=True, exist_ok=True)
    spec_bytes = canonical_bytes(draft.with_genesis(_genesis_in_child(draft, directory)))
    signed = SignedSpec(spec_bytes, owner.public_key, owner.sign(bytes_to_sign(spec_bytes)))
    _write(directory / SIGNED_SPEC_FILE, signed.pack())
    return signed


def genesis_path(directory: Path, fragment: int) -> Path:
    """The file with version 0 of a fragment, as donors serve it."""
    return directory / "genesis" / f"{fragment}.state"


def make_genesis(draft: RunSpec, directory: Path) -> GenesisSpec:
    """Builds the model of the draft and writes version 0 of each fragment. Imports torch."""
    import numpy as np

    from p2pdiloco.learn.models import (
        build_model,
        config_table,
        embedding_names,
        parameter_shapes,
    )
    from p2pdiloco.optim.fragments import plan_fragments
    from p2pdiloco_daemon.storage.replica import genesis, pack_state

    try:
        model = build_model(draft.model, draft.seed, draft.data.sequence_length)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
            raise  # torch has no type of its own for the memory of the CPU
        raise UserError(f"the first weights cannot be made: {_OUT_OF_MEMORY}") from error
    _require_room_for_tokens(draft, model)
    if draft.rl is not None:
        _require_playable(draft)
    shapes, embeddings = parameter_shapes(model), embedding_names(model)
    fragments = plan_fragments(shapes, draft.sync.num_fragments, embeddings)
    parameters = {name: value.detach().numpy() for name, value in model.named_parameters()}
    digests = []
    for fragment in fragments:
        values = [parameters[slot.name].reshape(-1) for slot in fragment.slots]
        state = genesis(fragment.index, np.concatenate(values))
        _write(genesis_path(directory, fragment.index), pack_state(state))
        digests.append(state.digest)
    size = sum(fragment.size for fragment in fragments)
    tensors = tuple(
        TensorLayout(name=name, shape=shape, is_embedding=name in embeddings)
        for name, shape in shapes.items()
    )
    return GenesisSpec(
        num_parameters=size,
        tensors=tensors,
        config=config_table(model) if draft.model.checkpoint else None,
        state_digests=tuple(digests),
    )


def _require_room_for_tokens(draft: RunSpec, model: "torch.nn.Module") -> None:
    """UserError if the tokenizer has tokens that the model has no embedding for: every learner
    would end at the first of them.
    """
    from p2pdiloco.learn.text import open_tokenizer

    num_tokens = open_tokenizer(draft.data).vocabulary_size
    num_rows = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if num_tokens > num_rows:
        raise UserError(
            f"data.tokenizer {draft.data.tokenizer!r} has {num_tokens} tokens, the model has "
            f"embeddings for {num_rows}; give model.config a vocab_size of {num_tokens}, or take "
            "another tokenizer"
        )


def _require_playable(draft: RunSpec) -> None:
    """UserError if no step of the run could bring anything to learn from, or nobody could play it:
    the nodes would try for ever.
    """
    from p2pdiloco.rl.rules import rulebook_of, step_of

    prompts = step_of(rulebook_of(draft, "genesis", 0)).prompt_tokens
    if min(prompts) >= draft.data.sequence_length:
        raise UserError(
            f"data.sequence_length {draft.data.sequence_length}, of a whole trajectory, leaves no "
            "room for an answer after the prompt of any task; give it more"
        )


def _genesis_in_child(draft: RunSpec, directory: Path) -> GenesisSpec:
    child = subprocess.run(
        bound_command("p2pdiloco_daemon.genesis", str(directory)),
        input=draft.model_dump_json().encode(),
        capture_output=True,
        check=False,
    )
    complaint = child.stderr.decode(errors="replace").strip()
    if child.returncode == 2 and child.stdout:
        raise UserError(child.stdout.decode(errors="replace"))
    if child.returncode == -signal.SIGKILL:
        raise UserError(f"making the first weights was killed; {_OUT_OF_MEMORY}")
    if child.returncode != 0:
        raise RuntimeError(f"making the genesis weights failed ({child.returncode}):\n{complaint}")
    return GenesisSpec.model_validate_json(child.stdout)


def read_signed_spec(directory: Path) -> SignedSpec | None:
    """The run in a bootstrap peer's directory, verified; None if there is none yet."""
    path = directory / SIGNED_SPEC_FILE
    try:
        return SignedSpec.unpack(path.read_bytes(), verify_with_key)
    except FileNotFoundError:
        return None
    except PeerError as error:
        raise UserError(
            f"{path}: {error}; restore it from a backup, or start a new run in another directory"
        ) from error


def _require_same_run(existing: SignedSpec, draft: RunSpec, owner: Identity, place: Path) -> None:
    names = ("the run", "the file")
    problems = differences(existing.spec, draft.with_genesis(_genesis_of(existing)), names)
    if existing.owner != owner.public_key:
        problems.append(f"owner: the run {existing.owner}, the key file {owner.public_key}")
    if problems:
        raise UserError(
            f"{place} holds the run {existing.run_id}, and a run that has started cannot be "
            "changed; undo the change, or start a new run with another --dir:\n  "
            + "\n  ".join(problems)
        )


def _genesis_of(signed: SignedSpec) -> GenesisSpec:
    genesis = signed.spec.genesis
    assert genesis is not None, "a verified spec is complete"
    return genesis


def _write(path: Path, content: bytes) -> None:
    """Atomically: a half-written file never has the final name."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".tmp")
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror}; make room, or choose another --dir"
        ) from error


def _main() -> int:
    """The child: a draft as JSON on stdin, the GenesisSpec as JSON on stdout, or with exit code 2
    what is wrong with the draft. To stderr transformers writes, too."""
    try:
        draft = RunSpec.model_validate_json(sys.stdin.buffer.read())
        genesis = make_genesis(draft, Path(sys.argv[1]))
    except UserError as error:
        sys.stdout.write(str(error))
        return 2
    sys.stdout.write(genesis.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(_main())

"""The run's model as an ordinary Hugging Face checkpoint, and text from such a checkpoint.

What is written loads with plain `transformers`: safetensors weights, config and tokenizer; a run on
bytes gets a byte tokenizer in the format of the `tokenizers` library, whose ids are the bytes. The
tokenizer's `model_max_length` is the trained length.

Imports torch and takes seconds: for a process of its own, not for the daemon's loop.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from p2pdiloco.errors import P2PDilocoError, StoreError, UserError
from p2pdiloco.learn.evaluate import sample_text
from p2pdiloco.learn.models import build_model
from p2pdiloco.learn.text import HubTokenizer
from p2pdiloco.optim.fragments import Fragment, fragments_of
from p2pdiloco.protocol.lineage import unpack_record
from p2pdiloco.spec import DataSpec, RunSpec
from p2pdiloco_daemon.storage.files import require_free_directory
from p2pdiloco_daemon.storage.place import open_place
from p2pdiloco_daemon.storage.replica import FragmentState, Replica, Vector
from p2pdiloco_daemon.storage.store import Store


def export_checkpoint(node_directory: Path, directory: Path) -> None:
    """Writes the newest anchors in a node's directory to `directory`; the node may be running.

    UserError if the node has nothing yet, or `directory` exists and is not empty.
    """
    require_free_directory(directory)
    signed = open_place(node_directory, None).spec()
    if signed is None:
        raise UserError(f"{node_directory} has not received its run yet; let it join first")
    fragments = fragments_of(signed.spec)
    states = newest_states(signed.spec, fragments, node_directory)
    anchors = [state.anchor for state in states]
    write_checkpoint(signed.spec, fragments, anchors, directory)


def sample_checkpoint(
    directory: Path, prompt: str, num_tokens: int, seed: int, temperature: float = 0.8
) -> str:
    """How the model that was exported to `directory` goes on from `prompt`."""
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory} is no exported model: it has no config.json; export it first")
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        length = AutoTokenizer.from_pretrained(directory).model_max_length
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"{directory} cannot be loaded: {error}; export it again") from error
    return sample_text(
        model,
        HubTokenizer(str(directory)),
        prompt,
        num_tokens,
        length,
        temperature=temperature,
        seed=seed,
    )


def newest_states(
    spec: RunSpec, fragments: Sequence[Fragment], node_directory: Path
) -> list[FragmentState]:
    """What a node's directory holds of each fragment, merges after its snapshots applied."""
    replica = Replica(
        fragments,
        outer_learning_rate=spec.outer.learning_rate,
        outer_momentum=spec.outer.momentum,
        wire=spec.sync.wire,
        merge_rule=spec.sync.merge,
    )
    with Store(node_directory, len(fragments), read_only=True) as store:
        return [_newest_state(replica, store, fragment.index) for fragment in fragments]


def write_checkpoint(
    spec: RunSpec, fragments: Sequence[Fragment], anchors: Sequence[Vector], directory: Path
) -> None:
    """Writes the model with these values, float32 [size] for each fragment, all or nothing."""
    require_free_directory(directory)
    model = build_model(spec.architecture, spec.seed, spec.data.sequence_length)
    _load_fragments(model, fragments, anchors)
    unfinished = directory.with_name(directory.name + ".tmp")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        model.save_pretrained(unfinished)  # type: ignore[operator]
        _tokenizer(spec.data).save_pretrained(unfinished)
        unfinished.replace(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise UserError(
            f"{directory} cannot be written: {error}; make room, or choose another place"
        ) from error


def byte_tokenizer(sequence_length: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: every byte of the text is a token, and its id is the byte."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=sequence_length,
        clean_up_tokenization_spaces=False,
    )


def _byte_characters() -> list[str]:
    """The character by which byte-level tokenizers write each byte, since GPT-2: printable ones of
    Latin-1 stand for themselves, the others for characters from U+0100 on.
    """
    printable = frozenset([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)])
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _tokenizer(data: DataSpec) -> PreTrainedTokenizerFast:
    if data.tokenizer == "bytes":
        return byte_tokenizer(data.sequence_length)
    return AutoTokenizer.from_pretrained(data.tokenizer, model_max_length=data.sequence_length)


def _newest_state(replica: Replica, store: Store, fragment: int) -> FragmentState:
    stored = store.load(fragment)
    if stored is None:
        raise UserError(
            f"the node has not received fragment {fragment} of the model yet; let it run until its "
            "page says that it trains"
        )
    state = stored.state
    replica.put(state)
    for merge in stored.merges:
        try:
            record = unpack_record(merge.record)
            state = replica.apply(fragment, merge.version, merge.payload, record.period_steps)
        except P2PDilocoError as error:
            raise StoreError(
                f"merge {merge.version} of fragment {fragment} on disk is damaged: {error}; "
                "start the node, which fetches it again"
            ) from error
        if state.digest != record.state_digest:
            raise StoreError(
                f"merge {merge.version} of fragment {fragment} on disk gives {state.digest[:8]}, "
                f"expected {record.state_digest[:8]}; start the node, which fetches it again"
            )
        replica.put(state)
    return state


@torch.no_grad()
def _load_fragments(
    model: torch.nn.Module, fragments: Sequence[Fragment], anchors: Sequence[Vector]
) -> None:
    parameters = dict(model.named_parameters())
    for fragment, anchor in zip(fragments, anchors, strict=True):
        assert anchor.shape == (fragment.size,) and anchor.dtype == np.float32
        for slot in fragment.slots:
            parameters[slot.name].copy_(torch.tensor(anchor[slot.span]).view(slot.shape))

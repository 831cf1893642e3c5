"""From a run's spec to who mixes with whom, and which tensors are waited for."""

import pytest

from p2pdiloco.protocol.topology import PAIRS, Groups, hypercube
from p2pdiloco.spec import GenesisSpec, RunSpec, SyncSpec, TensorLayout
from p2pdiloco_daemon.waking import gossip_plan, outer_parts

SHAPES = {
    "model.embed_tokens.weight": (256, 8),
    "model.layers.0.mlp.weight": (8, 8),
    "model.layers.1.mlp.weight": (8, 8),
    "model.layers.2.mlp.weight": (8, 8),
    "model.norm.weight": (8,),
}


def spec_of(**sync: object) -> RunSpec:
    tensors = tuple(
        TensorLayout(name=name, shape=shape, is_embedding="embed" in name)
        for name, shape in SHAPES.items()
    )
    num = sum(size for size in (2048, 64, 64, 64, 8))
    settings = SyncSpec.model_validate({"num_fragments": 3, **sync})
    genesis = GenesisSpec(num_parameters=num, tensors=tensors, state_digests=("ab" * 32,) * 3)
    return RunSpec(name="first", sync=settings, genesis=genesis)


def test_a_run_with_synchronizers_has_no_plan() -> None:
    assert gossip_plan(spec_of(), "run") is None


@pytest.mark.parametrize(
    ("mix", "mix1", "mix2"),
    [
        ("GlobalM1", Groups(16), None),
        ("GlobalM1LocalM2", Groups(16), Groups(3)),
        ("pairwise", PAIRS, None),
        ("hypercube", hypercube, None),
    ],
)
def test_the_instances_have_the_papers_names(mix: str, mix1: object, mix2: object) -> None:
    plan = gossip_plan(spec_of(strategy="gossip", mix=mix, mix_group=3), "run")
    assert plan and (plan.mix1, plan.mix2, plan.seed) == (mix1, mix2, "run")


def test_a_factored_run_gossips_its_starts_and_waits_for_a_quorum_of_all() -> None:
    plan = gossip_plan(spec_of(strategy="factored"), "run")
    assert plan and (plan.mix1, plan.mix2, plan.by_quorum) == (hypercube, Groups(16), True)
    gossip = gossip_plan(spec_of(strategy="gossip"), "run")
    assert gossip and not gossip.by_quorum


def test_only_the_ends_of_the_model_are_waited_for_where_the_run_says_so() -> None:
    spec = spec_of(strategy="gossip", mix="GlobalM1LocalM2", mix2_tensors="ends")
    names = {slot.name for part in outer_parts(spec) for slot in part.layout.slots}
    assert names == {name for name in SHAPES if "embed" in name or ".0." in name or ".1." in name}
    plan = gossip_plan(spec, "run")
    parts = outer_parts(spec)
    assert plan and plan.mix2_fragments == frozenset(
        p for p, part in enumerate(parts) if part.spans
    )
    assert {slot.name for part in outer_parts(spec_of()) for slot in part.layout.slots} == set(
        SHAPES
    )

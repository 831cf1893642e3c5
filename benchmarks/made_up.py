"""A run that was never published, for one process of a node alone."""

from p2pdiloco.learn.models import build_model, embedding_names, num_parameters, parameter_shapes
from p2pdiloco.spec import GenesisSpec, RunSpec, TensorLayout


def made_up_spec(draft: RunSpec) -> RunSpec:
    """With its tensors, and with digests that nobody looks at."""
    model = build_model(draft.model, draft.seed, draft.data.sequence_length)
    embeddings = embedding_names(model)
    tensors = tuple(
        TensorLayout(name=name, shape=shape, is_embedding=name in embeddings)
        for name, shape in parameter_shapes(model).items()
    )
    genesis = GenesisSpec(
        num_parameters=num_parameters(model),
        tensors=tensors,
        state_digests=("0" * 64,) * draft.sync.num_fragments,
    )
    return draft.with_genesis(genesis)

"""The backends that a machine's owner can choose for the rollout worker, by name."""

from importlib.util import find_spec

from p2pdiloco.errors import UserError

TORCH = "torch"
"""`rollout.engine`, with drafts."""
VLLM = "vllm"
"""`rollout.vllm_engine`, which needs the extra `vllm`."""
BACKENDS = (TORCH, VLLM)


def require_backend(backend: str) -> None:
    """UserError if it is not installed: now, rather than from a worker that is started again and
    again. Loads nothing."""
    if backend == VLLM and find_spec("vllm") is None:
        raise UserError(
            "--rollout-backend vllm needs vLLM, which is not installed: "
            "python -m pip install 'p2pdiloco[vllm]'"
        )

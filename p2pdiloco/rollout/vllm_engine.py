"""The other backend: vLLM computes the logits, our rule takes the tokens. An extra: `[vllm]`.

vLLM's sampler knows nothing of noise by (seed, trajectory, position), which replays need. So it is
left nothing to choose: a logits processor of ours (`_processor`) applies the rule (sampling.py) to
each row of logits, asks the referee (verify.py) where their rounding leaves the token open, notes
the token with its log-probability, and masks all others; the sampler, told to be greedy, takes it.
The tokens are thus those of `engine`, on any batch. What is different:

- Nothing is drafted: vLLM refuses logits processors together with speculation.
- A prompt is computed in one step. vLLM samples from unfinished prompts too, and throws that away;
  the referee would take such logits for rounding errors.
- vLLM keeps its own weights, beside those of `model`, which the referee and replays need.
- New weights interrupt what runs: it is withdrawn, and submitted anew as far as it has come.
- Weights are handed over by the names that transformers gives them. A model that vLLM computes
  otherwise, or cannot load by these names, is refused at once (`ERROR_MAX`).
- The worker computes in float32, and graphs are not compiled.

vLLM runs in this process, with its first model runner: the second has other logits processors.
"""

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, count
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import PreTrainedModel

from p2pdiloco.errors import UserError
from p2pdiloco.rollout.costs import CostTable
from p2pdiloco.rollout.engine import CALIBRATION_TOKENS, Limits
from p2pdiloco.rollout.pace import Pace
from p2pdiloco.rollout.packed import num_positions
from p2pdiloco.rollout.policy import overwrite, require_answerable
from p2pdiloco.rollout.request import Finish, Progress, Request, Running, Token
from p2pdiloco.rollout.sampling import Choice, Sampling, decide
from p2pdiloco.rollout.scheduler import require_place, too_long
from p2pdiloco.rollout.verify import SAFETY, Position, Referee

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_USE_V2_MODEL_RUNNER="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="WARNING",
)
try:
    from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates
except ImportError as error:
    raise UserError(
        f"the rollout backend vllm cannot be loaded ({error}); install it with"
        " pip install 'p2pdiloco[vllm]', or choose the backend torch"
    ) from error

ERROR_MAX = 0.25
"""Logits of one model that differ by more are not rounded, they are computed otherwise."""
_PROBED = 16
"""Places whose logits are compared with the canonical ones when weights are new."""
_NAME = "p2pdiloco_request"
_TRIALS = 3
"""Steps that are timed; the fastest counts."""

Choose = Callable[[Sequence[str], Tensor], Sequence[int]]
"""(names of requests, their logits [N, V]) -> the token of each."""


class VllmEngine:
    """`backend.Backend` over vLLM. One call at a time; all state is in here and in vLLM."""

    num_drafted = num_held = 0

    def __init__(
        self,
        model: PreTrainedModel,
        limits: Limits,
        clock: Callable[[], float],
        *,
        length_max: int,
        version: int = 0,
    ) -> None:
        """Takes the model over. No sequence may grow beyond `length_max` tokens.

        UserError if vLLM computes on another kind of device than the model's, or does not compute
        this model.
        """
        self.model = model.eval().requires_grad_(False)
        self.version = version
        self.busy_s = 0.0
        """Spent in steps, by the clock."""
        self.costs = CostTable(widths=(1,))
        self.pace = Pace(self.costs)
        self._length_max = min(length_max, num_positions(model))
        self._limits = limits
        self._clock = clock
        self._waiting: deque[Running] = deque()
        self._running: dict[str, Running] = {}
        """By the name that vLLM knows them by: another one each time they are handed to it."""
        self._choices: dict[str, Choice] = {}
        """What was chosen last for each of these."""
        self._names = map(str, count())
        self._cancelled: list[Progress] = []
        self._probe: _Probe | None = None
        self._vllm = _started(model, limits, self._length_max, self._choose)
        self._load()
        self.referee = Referee(model, self._last_logits)
        error = self.referee.margin / SAFETY
        if error > ERROR_MAX:
            raise UserError(
                f"vLLM does not compute this {type(model).__name__} as transformers does: logits"
                f" differ by {error:.2g}; choose the backend torch"
            )

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return bool(self._waiting or self._running or self._cancelled)

    @property
    def num_running(self) -> int:
        """Handed to vLLM; some of them may wait there for cache."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values there is room for."""
        cache = self._vllm.vllm_config.cache_config
        num_slots: int = (cache.num_gpu_blocks - 1) * cache.block_size  # one block is no one's
        return num_slots

    @property
    def cache_share(self) -> float:
        """Of these, what running sequences have. vLLM gives up other prefixes at need."""
        num_tokens = sum(len(running.tokens) for running in self._running.values())
        return min(1.0, num_tokens / self.cache_tokens)

    @property
    def prefix_tokens(self) -> int:
        """All: the blocks of a running sequence are those of its prefix, and are shared."""
        return self.cache_tokens

    def num_rows_of(self, length_max: int) -> int:
        """Sequences of this length that run at once."""
        block: int = self._vllm.vllm_config.cache_config.block_size
        return min(
            self._limits.num_rows_max, self.cache_tokens // (-(-length_max // block) * block)
        )

    def submit(self, request: Request) -> None:
        """Queues a request. `QueueFull` if too many wait, `ValueError` if it can never run."""
        require_answerable(self.model, request)
        if request.length_max > min(self.cache_tokens, self._length_max):
            raise too_long(request, min(self.cache_tokens, self._length_max))
        require_place(request, self._waiting, self._running.values(), self._limits.num_waiting_max)
        self._waiting.append(Running.of(request))

    def cancel(self, request_id: str) -> None:
        """Ends a request; the next step reports it. Unknown ids are ignored: the request may have
        ended meanwhile."""
        for running in chain(self._waiting, self._running.values()):
            if running.request.id == request_id:
                break
        else:
            return
        if running in self._waiting:
            self._waiting.remove(running)
        else:
            [name] = [name for name, known in self._running.items() if known is running]
            self._vllm.abort_request([name])
            self._forget(name)
        self._cancelled.append(Progress(request_id, (), Finish.CANCELLED))

    def swap(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Overwrites the weights in place, between two steps.

        Running requests go on: their keys and values are computed anew, and their next tokens carry
        the new version.
        """
        overwrite(self.model, weights)
        self.version = version
        interrupted = list(self._running.items())
        self._vllm.abort_request([name for name, _running in interrupted])
        for name, _running in interrupted:
            self._forget(name)
        self._load()
        self.referee.probe()
        for _name, running in interrupted:
            self._hand_over(running)

    @torch.inference_mode()
    def step(self) -> list[Progress]:
        """One pass of the model; what it added to each request."""
        started = self._clock()
        while self._waiting and len(self._running) < self._limits.num_rows_max:
            self._hand_over(self._waiting.popleft())
        progress: list[Progress] = []
        if self._running:
            outputs: list[RequestOutput] = self._vllm.step()
            num_prompt_tokens = [self._num_prefilled(output) for output in outputs]
            progress = [self._commit(output) for output in outputs]
            self._observe(num_prompt_tokens, self._clock() - started)
        progress += self._cancelled
        self._cancelled = []
        return progress

    def calibrate(self) -> None:
        """Times steps of many sizes. The engine must be idle."""
        assert not self.has_work, "calibrate an idle engine"
        num_rows_max = min(self._limits.num_rows_max, self.num_rows_of(self._length_max))
        batches = [1 << power for power in range(max(1, num_rows_max).bit_length())]
        self.costs.measure(batches, self._decode_seconds)
        num_tokens = min(CALIBRATION_TOKENS, self._length_max - 1)
        started = self._clock()
        self._time_steps([self._trial(0, num_tokens, 1)])
        self.pace.prefilled(num_tokens, self._clock() - started)
        self._vllm.reset_prefix_cache()

    # ------------------------------------------------------------------ what vLLM is told

    def _hand_over(self, running: Running) -> None:
        name = self._ask(running.tokens, running.num_left, running.request.stop_tokens)
        self._running[name] = running

    def _ask(self, tokens: Sequence[int], num_tokens_max: int, stops: frozenset[int]) -> str:
        name = next(self._names)
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens_max,
            stop_token_ids=sorted(stops),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={_NAME: name},
        )
        self._vllm.add_request(name, {"prompt_token_ids": list(tokens)}, parameters)
        return name

    def _forget(self, name: str) -> Running:
        self._choices.pop(name, None)
        running = self._running.pop(name)
        running.num_held = 0
        return running

    def _load(self) -> None:
        """Gives vLLM the weights of the model. What it computed with others is void."""
        named = self.model.named_parameters(remove_duplicate=False)
        weights = iter([(name, parameter.detach()) for name, parameter in named])
        self._vllm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        assert self._vllm.reset_prefix_cache(), "nothing is running"

    # ------------------------------------------------------------------ what it answers

    def _choose(self, names: Sequence[str], logits_NV: Tensor) -> Sequence[int]:
        """Called by vLLM in the middle of a step, with the logits of all that run."""
        if self._probe is not None:
            return [self._probe.take(logits_NV[0])]
        places = [Position.after(self._running[name]) for name in names]
        choices = decide(
            logits_NV,
            [place.sampling for place in places],
            [place.key for place in places],
            self.referee.margin,
        )
        for name, place, choice, logits_V in zip(names, places, choices, logits_NV, strict=True):
            certain = choice if choice.certain else self.referee.verdict(place, logits_V)
            self._choices[name] = certain
        return [self._choices[name].token for name in names]

    def _commit(self, output: RequestOutput) -> Progress:
        name = output.request_id
        running, choice = self._running[name], self._choices[name]
        [completion] = output.outputs
        assert list(completion.token_ids) == [choice.token], "vLLM took a token that was masked"
        if len(running.tokens) == len(running.request.prompt):
            running.num_reused = output.num_cached_tokens or 0
        finish = running.commit([choice.token])
        running.num_held = len(running.tokens) - 1
        if finish is not None:
            self._forget(name)
        token = Token(choice.token, choice.logprob, self.version)
        return Progress(running.request.id, (token,), finish, running.num_reused)

    def _last_logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [N, V] after the last tokens of a sequence alone: a prompt, and steps that decode.
        Nothing else may be running."""
        num_probed = min(_PROBED, len(tokens))
        num_prompt = len(tokens) - num_probed + 1
        self._probe = probe = _Probe([*tokens[num_prompt:], 0], [])
        self._ask(tokens[:num_prompt], num_probed, frozenset())
        while self._vllm.has_unfinished_requests():
            self._vllm.step()
        self._probe = None
        return torch.stack(probe.logits)

    # ------------------------------------------------------------------ how long it takes

    def _num_prefilled(self, output: RequestOutput) -> int:
        """Tokens of a prompt that the step computed; 0 if it decoded."""
        running = self._running[output.request_id]
        return 0 if running.num_held else len(running.tokens) - (output.num_cached_tokens or 0)

    def _observe(self, num_prompt_tokens: Sequence[int], seconds: float) -> None:
        self.busy_s += seconds
        if not num_prompt_tokens:
            return
        batch = len(num_prompt_tokens)
        if not any(num_prompt_tokens):
            self.pace.decoded(batch, batch, seconds)
            self.costs.observe(batch, batch, seconds)
        elif all(num_prompt_tokens):
            self.pace.prefilled(sum(num_prompt_tokens), seconds)

    def _decode_seconds(self, batch: int, _width: int) -> float:
        """Of a step that decodes so many sequences."""
        num_tokens = min(_TRIALS + 1, self._length_max - 1)
        return min(self._time_steps([self._trial(i, 1, num_tokens) for i in range(batch)]))

    def _trial(self, index: int, num_prompt: int, num_tokens_max: int) -> Request:
        return Request(
            id=f"trial {index}",
            trajectory="",
            prompt=(0,) * num_prompt,
            num_tokens_max=num_tokens_max,
            sampling=Sampling(),
        )

    def _time_steps(self, wanted: Sequence[Request]) -> list[float]:
        """Of the steps in which all of these take part."""
        for request in wanted:
            self._hand_over(Running.of(request))
        seconds = []
        while self._running:
            started = self._clock()
            num_served = len(self.step())
            if num_served == len(wanted):
                seconds.append(self._clock() - started)
        return seconds


@dataclass(slots=True)
class _Probe:
    """Leads vLLM along a known sequence and keeps the logits."""

    tokens: list[int]
    """That it is made to take."""
    logits: list[Tensor]
    """[V] each; before the first of these tokens, the second, ..."""

    def take(self, logits_V: Tensor) -> int:
        self.logits.append(logits_V.clone())
        return self.tokens[len(self.logits) - 1]


def _started(model: PreTrainedModel, limits: Limits, length_max: int, choose: Choose) -> LLMEngine:
    """vLLM's engine for models of this shape, with weights that mean nothing yet."""
    device: torch.device = model.device
    if device.type != current_platform.device_type or device.index:
        raise UserError(
            f"the installed vLLM computes on the first {current_platform.device_type}, but rollouts"
            f" are to run on {device}; choose that device, another build of vLLM, or the backend"
            " torch"
        )
    config = deepcopy(model.config)
    config.architectures = [type(model).__name__]
    # as a head of its own, which is told new weights: of a tied one vLLM keeps the old, packed ones
    config.tie_word_embeddings = False
    with TemporaryDirectory(prefix="p2pdiloco-vllm-") as directory:
        config.save_pretrained(directory)
        return LLMEngine.from_engine_args(
            EngineArgs(
                model=directory,
                skip_tokenizer_init=True,
                generation_config="vllm",
                load_format="dummy",
                dtype="float32",
                enforce_eager=True,
                max_model_len=length_max,
                max_num_seqs=limits.num_rows_max,
                max_num_batched_tokens=max(length_max, limits.chunk_tokens, limits.num_rows_max),
                kv_cache_memory_bytes=limits.cache_bytes,
                enable_chunked_prefill=False,
                enable_prefix_caching=True,
                async_scheduling=False,
                logits_processors=[_processor(choose, model.config.vocab_size)],
                disable_log_stats=True,
            )
        )


def _processor(choose: Choose, vocabulary: int) -> type:
    """A class of logits processors that leave each row the one token that is chosen for it.

    vLLM makes the instance itself, and calls it with the rows of its batch; a request is told by
    the name in its sampling parameters. Logits beyond the vocabulary are padding.
    """

    class Chosen(LogitsProcessor):  # type: ignore[misc]
        def __init__(self, _config: object, _device: torch.device, _is_pinned: bool) -> None:
            self._names: dict[int, str] = {}
            """By row."""

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: object) -> None:
            process_dict_updates(
                self._names, batch_update, lambda parameters, *_: parameters.extra_args[_NAME]
            )

        def apply(self, logits: Tensor) -> Tensor:
            if not self._names:
                return logits
            rows = sorted(self._names)
            names = [self._names[row] for row in rows]
            tokens = choose(names, logits[rows, :vocabulary])
            logits[rows] = -torch.inf
            logits[rows, list(tokens)] = 0.0
            return logits

    return Chosen

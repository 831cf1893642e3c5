"""A real node trains and generates: answers, newer policies, a killed worker, a clean end."""

import json
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from swarm_processes import PATIENCE_S, BootstrapProcess, NodeProcess, wait_until

from p2pdiloco_daemon.status.app import COMPLETIONS_PATH
from p2pdiloco_daemon.status.view import JsonObject

pytestmark = [pytest.mark.loopback, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    root = tmp_path_factory.mktemp("rollouts")
    boot = BootstrapProcess(root)
    serving = NodeProcess(root / "node", boot.invite, options=["--rollouts"])
    try:
        wait_until("the worker to serve", lambda: state_of(serving) == "serving")
        yield serving
    finally:
        serving.end()
        boot.end()


def state_of(node: NodeProcess) -> str | None:
    status = node.status()
    rollouts = status["rollouts"] if status else None
    return rollouts["state"] if rollouts else None


def ask(node: NodeProcess, **body: object) -> list[str]:
    """The lines of the answer; HTTPError for anything but 200."""
    question = {"prompt": "In the ", "max_tokens": 8, **body}
    request = urllib.request.Request(
        node.page + COMPLETIONS_PATH,
        data=json.dumps(question).encode(),
        headers={"Content-Type": "application/json"},
    )
    return node.ask(request).decode().splitlines()


def refusal(node: NodeProcess, **body: object) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(node, **body)
    with caught.value as error:
        return error.code, json.loads(error.read())["error"]["message"]


def choice_of(node: NodeProcess, **body: object) -> JsonObject:
    [line] = ask(node, **body)
    choice: JsonObject = json.loads(line)["choices"][0]
    return choice


def test_a_training_node_answers(node: NodeProcess) -> None:
    choice = choice_of(node, seed=1, logprobs=0)
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 8

    def is_told() -> bool:  # tokens are told of with the next load
        rollouts = node.get()["rollouts"]
        return bool(rollouts["served"] and rollouts["tokens"] >= 8)

    wait_until("the page to say so", is_told)


def test_answers_come_from_newer_and_newer_policies(node: NodeProcess) -> None:
    first = choice_of(node)["policy_versions"][-1]

    def newer() -> bool:
        *_, end, done = [line for line in ask(node, stream=True) if line]
        assert done == "data: [DONE]"
        events = json.loads(end.removeprefix("data: "))
        return bool(events["usage"]["completion_tokens"] == 8 and version() > first)

    def version() -> int:
        number: int = choice_of(node, max_tokens=1)["policy_versions"][0]
        return number

    wait_until("a newer policy", newer)
    assert node.get()["learner"]["restarts"] == 0


def test_wrong_questions_are_refused_with_a_sentence(node: NodeProcess) -> None:
    status, sentence = refusal(node, max_tokens=30)
    assert status == 400
    assert "the model is trained on 32 tokens; the prompt has 7" in sentence
    assert refusal(node, prompt=[256])[0] == 400
    assert refusal(node, temperature=-1)[0] == 400


def test_a_killed_worker_is_told_of_and_comes_back(node: NodeProcess) -> None:
    worker = wait_until("a worker", node.rollout_worker)
    worker.send_signal(signal.SIGSTOP)
    told: list[tuple[int, str]] = []
    asking = threading.Thread(target=lambda: told.append(refusal(node)))
    asking.start()
    worker.kill()
    asking.join(PATIENCE_S)
    [(status, sentence)] = told
    assert status == 503
    assert "SIGKILL" in sentence or "is starting" in sentence
    wait_until("the worker to be back", lambda: state_of(node) == "serving")
    assert node.get()["rollouts"]["restarts"] == 1
    assert len(choice_of(node)["token_ids"]) == 8
    assert node.get()["learner"]["restarts"] == 0


def test_nothing_is_left_of_a_node_that_serves(node: NodeProcess) -> None:
    node.leave()
    assert node.process.returncode == 0
    assert node.left_nothing()
    assert "Traceback" not in node.words()

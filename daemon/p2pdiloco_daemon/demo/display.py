"""The live view in the terminal: one row per node; elsewhere, a line now and then."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from p2pdiloco_daemon.cli.status import in_bytes
from p2pdiloco_daemon.demo.processes import NodeProcess
from p2pdiloco_daemon.status.view import JsonObject

_STATE_STYLES = {
    "training": "green",
    "settled": "cyan",
    "isolated": "yellow",
    "paused": "yellow",
    "error": "bold red",
}
_TEXT_COLUMNS = ("step", "loss", "held out", "tokens/s", "merges", "up", "down", "stall")
_RL_COLUMNS = ("step", "reward", "drift", "tokens/s", "merges", "up", "down", "stall")

PLAIN_REPORT_EVERY_S = 10.0
"""Between lines where the output is no terminal."""


class Display:
    """On stderr, because stdout belongs to the outcome."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live: Live | None = None
        self._next_line_at = 0.0

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While this is open, `show` redraws in place."""
        with Live(console=self._console, auto_refresh=False) as self._live:
            yield
        self._live = None

    def show(
        self, nodes: Sequence[NodeProcess], statuses: Mapping[str, JsonObject], headline: str
    ) -> None:
        if self._console.is_terminal and self._live is not None:
            self._live.update(view(nodes, statuses, headline), refresh=True)
        elif (now := time.monotonic()) >= self._next_line_at:
            self._next_line_at = now + PLAIN_REPORT_EVERY_S
            self.say(plain_line(nodes, statuses, headline))


def plain_line(
    nodes: Sequence[NodeProcess], statuses: Mapping[str, JsonObject], headline: str
) -> str:
    """All nodes in one line."""
    parts = [headline]
    for node in nodes:
        status = statuses.get(node.name)
        step = status["learner"]["step"] if status else 0
        merges = status["merges_total"] if status else 0
        parts.append(
            f"{node.name} {_state(node, status)} step {step} {_progress(status)} merges {merges}"
        )
    return "; ".join(parts)


def view(
    nodes: Sequence[NodeProcess], statuses: Mapping[str, JsonObject], headline: str
) -> RenderableType:
    """Headline, table, and why the newest round closed."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("node")
    table.add_column("state")
    learns_from_text = all(status["learning"] is None for status in statuses.values())
    for name in _TEXT_COLUMNS if learns_from_text else _RL_COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("page")
    for node in nodes:
        table.add_row(*_row(node, statuses.get(node.name)))
    return Group(Text(headline), Text(), table, Text(), Text(newest_round(statuses), style="dim"))


def newest_round(statuses: Mapping[str, JsonObject]) -> str:
    """The newest finished round that any node knows, in one sentence."""
    rounds = [status["rounds"][0] for status in statuses.values() if status["rounds"]]
    if not rounds:
        return "no merge yet"
    newest = min(rounds, key=lambda item: float(item["seconds_ago"]))
    return (
        f"fragment {newest['fragment']} version {newest['version']}: {newest['outcome']}, "
        f"{len(newest['contributors'])} contributors, {newest['reason']}"
    )


def _row(node: NodeProcess, status: JsonObject | None) -> list[RenderableType]:
    state = _state(node, status)
    if status is None:
        return [node.name, state, *[Text("-", style="dim")] * len(_TEXT_COLUMNS), _page(node)]
    learner, traffic = status["learner"], status["traffic"]
    synchronizer = status["synchronizer"]
    leads = node.end is None and synchronizer is not None and synchronizer["is_self"]
    return [
        Text(f"{node.name} *" if leads else node.name, style="bold" if leads else ""),
        state,
        str(learner["step"]),
        *_scores(status),
        _number(learner["tokens_per_s"], 0),
        str(status["merges_total"]),
        in_bytes(traffic["sent_bytes"]),
        in_bytes(traffic["received_bytes"]),
        f"{learner['stall_share']:.1%}",
        _page(node),
    ]


def _scores(status: JsonObject) -> tuple[str, str]:
    learner, learning = status["learner"], status["learning"]
    if learning is None:
        return _number(learner["loss"], 3), _number(learner["held_out_loss"], 3)
    return _number(learning["reward"], 3), _number(learning["drift"], 4)


def _progress(status: JsonObject | None) -> str:
    if status and status["learning"] is not None:
        return f"reward {_number(status['learning']['reward'], 3)}"
    return f"loss {_number(status['learner']['loss'] if status else None, 3)}"


def _state(node: NodeProcess, status: JsonObject | None) -> Text:
    if node.end is not None:
        return Text(node.end, style="red")
    state = str(status["state"]) if status else "starting"
    return Text(state, style=_STATE_STYLES.get(state, ""))


def _page(node: NodeProcess) -> Text:
    return Text(f"127.0.0.1:{node.port}" if node.end is None else "", style="blue")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

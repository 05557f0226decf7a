"""The wording of what the launcher says. Pure.

Lines begin with one of a few fixed words and are aligned, so that logs grep well: checkpoints, logs, failure, restart,
recovery, signal, drain, hang, note, warn, done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptrt.agents.verdict import Exit, Verdict, describe_code
from ckptrt.agents.watchdog import Look

__all__ = ["Recovery", "failure_lines", "hang_lines", "line", "ranks_text", "recovery_line"]

_WIDTH = 13


def line(word: str, text: str) -> str:
    """One line, its first word padded; further lines of the text are indented to match."""
    return f"{word:<{_WIDTH}}" + text.replace("\n", "\n" + " " * _WIDTH)


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-2, 4`."""
    ranks = sorted(ranks)
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def failure_lines(verdict: Verdict, *, step: int | None, tail: Sequence[str], log: str) -> str:
    """The block that says what failed and what only fell with it. tail: the culprit's stderr, if nobody saw it yet."""
    cause = verdict.cause
    after = f" · after step {step}" if step is not None else ""
    code = "" if cause.by_us else f" · {describe_code(cause.code)}"  # a status that we gave it says nothing
    rows = [f"rank {cause.rank}{code}{after} · {_reason(cause)}"]
    for other in verdict.consequences:
        if other.code < 0 and not other.by_us:
            rows.append(f"rank {other.rank} was killed as well: {describe_code(other.code)}")
        else:
            code = "" if other.by_us else f"{describe_code(other.code)} "
            rows.append(f"rank {other.rank} failed after it (not a cause): {code}{other.error}".rstrip())
    if verdict.stopped:
        stopped = [other.rank for other in verdict.stopped]
        verb = "was" if len(stopped) == 1 else "were"
        rows.append(f"{ranks_text(stopped)} {verb} stopped by the supervisor (not a cause)")
    if log:
        rows.append(f"log {log}")
    rows += [f"  {text}" for text in tail]
    return line("failure", "\n".join(rows))


def hang_lines(looks: Sequence[Look], odd: Look, why: str) -> str:
    """Who keeps the others and what all of them do; ranks that are at the same place share a row."""
    rows = [f"no step for {odd.silent_s:.1f} s · rank {odd.rank} after step {odd.step}: {why}"]
    places: dict[str, list[int]] = {}
    for look in looks:
        places.setdefault(_place(look), []).append(look.rank)
    rows += [f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} at {place}" for place, ranks in places.items()]
    return line("hang", "\n".join(rows))


def _place(look: Look) -> str:
    """The innermost frame that isn't a library's, if there is one."""
    if not look.stack:
        return f"an unknown place (process state {look.state or 'unknown'}, no stack)"
    own = [frame for frame in look.stack if "/site-packages/" not in frame and "/lib/python" not in frame]
    return (own or list(look.stack))[0]


def _reason(cause: Exit) -> str:
    if cause.note:
        return cause.note
    if cause.error_at_s is not None or (cause.code > 0 and cause.error):
        return cause.error
    if cause.code < 0:
        return cause.error or "no traceback: the process was killed from outside"
    return "no message on stderr"


@dataclass(slots=True, kw_only=True)
class Recovery:
    """When what happened in one restart, on the monotonic clock. Phases come from the workers, the rest from here."""

    failed_at_s: float  # when the cause happened, as near as it is known
    seen_at_s: float
    stopped_at_s: float = 0.0
    decide_s: float = 0.0
    fence_s: float = 0.0
    fenced_at_s: float = 0.0
    started_at_s: float = 0.0
    num_workers: int = 0
    _phases: dict[str, dict[int, float]] = field(default_factory=dict)

    def phase(self, rank: int, name: str, at_s: float) -> bool:
        """Note a worker's phase; True when with it all workers have got through their first step."""
        ranks = self._phases.setdefault(name, {})
        done_before = len(ranks) >= self.num_workers
        ranks.setdefault(rank, at_s)
        return name == "first_step" and not done_before and len(ranks) >= self.num_workers

    def parts(self) -> dict[str, float]:
        """Seconds from the failure to the last rank's first step, by part; they add up to the whole."""
        moments = {name: max(ranks.values()) for name, ranks in self._phases.items() if len(ranks) >= self.num_workers}
        parts = {
            "detect": self.seen_at_s - self.failed_at_s,
            "stop": self.stopped_at_s - self.seen_at_s,
            "decide": self.fenced_at_s - self.stopped_at_s - self.fence_s,
            "fence": self.fence_s,
        }
        since_s = self.fenced_at_s
        for part, name in (("start", "group"), ("restore", "restored"), ("first step", "first_step")):
            if name in moments:
                parts[part] = moments[name] - since_s
                since_s = moments[name]
        if since_s == self.fenced_at_s and self.started_at_s:
            parts["start"] = self.started_at_s - self.fenced_at_s
        return parts


def recovery_line(parts: Mapping[str, float]) -> str:
    total_s = sum(parts.values())
    to = "" if "first step" in parts else " to new workers"
    return line(
        "recovery", f"{total_s:.2f} s{to} = " + " + ".join(f"{name} {value:.2f}" for name, value in parts.items())
    )

"""Which nodes make up a world: examples, and what holds for all that can happen."""

from __future__ import annotations

from dataclasses import asdict, replace

from hypothesis import given
from hypothesis import strategies as st

from ckptrt.agents.jobnote import JobNote
from ckptrt.agents.restart import Budget, Phase, State
from ckptrt.agents.world import Member, Rules, Wait, World, blamed, choose, placed, strikes_at

RULES = Rules(min_nodes=2, max_nodes=3, last_call_s=2.0, patience_s=60.0)


def member(number: int, slots: int = 2, **facts: float) -> Member:
    return Member(node=f"n{number}", slots=slots, came=number, **facts)  # type: ignore[arg-type]


def nodes(chosen: World | Wait) -> list[str]:
    assert isinstance(chosen, World), chosen
    return [place.node for place in chosen.places]


def test_a_first_world_waits_for_the_least_and_a_moment_for_more() -> None:
    few = choose(RULES, [member(0)], None, 0.0, 1.0)
    assert few == Wait(why="1 of at least 2 nodes are here", until_s=60.0)
    assert choose(RULES, [member(0)], None, 0.0, 60.0) == replace(few, over=True)
    some = [member(0), member(1, came_at_s=5.0)]
    assert isinstance(wait := choose(RULES, some, None, 0.0, 6.9), Wait)
    assert wait.until_s == 7.0
    assert nodes(choose(RULES, some, None, 0.0, 7.0)) == ["n0", "n1"]
    assert nodes(choose(RULES, [*some, member(2, came_at_s=6.0)], None, 0.0, 6.0)) == ["n0", "n1", "n2"]


def test_a_next_world_is_made_at_once_and_keeps_ranks_where_they_are() -> None:
    last = placed([("n1", 2), ("n0", 2), ("n2", 2)])
    assert nodes(choose(RULES, [member(0), member(1), member(3)], last, 0.0, 0.0)) == ["n1", "n0", "n3"]
    assert nodes(choose(RULES, [member(0), member(1)], last, 0.0, 0.0)) == ["n1", "n0"]
    assert nodes(choose(RULES, [member(n) for n in range(5)], last, 0.0, 0.0)) == ["n1", "n0", "n2"]


def test_a_new_leader_waits_a_moment_for_those_who_look_for_it() -> None:
    last = placed([("n0", 2), ("n1", 2), ("n2", 2)])
    here = [member(1), member(2)]
    assert isinstance(choose(RULES, here[:1], last, 0.0, 0.0, awaited=1), Wait)
    assert isinstance(choose(RULES, here, last, 0.0, 1.9, awaited=1), Wait)
    assert nodes(choose(RULES, here, last, 0.0, 2.0, awaited=1)) == ["n1", "n2"]
    assert nodes(choose(RULES, here, last, 0.0, 0.0, awaited=0)) == ["n1", "n2"]


def test_ranks_are_a_multiple() -> None:
    rules = replace(RULES, min_nodes=1, multiple=4)
    last = placed([])
    assert nodes(choose(rules, [member(n) for n in range(3)], last, 0.0, 0.0)) == ["n0", "n1"]
    lone = choose(rules, [member(0)], last, 0.0, 0.0)
    assert isinstance(lone, Wait) and lone.why == (
        "the 2 ranks of the nodes that are here can't make up a multiple of 4"
    )


def test_who_goes_is_left_out_and_so_is_who_keeps_failing() -> None:
    bad = member(0)
    for at_s in (0.0, 10.0, 20.0):
        bad = blamed(bad, at_s)
    last = placed([("n0", 2), ("n1", 2), ("n2", 2)])
    going = replace(member(1), leaving=True)
    assert nodes(choose(RULES, [bad, member(1), member(2)], last, 20.0, 20.0)) == ["n0", "n1", "n2"]  # just below three
    bad = blamed(bad, 30.0)
    assert nodes(choose(RULES, [bad, member(1), member(2)], last, 30.0, 30.0)) == ["n1", "n2"]
    assert nodes(choose(RULES, [bad, going, member(2)], last, 30.0, 30.0)) == ["n2", "n0"]  # needed all the same
    assert strikes_at(bad, 30.0 + 1800.0) == strikes_at(bad, 30.0) / 2
    assert nodes(choose(RULES, [bad, member(1), member(2)], last, 1830.0, 1830.0)) == ["n0", "n1", "n2"]


@given(
    slots=st.lists(st.integers(0, 4), max_size=8),
    leaving=st.sets(st.integers(0, 7)),
    strikes=st.dictionaries(st.integers(0, 7), st.floats(0, 9)),
    bounds=st.tuples(st.integers(1, 4), st.integers(0, 4)),
    multiple=st.integers(1, 4),
    last=st.permutations(range(8)),
    known=st.booleans(),
)
def test_whatever_comes_a_world_is_one_that_the_rules_allow(
    slots: list[int],
    leaving: set[int],
    strikes: dict[int, float],
    bounds: tuple[int, int],
    multiple: int,
    last: list[int],
    known: bool,
) -> None:
    rules = Rules(min_nodes=bounds[0], max_nodes=sum(bounds), multiple=multiple)
    members = [
        replace(member(n, count), leaving=n in leaving, strikes=strikes.get(n, 0.0)) for n, count in enumerate(slots)
    ]
    before = placed([(f"n{n}", 1) for n in last]) if known else None
    chosen = choose(rules, members, before, 0.0, 1000.0)
    if isinstance(chosen, Wait):
        assert chosen.over  # 1,000 s are more than any patience
        return
    assert rules.min_nodes <= len(chosen.places) <= rules.max_nodes
    assert chosen.size % multiple == 0
    by_name = {m.node: m for m in members}
    assert all(not by_name[place.node].leaving and by_name[place.node].slots > 0 for place in chosen.places)
    assert [rank for place in chosen.places for rank in place.ranks] == list(range(chosen.size))
    assert all(chosen.node_of(rank) in by_name for rank in range(chosen.size))
    if before is not None:
        order = [place.node for place in before.places]
        kept = [place.node for place in chosen.places]
        sound = [node for node in kept if by_name[node].strikes < 2]
        assert sound == sorted(sound, key=order.index)


# --- what the next leader goes on from


def test_a_note_comes_back_as_it_was_and_strange_ones_are_none() -> None:
    state = State(budget=Budget(max_restarts=3, max_no_progress=2), num_workers=4, restarts=2, has_run=True)
    note = replace(JobNote(id="x", nodes=(("n0", 2), ("n1", 2)), started=True).after(state), url="s3://b/run")
    assert JobNote.read(asdict(note)) == note
    assert JobNote.read({**asdict(note), "nodes": [["n0", 2], ["n1", 2]], "newer": 1}) == note  # as JSON has it
    assert (world := note.world()) is not None and world.size == 4
    for strange in (None, {}, {"id": 7}):
        assert JobNote.read(strange) is None


def test_the_next_leader_judges_the_loss_of_a_set_unless_it_was_handed_over() -> None:
    budget = Budget(max_restarts=3, max_no_progress=2)
    note = JobNote(id="x", started=True, restarts=2, has_run=True)
    assert note.state(budget).phase is Phase.JUDGING
    assert replace(note, handed_over=True).state(budget).phase is Phase.NEW
    assert JobNote(id="x").state(budget).phase is Phase.NEW
    assert note.state(budget).restarts == 2

"""The reader's rule, by examples and against a naive twin on thousands of made-up histories."""

from __future__ import annotations

import pytest
from histories import check
from hypothesis import given, settings
from hypothesis import strategies as st
from support_histories import History, naive

from ckptrt.storage.layout import CommitId
from ckptrt.storage.lineage import trace, valid_commits
from ckptrt.storage.records import Parent


def parent(step: int, incarnation: int) -> Parent:
    return Parent(step=step, incarnation=incarnation)


def ids(*pairs: tuple[int, int]) -> list[CommitId]:
    return [CommitId(*pair) for pair in pairs]


def test_a_late_commit_of_an_older_incarnation_is_off_the_path():
    fences = {4: None, 5: parent(900, 4)}
    commits = ids((800, 4), (900, 4), (1000, 4), (950, 5))
    lineage = trace(fences, commits)
    assert list(lineage.commits) == ids((950, 5), (900, 4), (800, 4))
    assert "went on from step 900" in lineage.off_path[CommitId(1000, 4)]


def test_a_step_taken_again_hides_the_older_one():
    # A parent may lie beyond what the child commits first, when it restored from memory and fell back.
    fences = {1: None, 2: parent(30, 1)}
    lineage = trace(fences, ids((10, 1), (30, 1), (30, 2), (40, 2)))
    assert list(lineage.commits) == ids((40, 2), (30, 2), (10, 1))
    assert lineage.off_path == {CommitId(30, 1): "incarnation 2 took step 30 again"}


def test_the_path_skips_incarnations_that_nobody_went_on_from():
    fences = {1: None, 2: parent(10, 1), 3: parent(10, 1)}
    assert valid_commits(fences, ids((10, 1), (20, 2), (20, 3))) == ids((20, 3), (10, 1))


def test_limits_only_shrink_along_the_path():
    fences = {1: None, 2: parent(100, 1), 3: parent(50, 2)}
    assert valid_commits(fences, ids((40, 1), (60, 1), (45, 2), (110, 2))) == ids((45, 2), (40, 1))


def test_a_fresh_start_cuts_off_everything_before():
    assert valid_commits({1: None, 2: None}, ids((10, 1), (5, 2))) == ids((5, 2))


def test_a_late_fence_of_a_deposed_writer_changes_nothing():
    fences = {1: None, 3: parent(20, 1)}
    before = valid_commits(fences, ids((20, 1), (30, 3)))
    assert valid_commits({**fences, 2: parent(10, 1)}, ids((20, 1), (30, 3), (15, 2))) == before


def test_a_missing_fence_ends_the_path_after_its_own_commits():
    lineage = trace({3: parent(30, 2), 1: None}, ids((10, 1), (20, 2), (30, 2), (40, 3)))
    assert list(lineage.commits) == ids((40, 3), (30, 2), (20, 2))
    assert lineage.problems == ("incarnation 2 has no fence; history before it can't be told",)


def test_a_parent_that_is_not_older_ends_the_path_and_is_reported():
    for fences in ({2: parent(10, 2)}, {2: parent(10, 3), 1: None}, {2: parent(9, 1), 1: parent(9, 2)}):
        lineage = trace(fences, ids((5, 1), (7, 2)))
        assert lineage.commits[0] == CommitId(7, 2)
        assert any("not an older one" in problem for problem in lineage.problems)


def test_without_fences_no_commit_is_valid():
    lineage = trace({}, ids((10, 1)))
    assert not lineage.commits
    assert list(lineage.off_path) == ids((10, 1))


def test_an_unreadable_newest_fence_keeps_its_own_commits_and_what_is_older_than_they_are():
    lineage = trace({1: None}, ids((10, 1), (20, 1), (25, 1), (35, 1), (20, 2), (30, 2)), unreadable=[2])
    assert list(lineage.commits) == ids((30, 2), (20, 2), (10, 1))
    assert "can't be read" in lineage.problems[0]
    # Without a commit of its own, nothing tells where it went on from: the older incarnation's all count.
    assert valid_commits({1: None}, ids((10, 1))) == list(trace({1: None}, ids((10, 1)), unreadable=[2]).commits)


events = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, 6)),
        st.tuples(st.just("commit"), st.integers(1, 3)),
        st.tuples(st.just("zombie"), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=1500, deadline=None)
@given(events, st.randoms(use_true_random=False))
def test_the_path_is_the_newest_incarnations_own_history(happened, rng):
    run = History()
    run.start(0)
    for what, number in happened:
        if what == "start":
            run.start(number)
        elif what == "commit":
            run.commit(run.current, number)
        else:
            run.commit(rng.randint(1, run.current), number)
    shuffled = run.commits[:]
    rng.shuffle(shuffled)
    assert valid_commits(run.fences, shuffled) == run.history[run.current][::-1]


@settings(max_examples=1500, deadline=None)
@given(
    st.dictionaries(st.integers(1, 6), st.none() | st.builds(parent, st.integers(0, 8), st.integers(1, 7)), max_size=6),
    st.sets(st.tuples(st.integers(0, 8), st.integers(1, 6)).map(lambda p: CommitId(*p)), max_size=20),
    st.sets(st.integers(1, 6), max_size=2),
)
def test_any_records_at_all_give_what_the_naive_twin_gives(fences, commits, unreadable):
    assert valid_commits(fences, commits) == naive(fences, list(commits))
    # Whatever can't be read, it ends, no step is valid twice, and each commit is either on the path or has a reason.
    lineage = trace(fences, commits, unreadable)
    assert len({c.step for c in lineage.commits}) == len(lineage.commits)
    assert set(lineage.commits) | set(lineage.off_path) == commits
    assert not set(lineage.commits) & set(lineage.off_path)
    assert all(lineage.off_path.values())


def test_a_sample_of_long_histories_is_clean() -> None:
    assert not check(2000, seed=1)


@pytest.mark.parametrize("bug", ["limits grow", "off by one", "newest step wins", "fences first"])
def test_a_planted_bug_is_found(bug: str) -> None:
    assert check(2000, seed=1, bug=bug)

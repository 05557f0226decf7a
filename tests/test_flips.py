"""A sample of tests/flips.py, and that it sees what it looks for."""

from __future__ import annotations

import pytest
from flips import try_flips

from ckptrt import sources
from ckptrt.storage import verify


def test_every_flipped_bit_is_reported_and_none_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")
    tally = try_flips(300, seed=1)
    assert (tally.flips, tally.reported, tally.loaded) == (300, 300, 0), tally.wrong
    assert min(tally.outcomes.values()) > 10 and len(tally.outcomes) == 3, "every way to end was met"


def test_a_reader_that_does_not_compare_digests_is_found_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("ERROR")

    def unverified(tier, shard, tensors, reads, out, rank):
        for start, size in reads:
            tier.read_into("data/" + shard.name, start, out[start : start + size])

    monkeypatch.setattr(sources, "read_verified", unverified)
    assert try_flips(100, seed=1).loaded > 0


def test_a_verify_that_does_not_compare_digests_is_found_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("ERROR")
    monkeypatch.setattr(verify, "_bad_chunks", lambda *_: [])
    tally = try_flips(100, seed=1)
    assert tally.reported < tally.flips

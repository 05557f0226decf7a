"""Two jobs on one run where nothing locks it: the later one takes over, and the other says so and does no harm."""

from __future__ import annotations

from pathlib import Path

import pytest
from support_jobs import Job, wait_for
from support_s3 import S3Server, s3_server

from ckptrt.storage.verify import verify_commit

__all__ = ["s3_server"]  # fixtures

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_the_later_of_two_jobs_in_an_object_store_goes_on_alone(tmp_path: Path, s3_server: S3Server) -> None:
    """Also if the earlier one commits more often than the later one can look at the store."""
    url = f"{s3_server.url}/two-jobs"
    store = {"url": url, "environ": s3_server.env, "storage_options": s3_server.options}
    first = Job(folder=tmp_path / "first", steps=100_000, max_restarts=3, **store)  # type: ignore[arg-type]
    second = Job(folder=tmp_path / "second", steps=10**6, **store)  # type: ignore[arg-type]
    with first, second:
        first.launch()
        wait_for(lambda: first.reached(14), first)
        second.launch()
        assert first.finish() == 11, first.output  # told at its next save, and not started again
        wait_for(lambda: len(second.notes(0, "step")) > 20, second)
        second.process.terminate()
        assert second.finish() == 75, second.output
        assert "newer incarnation" in first.output or "is owned by" in first.output, first.output
        catalog = second.catalog()
        newest, *older = catalog.path().commits
        assert f"step {newest.step} is committed on all ranks" in second.output
        for commit in (newest, *older[:10], *older[-10:]):
            assert verify_commit(catalog, commit, read_data=True).is_ok
        assert first.remains() == second.remains() == []

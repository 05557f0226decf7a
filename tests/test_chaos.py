"""The public crash judge (https://pypi.org/project/ckpt-chaos/) kills a job at every file operation of its saves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

JOB = Path(__file__).with_name("chaos_job.py")


@pytest.mark.timeout(300)
def test_the_public_crash_judge_finds_no_torn_and_no_lost_checkpoint(tmp_path: Path) -> None:
    judged = subprocess.run(
        [
            sys.executable, "-m", "ckpt_chaos", "run", "--modes", "before", "--max-points", "1000", "--jobs", "2",
            "--step-regex", "resumed from step ([0-9]+)", "--result-file", "{out}/final", "--work", tmp_path / "work",
            "--", sys.executable, JOB, "{out}",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert judged.returncode == 0, judged.stdout + judged.stderr
    (events, points) = re.findall(r"(\d+) file events -> (\d+) crash points", judged.stdout)[0]
    assert events == points and int(points) > 40
    assert judged.stdout.rstrip().endswith(f"PASS: {int(points) + 1}"), judged.stdout  # and the run without a crash
    assert "PLAN DRIFT" not in judged.stdout

"""The agent of one node: leads the job, or takes part in it while another one leads.

Of the agents of a job, one has the lead in etcd. When it is lost its node is lost too, so the workers have to be
started again in any case: the others end theirs, one of them takes the lead, and goes on from what the last one noted.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import time
from functools import partial
from typing import Any

from ckptrt.agents.console import Console
from ckptrt.agents.coord import KeyValue
from ckptrt.agents.herald import Herald
from ckptrt.agents.hub import Hub
from ckptrt.agents.job import Job
from ckptrt.agents.joblink import JobLink, LinkNotice
from ckptrt.agents.jobnote import JobNote
from ckptrt.agents.loop import Loop
from ckptrt.agents.member import Leader, Member, Parted
from ckptrt.agents.node import Node
from ckptrt.agents.notices import NoticeWatch
from ckptrt.agents.restart import EXIT_LOCKED
from ckptrt.agents.supervisor import Supervisor
from ckptrt.agents.workers import WorkerGroup
from ckptrt.errors import CoordError

__all__ = ["Agent"]

_RETRY_S = 0.1


class Agent:
    """To be made and run on the main thread."""

    def __init__(self, job: Job, group: WorkerGroup, console: Console) -> None:
        self._job = job
        self._loop = Loop()
        self._node = Node(job, group, console, self._loop.selector)
        many = job.rules.max_nodes > 1
        self._link = JobLink(
            job.run,
            endpoints=job.etcd_endpoints,
            notify=self._notice,
            ttl_s=job.node_timeout_s,
            alone=not many,
        )
        self._herald = Herald(console, job.logs.directory)
        self._supervisor: Supervisor | None = None
        self._name = f"{job.node_name or socket.gethostname()}/{os.getpid()}"
        self._token = secrets.token_hex(16)
        self._hub = Hub(job.store_host, self._token, self._loop.selector, job.node_timeout_s) if many else None
        self._job_id = ""  # of the job that this agent has taken part in
        self._signum = 0  # that came while nobody led
        self._loop.take_signals([*job.signals, *job.drain_signals])
        self._notices: NoticeWatch | None = None
        if job.preempt_watch is not None:
            self._notices = NoticeWatch(*job.preempt_watch, self._told_to_go, self._warn)

    def run(self) -> int:
        """Take part in the job until it has ended; returns the exit code."""
        try:
            return self._run_alone() if self._hub is None else self._run_with_others(self._hub)
        finally:
            if self._notices is not None:
                self._notices.close()
            self._node.close()
            self._loop.finish_submitted()
            self._link.close()
            if self._supervisor is not None:  # it holds the run until all is written
                self._supervisor.close()
            if self._hub is not None:
                self._hub.close()
            self._herald.close()
            self._loop.close()

    def _run_alone(self) -> int:
        self._supervisor = Supervisor(self._job, self._loop, self._node, self._name, self._link, self._herald)
        return self._supervisor.run()

    def _run_with_others(self, hub: Hub) -> int:
        self._link.open()
        facts = {"node": self._name, "address": self._job.store_host, "port": hub.port, "token": self._token}
        problem = ""
        since_s = time.monotonic()
        while True:
            self._loop.on_signal = self._note_signal
            try:
                self._link.open()
                note = JobNote.read(self._link.read_job())
                if note is not None and note.id == self._job_id and note.ended is not None:
                    return note.ended
                holder = self._link.lead(facts)
                if (code := self._lead(hub, note) if holder is None else self._follow(holder)) is not None:
                    return code
                problem, since_s = "", time.monotonic()
            except CoordError as error:
                if time.monotonic() - since_s > self._job.rules.patience_s:
                    raise
                if error.what != problem:
                    self._herald.say("warn", f"there is no leader, and etcd can't be asked for one: {error.what}")
                problem = error.what
            self._pause()
            if self._signum:
                return 128 + self._signum

    def _lead(self, hub: Hub, note: JobNote | None) -> int | None:
        """Lead the job to its end, or until somebody else does."""
        taken_over = note if note is not None and note.id == self._job_id and self._job_id else None
        supervisor = Supervisor(
            self._job, self._loop, self._node, self._name, self._link, self._herald, hub=hub, taken_over=taken_over
        )
        self._supervisor = supervisor
        self._job_id = supervisor.notebook.note.id
        self._herald.say("node", f"{self._name} leads")
        self._herald.event("leads", node=self._name)
        code = supervisor.run()
        # Another leader's fence may be met before its key: then this one is no other job's, and takes part again.
        if self._link.deposed or (code == EXIT_LOCKED and self._link.has_lost_the_lead()):
            self._supervisor = None
            supervisor.close(deposed=True)
            hub.retire()
            self._link.retire()
            return None
        supervisor.notebook.finish(supervisor.state)
        hub.retire(None if supervisor.notebook.note.handed_over else code)
        return code

    def _follow(self, holder: KeyValue) -> int | None:
        """Take part while another one leads."""
        facts: dict[str, Any] = json.loads(holder.value)
        leader = Leader(
            node=str(facts.get("node", "?")),
            host=str(facts.get("address", "")),
            port=int(facts.get("port", 0)),
            token=str(facts.get("token", "")),
        )
        member = Member(self._job, self._loop, self._node, self._herald, self._name, self._job.node_timeout_s)
        parted: Parted = member.serve(leader)
        self._job_id = parted.job or self._job_id
        if parted.exit_code is not None:
            self._herald.say("done", f"{parted.why}, exit {parted.exit_code}")
            return parted.exit_code
        if parted.job:
            self._herald.say("node", parted.why)
        if parted.refused:
            self._link.depose(holder)  # its machine says that nobody listens there: the process is gone
        return None

    def _pause(self) -> None:
        until_s = time.monotonic() + _RETRY_S
        while not self._signum and (left_s := until_s - time.monotonic()) > 0:
            self._loop.turn((left_s,))

    def _note_signal(self, signum: int) -> None:
        if signum in self._job.signals or signum in self._job.drain_signals:
            self._signum = signum

    def _told_to_go(self, text: str) -> None:
        """On the thread that asks for notices."""
        self._loop.post(lambda: self._go(text))

    def _go(self, text: str) -> None:
        """As if a drain signal had come; but a second one, which stops all at once, this never is."""
        self._herald.say("signal", text)
        if not self._loop.signalled & {*self._job.signals, *self._job.drain_signals}:
            self._loop.on_signal(self._job.drain_signals[0] if self._job.drain_signals else signal.SIGTERM)

    def _warn(self, text: str) -> None:
        self._loop.post(lambda: self._herald.say("warn", text))

    def _notice(self, notice: LinkNotice) -> None:
        """On the lease keeper's thread."""
        self._loop.post(partial(self._noticed, notice))

    def _noticed(self, notice: LinkNotice) -> None:
        if self._supervisor is not None:
            self._supervisor.noticed(notice)

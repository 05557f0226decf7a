"""Keeps the note on a job of many nodes up to date in etcd."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from ckptrt.agents.joblink import JobLink
from ckptrt.agents.jobnote import JobNote
from ckptrt.agents.restart import State
from ckptrt.agents.world import World
from ckptrt.errors import CoordError

__all__ = ["Notebook"]


class Notebook:
    """submit: has a call done on the helper thread; None if nobody else will ever want to know."""

    def __init__(self, link: JobLink, note: JobNote | None, submit: Callable[..., None] | None) -> None:
        self.note = note or JobNote(id=uuid.uuid4().hex)
        self._link = link
        self._submit = submit
        self._is_asked = False  # a write is under way or about to be, and will write what is newest then

    def update(self, state: State, world: World | None, **changes: Any) -> None:
        """Note how the job stands."""
        nodes = tuple((place.node, place.num_local) for place in world.places) if world else ()
        self.note = replace(self.note.after(state), nodes=nodes, **changes)
        if self._submit is not None and not self._is_asked:
            self._is_asked = True
            self._submit(self._write)

    def finish(self, state: State) -> None:
        """Leave word of the end for nodes that don't hear of it from us."""
        ended = None if self.note.handed_over else state.exit_code
        self.note = replace(self.note.after(state), ended=ended)
        self._write()

    def _write(self) -> None:
        self._is_asked = False
        with contextlib.suppress(CoordError):  # a leader that can't write it can open no incarnation either
            self._link.write_job(asdict(self.note))

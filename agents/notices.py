"""Notices of a cloud that takes its machine back: asked for at the instance's metadata service, every few seconds.

aws    spot/instance-action, two minutes ahead; asked for with a session token (IMDSv2)
       https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
gcp    instance/preempted, half a minute ahead, and maintenance-event if it ends the machine
       https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
azure  scheduled events that preempt, end, restart or move this very machine
       https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from ckptrt.errors import UsageError

__all__ = ["CLOUDS", "NoticeWatch", "parse_watch"]

_EVERY_S = 5.0
_SLOWEST_S = 60.0
_TIMEOUT_S = 3.0
_ANSWER_MAX_BYTES = 1 << 20
_TOKEN_S = 21600
_AZURE_EVENTS = {"Preempt", "Terminate", "Reboot", "Redeploy"}

CLOUDS: Mapping[str, str] = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}


def parse_watch(text: str) -> tuple[str, str] | None:
    """The cloud and its metadata service's address in `aws`, or `aws=http://127.0.0.1:8000`; None for `none`."""
    if text in ("", "none"):
        return None
    cloud, _, address = text.partition("=")
    if cloud not in CLOUDS or (address and not address.startswith("http://")):
        raise UsageError(f"--ckpt-preempt-watch={text}: must be one of none, {', '.join(CLOUDS)}")
    return cloud, (address or CLOUDS[cloud]).rstrip("/")


class NoticeWatch:
    """Asks from a thread of its own. notify(text) is called there once, when there is a notice.

    warn(text): says once what is wrong with the service, until it answers again; it is asked more rarely then.
    """

    def __init__(
        self,
        cloud: str,
        address: str,
        notify: Callable[[str], None],
        warn: Callable[[str], None],
        every_s: float = _EVERY_S,
    ) -> None:
        self._look = {"aws": self._aws, "gcp": self._gcp, "azure": self._azure}[cloud]
        self._cloud = cloud
        self._address = address
        self._notify = notify
        self._warn = warn
        self._every_s = every_s
        self._token = ""
        self._machine = ""
        # A proxy would ask for the notices of its own machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckptrt-notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        failures = 0
        while not self._closed.wait(min(_SLOWEST_S, self._every_s * 2**failures) if failures else self._every_s):
            try:
                notice = self._look()
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                failures += 1
                if failures == 1:
                    self._warn(
                        f"{self._cloud}'s metadata service at {self._address} can't be asked for notices: {error};"
                        " it is tried again"
                    )
                continue
            failures = 0
            if notice:
                self._notify(f"{self._cloud} takes this machine back: {notice}")
                return

    # --- what each of them says; an empty text is no notice

    def _aws(self) -> str:
        for fresh in (False, True):
            if fresh or not self._token:
                lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
                self._token = self._ask("/latest/api/token", lifetime, method="PUT")
            try:
                told = self._ask("/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": self._token})
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return ""
                if error.code == 401 and not fresh:
                    continue  # the token has run out
                raise
            action = _object(told)
            return f"{action['action']} at {action.get('time', 'once')}"
        return ""

    def _gcp(self) -> str:
        flavor = {"Metadata-Flavor": "Google"}
        if self._ask("/computeMetadata/v1/instance/preempted", flavor).strip() == "TRUE":
            return "preempted, within half a minute"
        event = self._ask("/computeMetadata/v1/instance/maintenance-event", flavor).strip()
        return "host maintenance" if event == "TERMINATE_ON_HOST_MAINTENANCE" else ""

    def _azure(self) -> str:
        flavor = {"Metadata": "true"}
        if not self._machine:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._machine = self._ask(path, flavor).strip()
        told = _object(self._ask("/metadata/scheduledevents?api-version=2020-07-01", flavor))
        for event in told["Events"]:
            if event["EventType"] in _AZURE_EVENTS and self._machine in event["Resources"]:
                return f"{event['EventType']} not before {event.get('NotBefore') or 'now'}"
        return ""

    def _ask(self, path: str, headers: Mapping[str, str], method: str = "GET") -> str:
        request = urllib.request.Request(self._address + path, headers=dict(headers), method=method)
        with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
            return str(answer.read(_ANSWER_MAX_BYTES).decode(errors="replace"))


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"it answers {text[:80]!r}")
    return found

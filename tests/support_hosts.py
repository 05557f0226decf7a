"""Hosts for tests: network namespaces on one bridge, each of which can be cut off. Needs root and iproute2."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess

import pytest

__all__ = ["Hosts", "why_no_hosts"]


def _ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(args)}: {done.stderr.strip()}")


def why_no_hosts() -> str:
    """Why this machine can have none; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    name = f"ckt{secrets.token_hex(3)}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
        _ip("link", "add", f"{name}b", "type", "bridge")
        _ip("link", "del", f"{name}b")
    except OSError as error:
        return f"network namespaces are refused: {error}"
    return ""


class Hosts:
    """So many hosts with an address each; this machine is reached at `gateway`."""

    def __init__(self, count: int) -> None:
        if why := why_no_hosts():
            pytest.skip(why)
        mark = secrets.token_bytes(2)
        self._name = f"ck{mark.hex()}"
        self._net = f"10.{200 + mark[0] % 50}.{mark[1]}"
        self.count = count
        self.gateway = f"{self._net}.1"
        _ip("link", "add", self._bridge, "type", "bridge")
        try:
            _ip("addr", "add", f"{self.gateway}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for number in range(count):
                self._add(number)
        except OSError:
            self.close()
            raise

    @property
    def _bridge(self) -> str:
        return f"{self._name}b"

    def namespace(self, number: int) -> str:
        return f"{self._name}n{number}"

    def address(self, number: int) -> str:
        return f"{self._net}.{number + 10}"

    def command(self, number: int) -> list[str]:
        """What to put before a command that shall run there."""
        return ["ip", "netns", "exec", self.namespace(number)]

    def cut(self, number: int) -> None:
        """Nothing gets there any more, and nothing from there; nobody is told."""
        _ip("link", "set", f"{self._name}v{number}", "nomaster")

    def mend(self, number: int) -> None:
        _ip("link", "set", f"{self._name}v{number}", "master", self._bridge)

    def close(self) -> None:
        for number in range(self.count):
            subprocess.run(["ip", "netns", "del", self.namespace(number)], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", f"{self._name}v{number}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)

    def _add(self, number: int) -> None:
        space, outer, inner = self.namespace(number), f"{self._name}v{number}", f"{self._name}w{number}"
        _ip("netns", "add", space)
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
        _ip("link", "set", inner, "netns", space, "name", "eth0")
        _ip("link", "set", outer, "master", self._bridge, "up")
        for args in (
            ("addr", "add", f"{self.address(number)}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", space, *args)

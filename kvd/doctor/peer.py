"""Checks of other hosts: the library, the transport that would be used and why, the trust."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

from kvd.doctor.base import Finding, Host, check, fail, ok, warn

if TYPE_CHECKING:
    from kvd.config_transfer import TransferKnobs

LANE: Final = re.compile(r"\b(\w+/[\w:.-]+)\s")
SELFTEST_S: Final = 18.0
IDLE_MAX: Final = 0.1
"""Of a core, an agent; a progress thread that spins takes a whole one."""


def _unused(host: Host) -> str:
    """Return why there is nothing to check, or nothing."""
    if host.config is None:
        return "not looked at: no configuration"
    if not host.config.peer.address or not host.config.transfer.shared:
        return "not used: [peer] address and shared are not both set"
    return ""


@check("peer-trust", "peer", "certificates or key between hosts")
def trust(host: Host) -> Finding:
    """They can be read, and belong together."""
    why = _unused(host)
    if why or host.config is None:
        return ok(why)
    from kvd.errors import StartError
    from kvd.peer.security import credentials

    try:
        found = credentials(host.config.transfer)
    except StartError as error:
        return fail(str(error), "openssl x509 -in CERT -noout -text shows what is in it")
    if found.key:
        return warn(
            "a pre-shared key: nothing is encrypted, loopback only",
            "set [peer] tls_cert, tls_key and tls_ca (docs/peers.md)",
        )
    return ok(f"mutual TLS with {host.config.transfer.tls_cert}")


@check("ucx", "peer", "what carries chunks to other hosts, and why")
def ucx(host: Host) -> Finding:
    """NIXL works, over the transport that is configured, at a rate that makes sense."""
    why = _unused(host)
    if why or host.config is None:
        return ok(why)
    from kvd.peer.devices import devices_of
    from kvd.peer.nixl_agent import missing

    knobs = host.config.transfer
    lack = missing(knobs.transport, str(host.path("/sys/class/infiniband")))
    if lack:
        return fail(lack, "ibv_devinfo shows the devices and ports there are")
    chosen = knobs.devices or devices_of(host.config.peer.address)
    return _judge(_selftest(knobs, chosen), knobs, chosen)


def _selftest(knobs: TransferKnobs, devices: tuple[str, ...]) -> dict[str, Any]:
    """Run the self-test in a process of its own, as a mover would be run."""
    from kvd.peer.nixl_agent import environment

    told = {**os.environ, **environment(knobs.transport, devices), "UCX_PROTO_INFO": "y"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvd.peer.selftest"],
            env=told,
            capture_output=True,
            text=True,
            timeout=SELFTEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"the self-test did not end within {SELFTEST_S:.0f} s"}
    output = done.stdout + done.stderr
    if done.returncode:
        return {"error": (output.strip().splitlines() or ["no word"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.rindex("{") :])
    table = [line for line in output.splitlines() if "|" in line]
    found["lanes"] = sorted({lane for line in table for lane in LANE.findall(line)})
    return found


def _judge(found: dict[str, Any], knobs: TransferKnobs, devices: tuple[str, ...]) -> Finding:
    if "error" in found:
        return fail(f"NIXL: {found['error']}", "pip install 'kvd[peer]'; then look at devices")
    lanes = ", ".join(found["lanes"]) or "lanes unknown"
    where = f"the device of address: {', '.join(devices)}" if devices else "any device"
    where = f"devices {', '.join(devices)}" if knobs.devices else where
    text = (
        f'{lanes}, because transport = "{knobs.transport}" and {where};'
        f" {found['gbps']:.2f} GB/s with itself, {100 * found['idle_cpu']:.0f} % of a core idle"
    )
    if not found["right"]:
        return fail(f"wrong bytes: {text}", "test the memory and the card of this host")
    strange = [
        lane for lane in found["lanes"] if lane.startswith("tcp") != (knobs.transport == "tcp")
    ]
    if strange:
        return fail(f"another transport: {text}", "set [peer] devices to the devices that have it")
    if found["idle_cpu"] > IDLE_MAX:
        return warn(f"spins while idle: {text}", "use a NIXL release named in constraints.txt")
    if not devices:
        return warn(text, "set [peer] devices, or a management network may be used")
    return ok(text)

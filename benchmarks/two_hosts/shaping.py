"""The two links of a host: rates set by tc's token bucket, and the counters of the one between hosts."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.two_hosts.hosts import DEVICE, Host
from layerwise.errors import UnsupportedError

LOOPBACK = "lo"
# A bucket holds what may pass at once: a few packets, but one of lo's 64 KB at least.
BURST_BYTES = {DEVICE: 32 << 10, LOOPBACK: 128 << 10}
# So much may queue that nothing is dropped: dropped packets would be sent, and counted, twice.
QUEUE_BYTES = 64 << 20
# Ethernet 14, IPv4 20, TCP 20, TCP timestamps 12: in front of the payload of every packet, data or acknowledgement.
HEADER_BYTES = 66


def shape(device: str, bytes_per_s: float, host: Host | None = None) -> None:
    """Limit what leaves through an interface of a host, by default of the one this runs on. Raises UnsupportedError."""
    words = ["tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{round(8 * bytes_per_s)}bit"]
    words += ["burst", str(BURST_BYTES[device]), "limit", str(QUEUE_BYTES)]
    words = host.command(*words) if host else words
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnsupportedError(
            f"`{' '.join(words)}` failed: {done.stderr.strip()}; this needs a kernel with the queue discipline tbf"
        )


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What has left through DEVICE since it was made."""

    wire_bytes: int
    packets: int

    @property
    def payload_bytes(self) -> int:
        """Without headers: a packet has HEADER_BYTES of them however large it is."""
        return self.wire_bytes - HEADER_BYTES * self.packets

    def since(self, before: Sent) -> Sent:
        """What left after `before` was read."""
        return Sent(wire_bytes=self.wire_bytes - before.wire_bytes, packets=self.packets - before.packets)


def read_sent() -> Sent:
    """The counters of this host's DEVICE."""
    folder = Path("/sys/class/net") / DEVICE / "statistics"
    wire_bytes, packets = (int((folder / name).read_text()) for name in ("tx_bytes", "tx_packets"))
    return Sent(wire_bytes=wire_bytes, packets=packets)

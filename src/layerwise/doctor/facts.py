"""What one rank knows of its machine and itself, without asking another."""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import struct
from contextlib import suppress
from importlib import metadata

import torch

from layerwise.data.config import DataConfig
from layerwise.data.documents import DocumentReader
from layerwise.data.sources import open_source
from layerwise.errors import DataError, LayerwiseError
from layerwise.spec import Record
from layerwise.train.launch import pick_device, under_torchrun

PACKAGES = ("layerwise", "torch", "numpy", "ortools", "transformers", "flash-attn", "triton")
_SIOCGIFADDR = 0x8915  # ioctl(2), netdevice(7): the IPv4 address of an interface


class Network(Record):
    """How a rank reaches others.

    interfaces: IPv4 address by name. own_name_address: what the host's name resolves to, which gloo binds to unless it
    is told an interface. rendezvous: HOST:PORT where torchrun's ranks meet. towards_rendezvous: own address on the way.
    """

    interfaces: dict[str, str]
    own_name_address: str | None
    rendezvous: str | None = None
    rendezvous_address: str | None = None
    towards_rendezvous: str | None = None
    gloo_interface: str | None = None
    nccl_interface: str | None = None


class DataFacts(Record):
    """What a host sees of the data: files of all sources, or why the first row of one cannot be read."""

    num_files: int = 0
    error: str | None = None


class Facts(Record):
    """One rank. versions: None for what is not installed. memory_bytes, device_index: of a GPU only."""

    host: str
    local_rank: int
    local_ranks: int
    versions: dict[str, str | None]
    backend: str
    device: str
    device_index: int | None
    num_gpus: int
    memory_bytes: int | None
    network: Network
    data: DataFacts | None = None


def rank_facts(device: torch.device, local_rank: int, local_ranks: int, data: DataConfig | None) -> Facts:
    """The facts of this rank, which runs on `device`; the first rank of a host looks at the data."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return Facts(
        host=socket.gethostname(),
        local_rank=local_rank,
        local_ranks=local_ranks,
        versions=_versions(),
        backend="nccl" if gpu else "gloo",
        device=gpu.name if gpu else f"CPU, {len(os.sched_getaffinity(0))} cores",
        device_index=device.index,
        num_gpus=torch.cuda.device_count(),
        memory_bytes=gpu.total_memory if gpu else None,
        network=_network(),
        data=_look_at_data(data) if data is not None and local_rank == 0 else None,
    )


def own_facts(device: str) -> Facts:
    """The facts of a process that could not meet the others."""
    environment = {
        key: int(os.environ.get(key, default)) for key, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    }
    return rank_facts(pick_device(device), environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"], None)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        found[name] = None
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    found["cuda"] = torch.version.cuda
    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None
    return found


def _network() -> Network:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    rendezvous = _resolve(host) if under_torchrun() and host else None
    return Network(
        interfaces=_interfaces(),
        own_name_address=_resolve(socket.gethostname()),
        rendezvous=f"{host}:{port}" if under_torchrun() else None,
        rendezvous_address=rendezvous,
        towards_rendezvous=_own_address_towards(rendezvous) if rendezvous else None,
        gloo_interface=os.environ.get("GLOO_SOCKET_IFNAME"),
        nccl_interface=os.environ.get("NCCL_SOCKET_IFNAME"),
    )


def _interfaces() -> dict[str, str]:
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _resolve(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


def _own_address_towards(address: str) -> str | None:
    """Which of this host's addresses packets to `address` leave from; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
    return None


def _look_at_data(config: DataConfig) -> DataFacts:
    """Open every source and read its first row."""
    try:
        reader, num_files = DocumentReader.of(config), 0
        for source_config in config.sources.values():
            source = open_source(source_config)
            num_files += len(source.files)
            first = next(reader.for_column(source_config.text_field).read(source.read()), None)
            if first is None:
                raise DataError(f"source={source_config.source!r} has no rows")
            if isinstance(first[1], DataError) and config.bad_rows == "error":
                raise first[1]
    except (LayerwiseError, OSError) as error:
        return DataFacts(error=str(error))
    return DataFacts(num_files=num_files)

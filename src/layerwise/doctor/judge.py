"""From the facts of all ranks to findings. No process group, no measurement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from layerwise.doctor.check import Check, ok, warning, wrong
from layerwise.doctor.clock import ClockOffset
from layerwise.doctor.facts import Facts, Network
from layerwise.doctor.folders import FolderFacts
from layerwise.labels import counted, format_bytes, format_seconds
from layerwise.spec import ClusterSpec

# Beyond this, log lines and file times of different hosts cannot be put in order.
MAX_SKEW_S = 0.5
# torchrun's c10d rendezvous takes a host for dead whose last sign of life is older than this, each by its own clock:
# keep_alive_interval x keep_alive_max_attempt of torch.distributed.elastic's dynamic_rendezvous.
RENDEZVOUS_SKEW_S = 15.0
# Ranks that differ in these may not even understand one another.
_MUST_BE_EQUAL = ("layerwise", "torch", "cuda", "nccl")


def judge_versions(facts: Sequence[Facts]) -> Check:
    """The same software on all ranks."""
    name = "versions"
    different = {
        package: values
        for package in facts[0].versions
        if len(values := _by_value(facts, lambda f, p=package: f.versions[p] or "not there")) > 1  # type: ignore[misc]
    }
    found = ", ".join(f"{package} {version}" for package, version in facts[0].versions.items() if version)
    if not different:
        return ok(name, found)
    found = "; ".join(f"{package}: {_says(values)}" for package, values in different.items())
    advice = "install the same version on all hosts"
    return (wrong if set(different) & set(_MUST_BE_EQUAL) else warning)(name, found, advice)


def judge_shape(facts: Sequence[Facts], cluster: ClusterSpec | None) -> Check:
    """Ranks in order of hosts, equally many on each, and as many as the config says."""
    name, per_host = "ranks", Counter(f.host for f in facts)
    found = f"{counted(len(facts), 'rank')} on {counted(len(per_host), 'host')}"
    if len(set(per_host.values())) > 1:
        counts = ", ".join(f"{host}: {count}" for host, count in per_host.items())
        return wrong(name, f"{found} ({counts})", "start equally many ranks on each host (--nproc-per-node)")
    ranks_per_node = facts[0].local_ranks
    if any(f.host != facts[rank - rank % ranks_per_node].host for rank, f in enumerate(facts)):
        return wrong(name, f"{found}, but ranks of one host do not follow one another", "start ranks with torchrun")
    if cluster is None:
        return ok(name, found)
    asked = f"the config has num_nodes={cluster.num_nodes} x ranks_per_node={cluster.ranks_per_node}"
    if len(per_host) == 1 and facts[0].network.rendezvous is None:
        return ok(name, f"{found}, one node's; {asked}")
    if (len(facts), ranks_per_node) == (cluster.num_ranks, cluster.ranks_per_node):
        return ok(name, f"{found}, as the config says")
    if len(facts) == cluster.num_ranks and ranks_per_node % cluster.ranks_per_node == 0:
        return warning(
            name,
            f"{found}, {ranks_per_node} on each; {asked}",
            f"set cluster.ranks_per_node={ranks_per_node}, or mean it",
        )
    return wrong(
        name,
        f"{found}, {ranks_per_node} on each; {asked}",
        f"set cluster.num_nodes={len(per_host)} and cluster.ranks_per_node={ranks_per_node}, or start what it says",
    )


def judge_devices(facts: Sequence[Facts], cluster: ClusterSpec | None) -> Check:
    """A device of its own for each rank, all of one sort."""
    name, kinds = "devices", _by_value(facts, lambda f: f.device)
    backend = facts[0].backend
    found = f"{_says(kinds) if len(kinds) > 1 else facts[0].device}, over {backend}"
    if len({f.backend for f in facts}) > 1:
        return wrong(
            name, found, "some hosts have no GPU that torch can use: look at nvidia-smi there, or use device=cpu"
        )
    shared = [key for key, count in Counter((f.host, f.device_index) for f in facts).items() if count > 1]
    if backend == "nccl" and shared:
        host, index = shared[0]
        return wrong(name, f"several ranks of {host} use GPU {index}", "start one rank per GPU")
    if backend == "gloo" and facts[0].num_gpus:
        advice = f"start the ranks with torchrun --nproc-per-node {facts[0].num_gpus} to use them"
        return warning(name, f"{found}, but {facts[0].host} has {facts[0].num_gpus} GPUs", advice)
    if len(kinds) > 1:
        return warning(name, found, "every layer waits for the slowest device: use equal ones")
    memory = facts[0].memory_bytes
    if cluster and cluster.memory_bytes and memory and cluster.memory_bytes > memory:
        found += f" with {format_bytes(memory)}; the config has memory_bytes={cluster.memory_bytes:g}"
        return wrong(name, found, f"set cluster.memory_bytes to at most {memory}")
    return ok(name, found)


def judge_network(facts: Sequence[Facts]) -> Check:
    """Which interface the ranks use and where they meet."""
    name, first = "network", facts[0].network
    several = len({f.host for f in facts}) > 1
    for f in facts:
        fault = _interface_fault(f, several)
        if fault is not None:
            return wrong(name, *fault)
    if first.rendezvous is None:
        return ok(name, "ranks of this host alone, which meet in a file")
    used = _by_value(facts, lambda f: _used_interface(f.network, f.backend))
    return ok(name, f"ranks meet at {first.rendezvous}; {_says(used)}")


def _interface_fault(facts: Facts, several_hosts: bool) -> tuple[str, str] | None:
    """(what is wrong, what to do), or None."""
    network, variable = facts.network, f"{facts.backend.upper()}_SOCKET_IFNAME"
    chosen = network.gloo_interface if facts.backend == "gloo" else network.nccl_interface
    names = ", ".join(f"{name} {address}" for name, address in network.interfaces.items())
    if chosen and not any(_is_chosen(name, chosen, facts.backend) for name in network.interfaces):
        return f"{facts.host}: {variable}={chosen}, but its interfaces are {names}", f"set {variable} to one of them"
    if not several_hosts:
        return None
    if _is_loopback(network.rendezvous_address):
        return (
            f"{facts.host}: ranks are to meet at {network.rendezvous}, {network.rendezvous_address}: each host itself",
            "give --rdzv-endpoint an address that all hosts reach",
        )
    own = network.own_name_address
    if facts.backend == "gloo" and not chosen and (own is None or _is_loopback(own)):
        return (
            f"{facts.host}: gloo binds to what its own name resolves to, {own or 'nothing'}; interfaces: {names}",
            f"set {variable} to the interface that the other hosts reach",
        )
    return None


def _is_chosen(interface: str, chosen: str, backend: str) -> bool:
    """gloo takes names; NCCL prefixes, exact names after '=', and all but the named after '^'."""
    if backend == "gloo":
        return interface in chosen.split(",")
    sign, names = (chosen[0], chosen[1:]) if chosen[0] in "=^" else ("", chosen)
    match = any(interface == n if sign == "=" else interface.startswith(n) for n in names.split(","))
    return match != (sign == "^")


def _is_loopback(address: str | None) -> bool:
    return address is not None and address.startswith("127.")


def _used_interface(network: Network, backend: str) -> str:
    chosen = network.gloo_interface if backend == "gloo" else network.nccl_interface
    if chosen:
        return f"{backend} on {chosen}"
    address = network.own_name_address if backend == "gloo" else network.towards_rendezvous
    names = [name for name, own in network.interfaces.items() if own == address]
    return f"{backend} on {names[0] if names else address}"


def judge_clocks(facts: Sequence[Facts], offsets: Sequence[ClockOffset]) -> Check:
    """Clocks of the other hosts against that of rank 0, each by the rank that knows it best."""
    name = "clocks"
    best: dict[str, ClockOffset] = {}
    for f, offset in zip(facts, offsets, strict=True):
        if f.host != facts[0].host and (f.host not in best or offset.error_s < best[f.host].error_s):
            best[f.host] = offset
    if not best:
        return ok(name, "one host, one clock")
    host, offset = max(best.items(), key=lambda item: abs(item[1].offset_s))
    away = f"{format_seconds(abs(offset.offset_s))} {'ahead of' if offset.offset_s > 0 else 'behind'}"
    found = f"{host} is {away} {facts[0].host}, give or take {format_seconds(offset.error_s)}"
    surely_s = abs(offset.offset_s) - offset.error_s
    if surely_s > RENDEZVOUS_SKEW_S:
        advice = f"set the clocks (NTP, chrony): torchrun drops hosts whose clocks are {RENDEZVOUS_SKEW_S:g} s apart"
        return wrong(name, found, advice)
    if surely_s > MAX_SKEW_S:
        return warning(name, found, "set the clocks (NTP, chrony): log lines of different hosts cannot be put in order")
    return ok(name, found)


def judge_folder(
    name: str, facts: Sequence[Facts], folders: Sequence[FolderFacts], *, needed_bytes: int, must_be_shared: bool
) -> Check:
    """One folder, the same on all hosts, writable, with room for `needed_bytes`."""
    path, free_bytes = folders[0].path, min(folder.free_bytes for folder in folders)
    hosts = "on all hosts the same one, " if len({f.host for f in facts}) > 1 else ""
    writers = range(len(facts)) if must_be_shared else [0]
    for rank in writers:
        if folders[rank].error is not None:
            found = f"{path}: {facts[rank].host} cannot write there: {folders[rank].error}"
            return wrong(name, found, "make it, change its owner, or name another folder")
    blind = list(dict.fromkeys(f.host for f, folder in zip(facts, folders, strict=True) if not folder.sees_token))
    if blind:
        found = f"{path}: {', '.join(blind)} does not see what {facts[0].host} writes there"
        if must_be_shared:
            return wrong(name, found, "name a folder on a file system that all hosts share")
        return warning(name, found, "without checkpoints only rank 0 writes there; share it to resume")
    if free_bytes < needed_bytes:
        found = f"{path}: {format_bytes(free_bytes)} free, of {format_bytes(needed_bytes)} that checkpoints take"
        return wrong(name, found, "make room, name another folder, or lower checkpoint.keep")
    return ok(name, f"{path}: {hosts}writable, {format_bytes(free_bytes)} free")


def judge_data(facts: Sequence[Facts]) -> Check:
    """The first row of every source on every host, and equally many files."""
    name, looked = "data", [(f.host, f.data) for f in facts if f.data is not None]
    for host, data in looked:
        if data.error is not None:
            return wrong(name, f"{host}: {data.error}", "see docs/data.md; every host reads the data itself")
    counts = {host: data.num_files for host, data in looked}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{host} has {count:,} files" for host, count in counts.items())
        return wrong(name, found, "give all hosts the same data, e.g. on a file system that they share")
    where = f"on each of {len(counts)} hosts" if len(counts) > 1 else "here"
    return ok(name, f"{looked[0][1].num_files:,} files, the first row of every source can be read {where}")


def _by_value(facts: Sequence[Facts], value: Callable[[Facts], str]) -> dict[str, list[str]]:
    """Hosts by what they have, in order of ranks."""
    found: dict[str, list[str]] = {}
    for f in facts:
        hosts = found.setdefault(value(f), [])
        if f.host not in hosts:
            hosts.append(f.host)
    return found


def _says(values: dict[str, list[str]]) -> str:
    """ "2.8 on a, b; 2.9 on c", or the value alone where all have it."""
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(f"{value} on {_few(hosts)}" for value, hosts in values.items())


def _few(hosts: list[str]) -> str:
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")

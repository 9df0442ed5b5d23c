"""Peak FLOP/s and memory of devices, from datasheets: MFU is a share of the former, a plan must fit into the latter.

Also the memory and cores of this machine that the process may use.
"""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpt.errors import UserError, did_you_mean

PROC = Path("/proc/self")

# Of matrix products in float16 and bfloat16 with float32 sums, dense (datasheets also print twice that, for matrices
# half of which is zeros), in TFLOP/s. Sources: NVIDIA's datasheet of each product, and for GeForce and RTX the tables
# at the end of its papers "Ampere GA102", "Ada" and "RTX Blackwell GPU Architecture". Each is also multiprocessors ×
# operations a clock × boost clock, which a test computes. Names are matched whole: a part of a GPU (MIG) and a laptop's
# GPU have the name of a larger one in theirs, and their peaks are not known.
_TFLOPS: dict[str, float] = {
    r"B200": 2250,
    r"GH200 .*": 989.4,
    r"H200": 989.4,
    r"H200 NVL": 835.5,
    r"H100 \d+GB HBM3|H100 SXM5.*": 989.4,
    r"H100 PCIe": 756.5,
    r"H100 NVL": 835.5,
    r"A100-(SXM4|SXM|PCIE|PCIe)-\d+GB|A100 \d+GB PCIe": 312,
    r"A40": 149.7,
    r"A30": 165,
    r"A10": 125,
    r"RTX A6000": 154.8,
    r"L40S": 362.05,
    r"L40": 181.05,
    r"L4": 121,
    r"RTX 6000 Ada Generation": 364.2,
    r"GeForce RTX 5090": 209.5,
    r"GeForce RTX 4090": 165.2,
    r"GeForce RTX 3090": 71,
}
_TFLOPS_FLOAT16_ALONE: dict[str, float] = {  # no bfloat16 in their tensor cores
    r"V100-SXM2-\d+GB.*": 125,
    r"V100-PCIE-\d+GB": 112,
    r"V100S-PCIE-\d+GB": 130,
    r"T4": 65,
}


def peak_flops(name: str, dtype: str) -> float | None:
    """FLOP/s of matrix products in ``dtype`` on the device of this name; None where it is not known, as for float32,
    which may or may not be computed as TF32."""
    known = {"bfloat16": _TFLOPS, "float16": _TFLOPS | _TFLOPS_FLOAT16_ALONE}.get(dtype, {})
    product = re.sub(r"^(NVIDIA|Tesla) ", "", name)
    return next((1e12 * tflops for pattern, tflops in known.items() if re.fullmatch(pattern, product)), None)


@dataclass(frozen=True)
class Kind:
    """A kind of device that one can plan for."""

    name: str  # CUDA's for it
    memory: int  # bytes

    def peak(self, dtype: str) -> float | None:
        """FLOP/s of matrix products in ``dtype``; None where it is not known."""
        return peak_flops(self.name, dtype)


def _kind(name: str, gigabytes: int) -> Kind:
    return Kind(name, gigabytes * 10**9)


# The memory is the datasheets', in gigabytes of 10⁹ bytes; what CUDA says is there differs by up to 7 % either way.
KINDS: dict[str, Kind] = {
    "b200-180gb": _kind("B200", 180),
    "gh200-96gb": _kind("GH200 480GB", 96),
    "h200-141gb": _kind("H200", 141),
    "h200-nvl-141gb": _kind("H200 NVL", 141),
    "h100-80gb": _kind("H100 80GB HBM3", 80),
    "h100-pcie-80gb": _kind("H100 PCIe", 80),
    "h100-nvl-94gb": _kind("H100 NVL", 94),
    "a100-80gb": _kind("A100-SXM4-80GB", 80),
    "a100-40gb": _kind("A100-SXM4-40GB", 40),
    "a40-48gb": _kind("A40", 48),
    "a30-24gb": _kind("A30", 24),
    "a10-24gb": _kind("A10", 24),
    "l40s-48gb": _kind("L40S", 48),
    "l40-48gb": _kind("L40", 48),
    "l4-24gb": _kind("L4", 24),
    "v100-32gb": _kind("V100-SXM2-32GB", 32),
    "v100-16gb": _kind("V100-SXM2-16GB", 16),
    "t4-16gb": _kind("T4", 16),
    "rtx-6000-ada-48gb": _kind("RTX 6000 Ada Generation", 48),
    "rtx-a6000-48gb": _kind("RTX A6000", 48),
    "rtx-5090-32gb": _kind("GeForce RTX 5090", 32),
    "rtx-4090-24gb": _kind("GeForce RTX 4090", 24),
    "rtx-3090-24gb": _kind("GeForce RTX 3090", 24),
}


def find_kind(name: str) -> Kind:
    """The kind of that name; ``cpu`` is this machine. Raises `UserError` for one that is not known."""
    if name == "cpu":
        return Kind("cpu", host_memory())
    if name not in KINDS:
        raise UserError(f'there is no kind of device "{name}"', did_you_mean(name, [*KINDS, "cpu"]))
    return KINDS[name]


def host_memory() -> int:
    """Returns the bytes of memory that this process may use, free or not: the machine's, or the limit of a cgroup, such
    as a container's."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        physical = 8 * 2**30  # Windows has no sysconf; a common size
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")  # of versions 2, 2 and 1
    limits = [numbers[0] for group in _cgroups("memory") for name in names if (numbers := _numbers(group / name))]
    return min([physical, *limits])


def cores() -> int:
    """Returns how many cores this process may use: those of its affinity, or the CPU quota of a cgroup, rounded up."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _cgroups("cpu"):
        quota = _numbers(group / "cpu.max")  # version 2: quota and period
        quota = quota or _numbers(group / "cpu.cfs_quota_us") + _numbers(group / "cpu.cfs_period_us")
        if len(quota) == 2 and min(quota) > 0:  # -1 is no quota
            count = min(count, math.ceil(quota[0] / quota[1]))
    return count


def _cgroups(controller: str) -> Iterator[Path]:
    """Yields the folders of this process's cgroups, and of their ancestors as far as they are mounted, in which Linux
    shows the limits of ``controller``: ``memory`` or ``cpu``."""
    try:
        own = [line.split(":", 2) for line in (PROC / "cgroup").read_text().splitlines()]
        mounts = [line.split(" - ", 1) for line in (PROC / "mountinfo").read_text().splitlines()]
    except OSError:  # not Linux, or no /proc
        return
    paths = {name: path for _, names, path in own for name in names.split(",")}  # that of version 2 has no name
    for mount, system in mounts:
        root, place = mount.split()[3:5]
        kind, _, options = system.split(" ", 2)
        name = "" if kind == "cgroup2" else controller if kind == "cgroup" else None
        if name in paths and name in ("", *options.split(",")):
            below = Path(paths[name])
            below = below.relative_to(root) if below.is_relative_to(root) else Path()
            yield from (Path(place, each) for each in (below, *below.parents) if ".." not in each.parts)


def _numbers(path: Path) -> list[int]:
    """Returns the numbers in a file; none if there is no such file, or no limit, ``max``."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []

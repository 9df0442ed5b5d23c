"""Peak FLOP/s and memory of devices, from datasheets, and this process's memory and cores."""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpt.system.errors import UserError, did_you_mean

PROC = Path("/proc/self")


@dataclass(frozen=True)
class Kind:
    """A device type to plan for."""

    names: str  # regular expression for the full name that CUDA reports
    memory: int  # bytes
    tflops: float = 0  # 0 if unknown
    bfloat16: bool = True  # whether tensor cores support bfloat16

    def peak(self, dtype: str) -> float | None:
        """Returns the FLOP/s of matrix products in ``dtype``, or None if unknown. Float32 is unknown, because it can
        run as TF32."""
        is_known = dtype == "float16" or (dtype == "bfloat16" and self.bfloat16)
        return 1e12 * self.tflops if is_known and self.tflops else None


_A100, _V100 = r"A100-(SXM4|SXM|PCIE|PCIe)-\d+GB|A100 \d+GB PCIe", r"V100-SXM2-\d+GB.*"
# Memory is from datasheets, in gigabytes of 10⁹ bytes; CUDA reports up to 7 % more or less. TFLOP/s are for dense
# matrix products in float16 and bfloat16 with float32 sums. Datasheets also print twice as much, for sparse matrices.
# Sources are NVIDIA's datasheets, and for GeForce and RTX the tables at the end of its papers "Ampere GA102", "Ada" and
# "RTX Blackwell GPU Architecture". A test compares TFLOP/s with multiprocessors × operations per clock × boost clock.
# Names must match in full. Names of laptop GPUs and of partitions (MIG), whose peaks are unknown, contain the name of a
# larger GPU.
_SPECIFICATIONS: dict[str, tuple[str, int, float]] = {
    "b200-180gb": (r"B200", 180, 2250),
    "gh200-96gb": (r"GH200 .*", 96, 989.4),
    "h200-141gb": (r"H200", 141, 989.4),
    "h200-nvl-141gb": (r"H200 NVL", 141, 835.5),
    "h100-80gb": (r"H100 \d+GB HBM3|H100 SXM5.*", 80, 989.4),
    "h100-pcie-80gb": (r"H100 PCIe", 80, 756.5),
    "h100-nvl-94gb": (r"H100 NVL", 94, 835.5),
    "a100-80gb": (_A100, 80, 312),
    "a100-40gb": (_A100, 40, 312),
    "a40-48gb": (r"A40", 48, 149.7),
    "a30-24gb": (r"A30", 24, 165),
    "a10-24gb": (r"A10", 24, 125),
    "l40s-48gb": (r"L40S", 48, 362.05),
    "l40-48gb": (r"L40", 48, 181.05),
    "l4-24gb": (r"L4", 24, 121),
    "v100-32gb": (_V100, 32, 125),
    "v100-16gb": (_V100, 16, 125),
    "v100s-32gb": (r"V100S-PCIE-\d+GB", 32, 130),
    "v100-pcie-32gb": (r"V100-PCIE-\d+GB", 32, 112),
    "t4-16gb": (r"T4", 16, 65),
    "rtx-6000-ada-48gb": (r"RTX 6000 Ada Generation", 48, 364.2),
    "rtx-a6000-48gb": (r"RTX A6000", 48, 154.8),
    "rtx-5090-32gb": (r"GeForce RTX 5090", 32, 209.5),
    "rtx-4090-24gb": (r"GeForce RTX 4090", 24, 165.2),
    "rtx-3090-24gb": (r"GeForce RTX 3090", 24, 71),
}
KINDS: dict[str, Kind] = {
    name: Kind(names, gigabytes * 10**9, tflops, not name.startswith(("v100", "t4")))
    for name, (names, gigabytes, tflops) in _SPECIFICATIONS.items()
}


def peak_flops(name: str, dtype: str) -> float | None:
    """Returns the FLOP/s of matrix products in ``dtype`` on the device that CUDA calls ``name``, or None if unknown."""
    product = re.sub(r"^(NVIDIA|Tesla) ", "", name)
    kind = next((candidate for candidate in KINDS.values() if re.fullmatch(candidate.names, product)), None)
    return None if kind is None else kind.peak(dtype)


def find_kind(name: str) -> Kind:
    """Returns a device type by name; ``cpu`` is this machine. Raises `UserError` for an unknown name."""
    if name == "cpu":
        return Kind("cpu", host_memory())
    if name not in KINDS:
        raise UserError(f'there is no kind of device "{name}"', did_you_mean(name, [*KINDS, "cpu"]))
    return KINDS[name]


def host_memory() -> int:
    """Returns the memory that this process can have, in bytes, free or in use: the machine's memory, or a lower limit
    of its cgroups."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        physical = 8 * 2**30  # Windows has no sysconf, so assume 8 GiB.
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")  # Two for cgroup version 2, one for version 1.
    limits = [numbers[0] for group in _cgroups("memory") for name in names if (numbers := _numbers(group / name))]
    return min([physical, *limits])


def cores() -> int:
    """Returns the number of cores in this process's affinity, limited by its cgroup's CPU quota, rounded up."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _cgroups("cpu"):
        quota = _numbers(group / "cpu.max")  # Cgroup version 2 has quota and period in one file.
        quota = quota or _numbers(group / "cpu.cfs_quota_us") + _numbers(group / "cpu.cfs_period_us")
        if len(quota) == 2 and min(quota) > 0:  # A quota of -1 means none.
            count = min(count, math.ceil(quota[0] / quota[1]))
    return count


def _cgroups(controller: str) -> Iterator[Path]:
    """Yields the folders with this process's limits of ``controller`` (``memory`` or ``cpu``): its mounted cgroups and
    their ancestors."""
    try:
        memberships = [line.split(":", 2) for line in (PROC / "cgroup").read_text().splitlines()]
        mounts = [line.split(" - ", 1) for line in (PROC / "mountinfo").read_text().splitlines()]
    except OSError:  # Not Linux, or /proc is missing.
        return
    # Cgroup version 2 has an empty controller name.
    paths = {name: path for _, names, path in memberships for name in names.split(",")}
    for mount, system in mounts:
        root, mount_point = mount.split()[3:5]
        fs_type, _, options = system.split(" ", 2)
        name = "" if fs_type == "cgroup2" else controller if fs_type == "cgroup" else None
        if name in paths and name in ("", *options.split(",")):
            relative = Path(paths[name])
            relative = relative.relative_to(root) if relative.is_relative_to(root) else Path()
            yield from (Path(mount_point, group) for group in (relative, *relative.parents) if ".." not in group.parts)


def _numbers(path: Path) -> list[int]:
    """Returns the numbers in a file. Returns an empty list if the file is missing or contains ``max``, which means no
    limit."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []

"""What devices can compute at most, by the name that CUDA gives them: what MFU is a share of."""

import re

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

"""What `make bench` runs: this machine's floors, then ours and the peers in one go. Writes benchmarks/RESULTS.md.

    python -m benchmarks.run [TEXT]

TEXT is tinyshakespeare, as a file; without it the catalogue's is fetched.
"""

import json
import math
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.results import SCRIPTS, command, machine, median_seconds, write_section
from gpt.text import catalogue


def floors() -> list[str]:
    """What this machine can do at most: matrix products and memory."""
    capabilities = torch.cpu.get_capabilities()
    has = ", ".join(name for name in ("avx512_f", "avx512_bf16", "amx_bf16") if capabilities.get(name)) or "neither"
    lines = [f"- torch {torch.__version__}, {torch.get_num_threads()} threads; {has}"]
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(2048, 2048).to(dtype)
        rate = 2 * 2048**3 / median_seconds(lambda a=a: a @ a) / 1e9
        lines.append(f"- matrix product 2048³ in {str(dtype)[6:]}: {rate:,.0f} GFLOP/s")
    big = torch.ones(2**27)
    lines.append(f"- reading memory: {big.nbytes / median_seconds(big.sum) / 1e9:.1f} GB/s")
    return lines


def start_up() -> list[str]:
    """Whole processes, beside transformers' own command."""
    rows = ["| command | seconds, median of 5 |", "|---|---:|"]
    for args in (["gpt", "--help"], ["gpt", "params", "gpt3-175b"], ["transformers", "--help"]):
        path = str(SCRIPTS / args[0])
        rows.append(f"| `{' '.join(args)}` | {median_seconds(lambda p=path, a=args: command(p, *a[1:])):.2f} |")
    return rows


def ours(text: str, folder: Path, *options: str) -> dict[str, float]:
    """``gpt train TEXT`` in a process of its own, with the time of the whole command."""
    started = time.perf_counter()
    out = command(str(SCRIPTS / "gpt"), "train", text, "--json", "--quiet", *options, cwd=folder)
    values: dict[str, float] = json.loads(out.splitlines()[-1])
    return values | {"whole_seconds": time.perf_counter() - started}


def nanogpt_recipe(text: str) -> tuple[float, float]:
    """nanoGPT's recipe for a CPU (its README: 4 layers of 128, 64 characters of context, batch 12, 2,000 steps of
    AdamW, float32) on transformers' GPT-2. Gives held-out nats a character and seconds."""
    started = time.perf_counter()
    torch.manual_seed(1337)
    characters = sorted(set(text))
    ids = torch.tensor([characters.index(c) for c in text])
    cut = round(0.9 * len(ids))
    config = GPT2Config(
        vocab_size=len(characters), n_positions=64, n_layer=4, n_head=4, n_embd=128,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(2000):
        progress = (step - 100) / 1900
        rate = 1e-3 * step / 100 if step < 100 else 1e-4 + 0.45e-3 * (1 + math.cos(math.pi * progress))
        optimizer.param_groups[0]["lr"] = rate
        starts = torch.randint(cut - 65, (12,))
        windows = torch.stack([ids[s : s + 65] for s in starts.tolist()])
        logits = model(windows[:, :-1]).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    held_out = ids[cut:]
    count = (len(held_out) - 1) // 64
    x, y = held_out[: count * 64].view(count, 64), held_out[1 : count * 64 + 1].view(count, 64)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten()).item()
    return loss, time.perf_counter() - started


def training(shakespeare: Path) -> list[str]:
    """The loss that the default command reaches, beside nanoGPT's recipe, in the same run."""
    rows = [
        "| system | text | whole time | nats a byte | bits a byte | parameters | tokens/s |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("tinyshakespeare", str(shakespeare)), ("pydocs", "pydocs")):
            got = ours(text, Path(folder))
            nats = got["bits_per_byte"] * math.log(2)
            rows.append(
                f"| `gpt train`, defaults | {name} | {got['whole_seconds']:.0f} s | {nats:.4f} | "
                f"{got['bits_per_byte']:.4f} | {got['parameters']:,} | {got['tokens_per_second']:,.0f} |"
            )
    for name, text in (
        ("tinyshakespeare", shakespeare.read_text(encoding="utf-8")),
        ("pydocs", "".join(source.open().read().decode() for source in catalogue.sources("pydocs"))),
    ):
        loss, seconds = nanogpt_recipe(text)
        # Characters are bytes in the one text; in the other all but a few are.
        per_byte = loss * len(text) / len(text.encode())
        rows.append(
            f"| nanoGPT's CPU recipe, on transformers | {name} | {seconds:.0f} s | {per_byte:.4f} | "
            f"{per_byte / math.log(2):.4f} | | {2000 * 12 * 64 / seconds:,.0f} |"
        )
    return rows


def main() -> None:
    """Runs all of it and writes the page."""
    if len(sys.argv) > 1:
        shakespeare = Path(sys.argv[1]).resolve()
    else:
        (shakespeare,) = catalogue.fetch("shakespeare")
    how = machine("python -m benchmarks.run")
    write_section("Floors", [*how, *floors()])
    write_section("Start-up", [*how, "", *start_up()])
    write_section("Training: held-out loss with default settings, whole command", [*how, "", *training(shakespeare)])


if __name__ == "__main__":
    main()

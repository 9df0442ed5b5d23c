"""Generates with another system in a separate process, as `gpt sample` does: loads a model, generates, exits.

    python -m benchmarks.peers llama.cpp FILE.gguf IDS NEW TEXTS BATCH
    python -m benchmarks.peers transformers FOLDER IDS NEW TEXTS BATCH

IDS is a prompt as JSON. Generates TEXTS texts of NEW tokens greedily, in batches of BATCH, ignoring end-of-text. Prints
the ids of each text as JSON. `benchmarks.decode` times these commands.
"""

import http.client
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def llama_cpp(path: str, ids: list[int], new: int, texts: int, batch: int) -> list[list[int]]:
    """Generates with llama.cpp's server on all cores, with a slot and a client thread for each text of a batch. The
    server's defaults include a float16 cache and flash attention."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_gpu_layers, params.n_parallel, params.verbosity = 0, batch, 1
    params.n_ctx = batch * -(-(len(ids) + new) // 256) * 256
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.warmup = params.fit_params = params.ui = False
    server = xllamacpp.Server(params)
    address = server.listening_address.removeprefix("http://")
    # The default samplers would sort the logits; greedy decoding needs only the maximum.
    body = json.dumps({
        "prompt": ids, "n_predict": new, "temperature": 0, "samplers": ["temperature"], "ignore_eos": True,
        "cache_prompt": False, "return_tokens": True,
    })  # fmt: skip

    def generate(_: int) -> list[int]:
        connection = http.client.HTTPConnection(address, timeout=600)
        connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
        return list(json.load(connection.getresponse())["tokens"])

    with ThreadPoolExecutor(batch) as pool:
        return list(pool.map(generate, range(texts)))


def transformers(path: str, ids: list[int], new: int, texts: int, batch: int) -> list[list[int]]:
    """Generates with Transformers' ``generate`` and its KV cache, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    x = torch.tensor([ids] * texts)
    ids_of_texts: list[list[int]] = []
    for rows in x.split(batch):
        out = model.generate(
            rows, attention_mask=torch.ones_like(rows), do_sample=False, max_new_tokens=new, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        ids_of_texts += out[:, len(ids) :].tolist()
    return ids_of_texts


SYSTEMS: dict[str, Callable[[str, list[int], int, int, int], list[list[int]]]] = {
    "llama.cpp": llama_cpp,
    "transformers": transformers,
}

if __name__ == "__main__":
    name, path, ids, *numbers = sys.argv[1:]
    print(json.dumps(SYSTEMS[name](path, json.loads(ids), *map(int, numbers))))

"""Serves a .gguf file with llama.cpp until standard input ends, and prints the address.

    python -m benchmarks.llama_server FILE [--exact] [--threads N] [--clients N --context N --port N]

Other benchmarks start this module as a process. With --exact, KV cache and attention are float32. With --clients,
each client has a slot with a context of N tokens (256); otherwise one client has the model's context.
"""

import argparse
import sys

import xllamacpp

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file")
parser.add_argument("--exact", action="store_true")
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--clients", type=int)
parser.add_argument("--context", type=int, default=256)
parser.add_argument("--port", type=int)
args = parser.parse_args()

params = xllamacpp.CommonParams()
params.model.path = args.file
params.n_gpu_layers, params.n_parallel, params.verbosity = 0, args.clients or 1, 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
if args.clients:
    params.n_ctx = args.clients * args.context
if args.port:
    params.port = args.port
if args.exact:  # Flash attention would use a float16 cache.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.warmup = params.fit_params = params.ui = False
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
del server

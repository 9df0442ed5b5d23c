"""The process in which `benchmarks.llama_cpp` has llama.cpp run. It imports nothing else, so that it starts quickly.

    python -m benchmarks.llama_server FILE [--exact]

Serves a file until standard input ends, and prints where. With --exact, keys, values and attention are float32.
"""

import sys

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_gpu_layers, params.n_parallel, params.verbosity = 0, 1, 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
if sys.argv[2:] == ["--exact"]:  # flash attention would put keys and values in float16
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.warmup = params.fit_params = params.ui = False
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
del server

"""Log-probabilities of all ids after prompts, as llama.cpp computes them for a GGUF file.

    llama_cpp_logprobs.py FILE.gguf OUT.npy < PROMPTS, a list of lists of ids in JSON

A process of its own, since llama.cpp aborts at what it does not like. It keeps keys and values in float32 here; by
default they are float16. Id 65 is chosen always: with a part
of a character it would give no log-probabilities.
"""

import json
import sys
import urllib.request

import numpy as np
import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx = 0  # the model's
params.n_parallel = 1
params.warmup = params.fit_params = False
params.port = 0
params.cpuparams.n_threads = 1
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(params)
found = []
for prompt in json.load(sys.stdin):
    asked = {
        "prompt": prompt, "n_predict": 1, "n_probs": 2**20, "cache_prompt": False, "samplers": [],
        "logit_bias": [[65, 1000.0]],
    }  # fmt: skip
    url = f"{server.listening_address}/completion"
    request = urllib.request.Request(url, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        given = {
            each["id"]: each["logprob"] for each in json.load(answer)["completion_probabilities"][0]["top_logprobs"]
        }
    found.append([given[id] for id in range(len(given))])
np.save(sys.argv[2], np.array(found))

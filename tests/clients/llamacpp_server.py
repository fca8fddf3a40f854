"""A real llama.cpp server as a process of its own: `llamacpp_server.py MODEL.gguf PORT SLOTS CONTEXT_PER_SLOT`. Runs until SIGTERM."""

import signal
import sys

import xllamacpp

model, port, slots, context = sys.argv[1], *map(int, sys.argv[2:5])
params = xllamacpp.CommonParams()
params.model.path = model
params.model_alias = {"toy"}
params.hostnames = ["127.0.0.1"]
params.port = port
params.n_parallel = slots
params.n_ctx = slots * context
params.cont_batching = True
params.endpoint_metrics = True
params.endpoint_slots = True
params.warmup = False
# No prompt comes twice, so none is kept in host memory when its slot goes to another.
params.cache_ram_mib = 0
params.cpuparams.n_threads = 1
params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
print(f"listening on {server.listening_address}", flush=True)
signal.sigwait({signal.SIGTERM, signal.SIGINT})

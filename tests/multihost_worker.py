"""One of several processes: python multihost_worker.py FOLDER MESH COORDINATOR PROCESS COUNT MODE."""

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from specinfer_jax import LLM, SamplingParams, Speculation
from specinfer_jax.parallel import multihost
from specinfer_jax.serving.device import Device

folder, mesh, coordinator, process, count, mode = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
multihost.initialize(coordinator, int(count), int(process), silence=10)

counts: list[list[int]] = []
steps = Device.steps


def counted_steps(self, most, **options):
    report = steps(self, most, **options)
    counts.append(np.asarray(report.committed_B).tolist())
    return report


Device.steps = counted_steps
try:
    llm = LLM(
        folder, mesh=mesh, max_model_len=64, max_num_seqs=2, dtype="float32",
        speculation=Speculation(ssms=[folder + "-ssm"], tree="2,1", ngram=True),
    )  # fmt: skip
    print("READY", flush=True)
    prompts = ["one two three one two", "x", "the the the the"]
    params = [
        SamplingParams(temperature=0, max_tokens=9),
        SamplingParams(temperature=1, seed=3, max_tokens=12, logprobs=2),
        SamplingParams(temperature=0.7, top_p=0.9, max_tokens=5, prompt_logprobs=1, stop=["zz"]),
    ]
    out = llm.generate(prompts, params)
    print(json.dumps({"ids": [o.outputs[0].token_ids for o in out]}), flush=True)
    while mode == "for ever":
        llm.generate(prompts, params)
finally:
    print(json.dumps({"counts": counts}), flush=True)

"""The bare engine: plays plans on openvino-genai's ContinuousBatchingPipeline, in order of arrival, in one process.

bare.py MODEL RUNNING STEP_TOKENS THREADS

Each line of standard input is a plan (see `language_bench.plans`); a line of output has what came of it.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino_genai as genai
from openvino import Tensor

MODEL, RUNNING, STEP_TOKENS, THREADS = sys.argv[1], *map(int, sys.argv[2:])
scheduling = genai.SchedulerConfig()
scheduling.cache_size = 1
scheduling.max_num_seqs = RUNNING
scheduling.max_num_batched_tokens = STEP_TOKENS + RUNNING
scheduling.dynamic_split_fuse = True
scheduling.enable_prefix_caching = True
PIPELINE: Any = genai.ContinuousBatchingPipeline(Path(MODEL), scheduling, "CPU", {"INFERENCE_NUM_THREADS": THREADS})


def play(plan: dict[str, Any]) -> dict[str, Any]:
    """Play the streams of a plan; return each call as [stream, seconds of its sending, [[seconds, tokens], ...]]."""
    began, used = time.monotonic(), time.process_time()
    waiting = sorted(((each["at"], number, 0) for number, each in enumerate(plan["streams"])), reverse=True)
    running: dict[Any, tuple[int, int, list[Any]]] = {}
    done = []
    while waiting or running:
        now = time.monotonic() - began
        if plan["until"] and now > plan["until"]:
            break
        while waiting and waiting[-1][0] <= now:
            at, stream, number = waiting.pop()
            ids, tokens = plan["streams"][stream]["calls"][number]
            config = genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos = tokens, True
            handle = PIPELINE.add_request(time.monotonic_ns(), Tensor(np.array([ids], np.int64)), config)
            running[handle] = (stream, number, [])
            done.append([stream, at, running[handle][2]])
        if not running:
            time.sleep(max(0.0, waiting[-1][0] - now))
            continue
        PIPELINE.step()
        now = time.monotonic() - began
        for handle, (stream, number, came) in list(running.items()):
            while handle.can_read():
                for output in handle.read().values():
                    came.append([now, len(output.generated_ids)])
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                del running[handle]
                if number + 1 < len(plan["streams"][stream]["calls"]):
                    waiting.append((now, stream, number + 1))
                    waiting.sort(reverse=True)
    seconds, cpu_s = time.monotonic() - began, time.process_time() - used
    for handle in running:
        handle.cancel()
    while PIPELINE.has_non_finished_requests():
        PIPELINE.step()
    return {"seconds": seconds, "cpu_s": cpu_s, "calls": done}


print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps(play(json.loads(line))), flush=True)

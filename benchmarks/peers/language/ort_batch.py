"""onnxruntime-genai in one process: plays plans whose streams all begin at once, with calls of one length.

ort_batch.py FOLDER

FOLDER: a model as `python -m onnxruntime_genai.models.builder` writes it. The n-th calls of all streams are one batch
of its Generator, the way in which it is quickest. Lines of standard input and output are those of `bare.py`.
"""

import json
import sys
import time
from typing import Any

import numpy as np
import onnxruntime_genai as genai

MODEL = genai.Model(sys.argv[1])


def play(plan: dict[str, Any]) -> dict[str, Any]:
    """Play the streams of a plan; return its calls as `bare.py` does."""
    began, used = time.monotonic(), time.process_time()
    done = []
    for calls in zip(*(stream["calls"] for stream in plan["streams"]), strict=True):
        prompts, length = np.array([ids for ids, _ in calls], np.int32), len(calls[0][0]) + calls[0][1]
        params = genai.GeneratorParams(MODEL)
        params.set_search_options(batch_size=len(calls), min_length=length, max_length=length, do_sample=False)
        generator, came = genai.Generator(MODEL, params), []
        sent = time.monotonic() - began
        generator.append_tokens(prompts)
        while not generator.is_done():
            generator.generate_next_token()
            came.append([time.monotonic() - began, 1])
        done += [[stream, sent, came] for stream in range(len(calls))]
    seconds, cpu_s = time.monotonic() - began, time.process_time() - used
    return {"calls": done, "seconds": seconds, "cpu_s": cpu_s}


print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps(play(json.loads(line))), flush=True)

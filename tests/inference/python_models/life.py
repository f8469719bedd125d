"""Writes the calls of its methods into the file that the environment variable TRACE names."""

import os

import numpy as np
import triton_python_backend_utils as pb_utils

from . import words


def note(text):
    with open(os.environ["TRACE"], "a") as trace:
        trace.write(text + "\n")


class TritonPythonModel:
    def initialize(self, args):
        note(f"initialize {args['model_instance_name']} {words.TEXT}")

    def execute(self, requests):
        answers = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[0, 0].decode()
            note(f"execute {text}")
            if text == "slow":
                with open(os.path.join(os.path.dirname(os.environ["TRACE"]), "gate"), "rb", 0) as gate:
                    gate.read(1)
            if text == "die":
                os._exit(1)
            said = np.array([[words.TEXT.encode()]], dtype=np.object_)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("said", said)]))
        return answers

    def finalize(self):
        note("finalize")

"""Decoupled, with a coroutine: the shorter wait answers first."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        (request,) = requests
        sender = request.get_response_sender()
        n = int(pb_utils.get_input_tensor_by_name(request, "n").as_numpy()[0])
        if n < 0:
            raise ValueError("counts from zero")
        await asyncio.sleep(n / 10)
        response = pb_utils.InferenceResponse([pb_utils.Tensor("i", np.array([n], np.int32))])
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

"""A decoupled model with a coroutine: it answers request n after request n - 1, in whatever order they arrive."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.answered = 0
        self.turn = asyncio.Condition()

    async def execute(self, requests):
        (request,) = requests
        sender = request.get_response_sender()
        n = int(pb_utils.get_input_tensor_by_name(request, "n").as_numpy()[0])
        if n < 0:
            raise ValueError("counts from zero")
        response = pb_utils.InferenceResponse([pb_utils.Tensor("i", np.array([n], np.int32))])
        async with self.turn:
            await self.turn.wait_for(lambda: self.answered == n - 1)
            sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            self.answered = n
            self.turn.notify_all()

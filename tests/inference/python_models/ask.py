"""Calls other models; the input `how` says in which way."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        known = [each["name"] for each in config.as_dict()["input"]]
        if "how" not in known:
            config.add_input({"name": "how", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "said", "data_type": "TYPE_STRING", "dims": [-1]})
        config.set_max_batch_size(0)
        return config

    async def execute(self, requests):
        return [await self.one(request) for request in requests]

    async def one(self, request):
        how, _, rest = pb_utils.get_input_tensor_by_name(request, "how").as_numpy()[0].decode().partition(" ")
        try:
            texts = await getattr(self, how)(request, rest)
        except pb_utils.TritonModelException as error:
            texts = [f"raised: {error.message()}"]
        return pb_utils.InferenceResponse([pb_utils.Tensor("said", np.array(texts, dtype=np.object_))])

    def double(self, value):
        x = pb_utils.Tensor("x", np.full((1, 4), value, np.float32))
        return pb_utils.InferenceRequest(model_name="double", requested_output_names=["y"], inputs=[x])

    async def sync(self, request, rest):
        response = self.double(float(rest)).exec()
        return [float(pb_utils.get_output_tensor_by_name(response, "y").as_numpy()[0, 0])]

    async def many(self, request, rest):
        asked = [self.double(float(i)).async_exec() for i in range(int(rest))]
        return [float(each.output_tensors()[0].as_numpy()[0, 0]) for each in await asyncio.gather(*asked)]

    async def stream(self, request, rest):
        n = pb_utils.Tensor("n", np.array([int(rest)], np.int32))
        asking = pb_utils.InferenceRequest(model_name="repeat", requested_output_names=["i"], inputs=[n])
        found = []
        for response in asking.exec(decoupled=True):
            if response.has_error():
                found.append(response.error().message())
            elif response.output_tensors():
                found.append(int(response.output_tensors()[0].as_numpy()[0]))
        return found

    def repeat(self, number):
        n = pb_utils.Tensor("n", np.array([number], np.int32))
        return pb_utils.InferenceRequest(model_name="repeat", requested_output_names=["i"], inputs=[n])

    def counted(self):
        """Return how many responses `repeat` has sent, and how many of its senders have noticed that nobody reads."""
        (response,) = (each for each in self.repeat(-1).exec(decoupled=True) if each.output_tensors())
        return divmod(int(response.output_tensors()[0].as_numpy()[0]), 1000)

    async def few(self, request, rest):
        """Take a few of endless responses and give up; returns how many were sent meanwhile, and how they ended."""
        sent, stopped = self.counted()
        responses = self.repeat(-6).exec(decoupled=True)
        for _ in range(3):
            next(responses)
        while self.counted()[0] - sent < 3 + 16:
            await asyncio.sleep(0.002)
        ahead = max(self.counted()[0] for _ in range(30)) - sent
        if rest == "cancel":
            responses.cancel()
            ends = [each.error().code() for each in responses if each.has_error()]
        else:
            del responses
            ends = []
        while self.counted()[1] == stopped:
            await asyncio.sleep(0.002)
        return [ahead, *ends]

    async def model(self, request, rest):
        """Call another model of this kind: `<name> <how>`."""
        name, _, how = rest.partition(" ")
        text = pb_utils.Tensor("how", np.array([how.encode()], dtype=np.object_))
        asking = pb_utils.InferenceRequest(model_name=name, requested_output_names=["said"], inputs=[text])
        response = await asking.async_exec()
        if response.has_error():
            return [f"{response.error().code()} {response.error().message()}"]
        return [each.decode() for each in response.output_tensors()[0].as_numpy()]

    async def text(self, request, rest):
        text = pb_utils.Tensor("text", np.array([[rest.encode()]], dtype=np.object_))
        asking = pb_utils.InferenceRequest(model_name="behave", requested_output_names=["said"], inputs=[text])
        response = await asking.async_exec()
        return [response.error().message() if response.has_error() else "answered"]

    async def time(self, request, rest):
        """Return how much time the called model has, and how much this one had."""
        text = pb_utils.Tensor("text", np.array([[b"remaining"]], dtype=np.object_))
        response = pb_utils.InferenceRequest(
            model_name="behave", requested_output_names=["said"], inputs=[text], timeout=int(rest or 0)
        ).exec()
        return [response.output_tensors()[0].as_numpy()[0, 0].decode(), request.deadline_remaining_s()]

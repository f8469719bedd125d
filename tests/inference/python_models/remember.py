"""Sums up the inputs of each sequence in memory of its own, and checks the controls that it is sent. Dies of -1."""

import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}
        self.passes_on = args["model_name"] == "passes_on"

    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def pass_on(self, request):
        """Send the step to the model `sum`, as a step of a sequence there."""
        step = pb_utils.InferenceRequest(
            model_name="sum",
            requested_output_names=["OUTPUT"],
            inputs=[pb_utils.get_input_tensor_by_name(request, "INPUT")],
            correlation_id=request.correlation_id(),
            flags=request.flags(),
        )
        return step.exec()

    def respond(self, request):
        if self.passes_on:
            return self.pass_on(request)
        sequence, flags = request.correlation_id(), request.flags()
        start = bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
        end = bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
        told = pb_utils.get_input_tensor_by_name(request, "START").as_numpy()
        if told.shape != (1, 1) or bool(told[0, 0]) != start:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"START is {told}"))
        total = 0 if start else self.sums.get(sequence, 0)
        value = int(pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()[0, 0])
        if value == -1:
            os._exit(1)
        self.sums[sequence] = total + value
        output = pb_utils.Tensor("OUTPUT", np.array([[self.sums[sequence]]], np.int32))
        if end:
            del self.sums[sequence]
        return pb_utils.InferenceResponse([output])

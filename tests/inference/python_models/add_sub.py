"""Sum and difference of two tensors, written like the examples of Triton's documentation."""

import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.model_config = json.loads(args["model_config"])
        output0 = pb_utils.get_output_config_by_name(self.model_config, "OUTPUT0")
        output1 = pb_utils.get_output_config_by_name(self.model_config, "OUTPUT1")
        self.output0_dtype = pb_utils.triton_string_to_numpy(output0["data_type"])
        self.output1_dtype = pb_utils.triton_string_to_numpy(output1["data_type"])
        print("initialized", args["model_instance_name"])

    def execute(self, requests):
        responses = []
        for request in requests:
            in_0 = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            in_1 = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            out_0, out_1 = in_0 + in_1, in_0 - in_1
            responses.append(
                pb_utils.InferenceResponse(
                    output_tensors=[
                        pb_utils.Tensor("OUTPUT0", out_0.astype(self.output0_dtype)),
                        pb_utils.Tensor("OUTPUT1", out_1.astype(self.output1_dtype)),
                    ]
                )
            )
        return responses

    def finalize(self):
        print("Cleaning up...")

"""A model with metrics of its own; a request's text says what to do with them."""

import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.kinds = pb_utils.MetricFamily
        self.calls = self.kinds("calls_of_model", "Calls \\ of\nthe model", self.kinds.COUNTER)
        self.all = self.calls.Metric()
        self.load = self.kinds("load_of_model", "Load", self.kinds.GAUGE).Metric(labels={"of": 'x"y'})
        self.sizes = self.kinds("sizes_of_model", "Sizes", self.kinds.HISTOGRAM).Metric(buckets=[1, 2.5])
        self.made = {}

    def execute(self, requests):
        return [self.one(pb_utils.get_input_tensor_by_name(each, "text").as_numpy().flat[0]) for each in requests]

    def one(self, text):
        word, _, rest = text.decode().partition(" ")
        found = ""
        try:
            match word:
                case "add":
                    self.all.increment(float(rest))
                    found = self.all.value()
                case "set":
                    self.load.set(float(rest))
                case "observe":
                    self.sizes.observe(float(rest))
                case "make":
                    self.made[rest] = self.calls.Metric(labels={"at": rest})
                    self.made[rest].increment(1)
                case "drop":
                    self.made.pop(rest, None)
                case "family":
                    self.kinds(rest, "", self.kinds.GAUGE)
                case "wrong":
                    eval(rest, {"self": self})
                case "exit":
                    os._exit(3)
        except pb_utils.TritonModelException as error:
            found = error
        said = np.array([[str(found).encode()]], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("said", said)])

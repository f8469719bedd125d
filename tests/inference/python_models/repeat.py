"""A decoupled model: it sends `n` responses from a thread of its own. Negative numbers choose special behaviour."""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def number(i):
    return pb_utils.InferenceResponse([pb_utils.Tensor("i", np.array([i], np.int32))])


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        auto_complete_model_config.add_input({"name": "n", "data_type": "TYPE_INT32", "dims": [1]})
        auto_complete_model_config.add_output({"name": "i", "data_type": "TYPE_INT32", "dims": [1]})
        auto_complete_model_config.set_max_batch_size(0)
        auto_complete_model_config.set_model_transaction_policy({"decoupled": True})
        return auto_complete_model_config

    def initialize(self, args):
        self.sent = 0
        self.stopped = 0
        self.go = threading.Event()

    def execute(self, requests):
        for request in requests:
            n = int(pb_utils.get_input_tensor_by_name(request, "n").as_numpy()[0])
            if n == -8:  # one response, then never another word, and the instance with it
                request.get_response_sender().send(number(8))
                threading.Event().wait()
            threading.Thread(target=self.respond, args=(request.get_response_sender(), n), daemon=True).start()

    def respond(self, sender, n):
        if n == -1:  # how many were sent in all, and how many senders saw that nobody reads
            sender.send(number(self.sent * 1000 + self.stopped), flags=FINAL)
            return
        if n == -2:  # an error in the middle
            sender.send(number(0))
            error = pb_utils.TritonError("enough", pb_utils.TritonError.UNAVAILABLE)
            sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
            return
        if n == -3:  # forgotten
            sender.send(number(7))
            return
        if n == -4:  # wait for -5, which comes later and ends first
            self.go.wait(240)
            sender.send(number(4), flags=FINAL)
            return
        if n == -5:
            sender.send(number(5), flags=FINAL)
            self.go.set()
            return
        if n == -6:  # until nobody reads
            while not sender.is_cancelled():
                sender.send(number(self.sent))
                self.sent += 1
                time.sleep(0.001)
            self.stopped += 1
            sender.send(flags=FINAL)
            return
        if n == -7:  # one response, then never another word
            sender.send(number(7))
            threading.Event().wait()
        for i in range(n):
            sender.send(number(i), flags=FINAL if i == n - 1 else 0)
            self.sent += 1
        if n == 0:
            sender.send(flags=FINAL)

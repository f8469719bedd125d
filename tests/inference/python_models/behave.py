"""Does what the first word of its text says, and answers with text."""

import contextlib
import ctypes
import gc
import json
import os
import signal
import stat
import subprocess
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def said(text, **more):
    array = np.array([[str(text).encode()]], dtype=np.object_)
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("said", array)], **more)


class Kept:
    """What a model loads."""


class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        self.executions = 0
        self.kept = [Kept() for _ in range(1000)]
        if "fail" in json.loads(args["model_config"])["parameters"]:
            raise ValueError("no weights here")
        if "path" in json.loads(args["model_config"])["parameters"]:
            open("/srv/secret/keys/weights.bin")
        if "spawn" in json.loads(args["model_config"])["parameters"]:
            with open(json.loads(args["model_config"])["parameters"]["spawn"]["string_value"], "w") as file:
                file.write(str(subprocess.Popen(["sleep", "600"]).pid))
        if "deaf" in json.loads(args["model_config"])["parameters"]:
            for each in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):
                    if not stat.S_ISSOCK(os.fstat(each).st_mode):
                        os.close(each)
            os.setpgid(0, os.getpgid(os.getppid()))
            ctypes.PyDLL(None).pause()  # keeps the interpreter's lock
        if "hang" in json.loads(args["model_config"])["parameters"]:
            threading.Event().wait()

    def execute(self, requests):
        self.executions += 1
        self.size = len(requests)
        if os.environ.get("SEEN"):
            with open(os.environ["SEEN"], "a") as seen:
                seen.writelines(
                    pb_utils.get_input_tensor_by_name(r, "text").as_numpy()[0, 0].decode() + "\n" for r in requests
                )
        words = [pb_utils.get_input_tensor_by_name(r, "text").as_numpy()[0, 0].decode() for r in requests]
        if "short" in words:
            return []
        return [self.one(request, word) for request, word in zip(requests, words, strict=True)]

    def one(self, request, text):
        word, _, rest = text.partition(" ")
        match word:
            case "walked":  # objects that a collection walks
                return said(sum(type(each) is Kept for each in gc.get_objects()))
            case "pid":
                return said(os.getpid())
            case "size":
                time.sleep(0.05)
                return said(self.size)
            case "exit":
                os._exit(int(rest))
            case "segv":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "hang":
                threading.Event().wait()
            case "raise":
                raise KeyError(rest)
            case "complain":
                raise pb_utils.TritonModelException(rest)
            case "error":
                code = getattr(pb_utils.TritonError, rest)
                return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"it is {rest}", code))
            case "none":
                return None
            case "number":
                array = np.array([[1.5]], dtype=np.float32)
                return pb_utils.InferenceResponse([pb_utils.Tensor("said", array)])
            case "shape":
                array = np.full(json.loads(rest), b"x", dtype=np.object_)
                return pb_utils.InferenceResponse([pb_utils.Tensor("said", array)])
            case "trace":
                return said(request.trace().get_context())
            case "dims":  # more than a message may have
                array = np.frombuffer(b"\6\0\0\0" + rest.encode(), np.uint8).reshape((1,) * 39 + (-1,))
                return pb_utils.InferenceResponse([pb_utils.Tensor("said", array)])
            case "nothing":
                return pb_utils.InferenceResponse([])
            case "left":
                began = time.monotonic()
                while not request.is_cancelled():
                    time.sleep(0.002)
                self.seen = f"{time.monotonic() - began:.3f} {request.deadline_remaining_s():.3f}"
                time.sleep(0.05)  # the server's own timer answers first
                return said("left")
            case "seen":
                return said(getattr(self, "seen", ""))
            case "remaining":
                return said(request.deadline_remaining_s())
            case "about":
                return said(
                    json.dumps(
                        {
                            "id": request.request_id(),
                            "parameters": json.loads(request.parameters()),
                            "outputs": request.requested_output_names(),
                            "correlation": request.correlation_id(),
                            "flags": request.flags(),
                            "timeout": request.timeout(),
                            "model": request.model_name(),
                            "version": request.model_version(),
                            "args": {key: value for key, value in self.args.items() if key != "model_config"},
                            "folder": pb_utils.get_model_dir(),
                        }
                    ),
                    parameters={"kept": True, "how": "well"},
                )
            case "sender":
                sender = request.get_response_sender()
                sender.send(said("sent"), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                return None
            case "missing":
                return said(getattr(pb_utils, rest))
            case "large":
                return said("x" * int(rest))
            case "lie":
                request.pending.runtime._work.sendall(b"not a frame, though it is long enough for a head")
                threading.Event().wait()
            case "variables":
                return said(json.dumps(dict(os.environ)))
            case "spawn":
                # In a group of its own it would outlive an unload as well.
                return said(subprocess.Popen(["sleep", "600"]).pid)
            case "flood":
                for i in range(int(rest)):
                    pb_utils.Logger.log_info(f"flood {i}")
                pb_utils.Logger.log_error("an error all the same")
                return said("flooded")
            case "log":
                pb_utils.Logger.log_warn(rest)
                print("printed", rest, flush=True)
                return said("logged")
        return said(text)

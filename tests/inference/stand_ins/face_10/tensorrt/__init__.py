"""TensorRT 10.16, as the stand-in shows it."""

from tensorrt_stand_in import face

globals().update(face("10.16.1.11"))

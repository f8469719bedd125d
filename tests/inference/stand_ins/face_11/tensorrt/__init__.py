"""TensorRT 11.4, as the stand-in shows it: without the names that 11 removed."""

from tensorrt_stand_in import face

globals().update(face("11.4.0.106"))

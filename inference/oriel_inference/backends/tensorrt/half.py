"""Converts an ONNX file to FP16 for TensorRT 11, whose builder has no setting for it: by ONNX Runtime's converter.

Operators without FP16, and initial values that only those read, stay in FP32. So do the types of inputs and outputs,
between which and the FP16 inside there are casts.
"""

from importlib import metadata
from pathlib import Path

from oriel_inference.backends import without_folders
from oriel_inference.errors import CompilerMissing, LoadFailed

MAX_TEXT = 300
_NEEDED = "FP16 with TensorRT 11 needs {}, which converts the ONNX file: pip install '{}'"


def converter() -> str:
    """Return the converting packages with their versions. Imports none of them. Raises CompilerMissing."""
    import onnxruntime

    if not (Path(onnxruntime.__file__).parent / "transformers" / "float16.py").is_file():
        raise CompilerMissing(_NEEDED.format("onnxruntime.transformers", "onnxruntime>=1.22"))
    try:
        return f"onnxruntime-{onnxruntime.__version__}/onnx-{metadata.version('onnx')}"
    except metadata.PackageNotFoundError as error:
        raise CompilerMissing(_NEEDED.format("onnx", "onnx>=1.19")) from error


def convert(source: Path, folder: Path) -> Path:
    """Write the model in `source` as FP16 into an empty folder, with its weights in a file of their own; return its
    path.

    Needs memory for the whole model. Raises LoadFailed, and OSError where the folder cannot be written.
    """
    import onnx
    from onnx.external_data_helper import load_external_data_for_model
    from onnx.shape_inference import infer_shapes
    from onnxruntime.transformers.float16 import convert_float_to_float16

    path = folder / source.name
    try:
        # Shapes are inferred without the weights, because a message with them must not be larger than 2 GiB.
        model = infer_shapes(onnx.load(str(source), load_external_data=False))
        load_external_data_for_model(model, str(source.parent))
        model = convert_float_to_float16(model, keep_io_types=True, disable_shape_infer=True)
        onnx.save_model(model, str(path), save_as_external_data=True, location=f"{path.name}.data")
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a converter of graphs that others wrote fails in many ways
        text = without_folders(f"{type(error).__name__}: {error}")[:MAX_TEXT]
        raise LoadFailed(f"{source.name} cannot be converted to FP16: {text}") from error
    return path

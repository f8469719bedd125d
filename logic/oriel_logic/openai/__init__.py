"""Services for clients of the OpenAI API: make one in a handler file and it is served (docs/logic-openai.md).

    from oriel_logic.openai import Embeddings

    minilm = Embeddings(model="minilm", tokenizer="minilm/tokenizer.json", served_as="all-MiniLM-L6-v2")

Needs the extra `embeddings`. Nothing here is imported by a server that has no such file.
"""

from oriel_logic.openai.embeddings import Embeddings
from oriel_logic.openai.language import LanguageModel

__all__ = ["Embeddings", "LanguageModel"]

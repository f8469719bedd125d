"""Services for clients of the OpenAI API: made in a handler file (docs/logic-openai.md).

    from oriel_logic.openai import Embeddings, LanguageModel

    minilm = Embeddings(model="minilm", tokenizer="minilm/tokenizer.json", served_as="all-MiniLM-L6-v2")
    chat = LanguageModel(model="chat")

Needs the extra `embeddings`. A server without such a file imports nothing of this package.
"""

from oriel_logic.openai.embeddings import Embeddings
from oriel_logic.openai.language import LanguageModel

__all__ = ["Embeddings", "LanguageModel"]

"""`/v1/chat/completions` and its sisters with SmolLM2-135M-Instruct (`make run DEMO=chat`)."""

from oriel_logic.openai import LanguageModel

chat = LanguageModel(
    model="chat",  # on the inference server
    served_as="smollm2",  # the name that clients use
)

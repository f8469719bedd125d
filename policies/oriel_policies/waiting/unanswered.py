"""Counts the messages of a stream that a server may still be working on. Pure.

A message may have one answer, none, or many (a decoupled model). An answer names its model. Some servers (Triton, ours)
also mark the last answer to a message, others do not. Hence:

1. An answer finishes a message for the model that it names, unless it is marked as one that others follow.
2. An answer that names no model, or one that was not asked, finishes a message only if one model alone is at work.
   Otherwise another model's message might be taken as finished, and its computing would not be charged.
"""

MAX_MODELS = 64  # models of one stream that are distinguished at a time; messages for others count as one model's


class Unanswered:
    """The unfinished messages of one stream. models: their number for each model that may be at work."""

    def __init__(self) -> None:
        self.models: dict[str, int] = {}

    def sent(self, model: str) -> None:
        """Count a message that was sent to the server."""
        models = self.models
        if model not in models and len(models) >= MAX_MODELS:
            model = ""
        models[model] = models.get(model, 0) + 1

    def note_answer(self, model: str, final: bool | None) -> None:
        """Count an answer. final: True if it is the last one to its message; None if it does not say."""
        models = self.models
        if final is False or not models:
            return
        if not model or model not in models:
            if len(models) > 1:
                return
            (model,) = models
        models[model] -= 1
        if not models[model]:
            del models[model]

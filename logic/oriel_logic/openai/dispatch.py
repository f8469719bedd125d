"""`/v1/embeddings`, `/v1/completions`, `/v1/chat/completions` and `/v1/models`: one path, several models.

The body's `model` says which. A model that the caller's tenant may not use is absent in the same words as one that is
not there: `x-oriel-models`, the tenant's patterns, comes from the gateway, which does not read bodies.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from oriel_logic.context import Context, Workers
from oriel_logic.errors import DeadlineExceeded, HandlerFailed, LogicError, MediaUnsupported, ModelUnknown, Outcome
from oriel_logic.inference import InferenceServers
from oriel_logic.messages import MAX_JSON_BYTES
from oriel_logic.openai.answers import openai_error
from oriel_logic.openai.embeddings import Embeddings
from oriel_logic.openai.language import LanguageModel
from oriel_logic.openai.schema import ChatRequest, CompletionRequest, EmbeddingRequest, parse
from oriel_logic.openai.served import Desk, Served, StepModels
from oriel_logic.pipeline import first_logic_error
from oriel_logic.replies import Reply
from oriel_logic.stages import Ledger
from oriel_policies.documents.promises import fits
from oriel_wire.context import CallContext

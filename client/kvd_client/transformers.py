"""Prefix reuse for Hugging Face transformers, through kvd.

In two lines, with the output of plain `generate`:

    with kvd_client.transformers.cached(model) as kvd:
        output = model.generate(**inputs)

Or step by step:

    client = connect_model(model)                          # once a process
    prefix = load_prefix(client, model, input_ids)         # milliseconds; a miss is .cache None
    cache = prefix.cache or new_cache(model)
    output = model.generate(input_ids, past_key_values=cache, ...)
    store_prefix(client, model, cache, input_ids)

docs/transformers.md says what is cached and what is not. This module only gathers the names:

    hf_generate   `cached`
    hf_request    reading a call of `generate`
    hf_prefix     `connect_model`, `load_prefix`, `store_prefix`
    hf_move       moving KV between a cache and kvd's slots
    hf_rows       batches and their padding
    hf_cache      how a cache is cut into objects
    hf_model      what makes two models the same
"""

from __future__ import annotations

from kvd_client.hf_cache import (
    Unsupported,
    UnsupportedCache,
    UnsupportedInput,
    UnsupportedModel,
    new_cache,
)
from kvd_client.hf_generate import Cached, Generation, cached
from kvd_client.hf_model import WrongModel, weights_digest
from kvd_client.hf_prefix import Prefix, Stored, connect_model, load_prefix, store_prefix

__all__ = [
    "Cached",
    "Generation",
    "Prefix",
    "Stored",
    "Unsupported",
    "UnsupportedCache",
    "UnsupportedInput",
    "UnsupportedModel",
    "WrongModel",
    "cached",
    "connect_model",
    "load_prefix",
    "new_cache",
    "store_prefix",
    "weights_digest",
]

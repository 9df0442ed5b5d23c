"""The answer of ``/inspect``: how the model reads a text, for the playground."""

import base64
from collections.abc import Sequence
from typing import Any

from gpt.decoding.context import Context
from gpt.insight.inspect import lens, trace
from gpt.tokenizers.tokenizer import Tokenizer

MAX_TOKENS = 512  # Maximum length of a text, because an inspection computes it in a single step.
MAX_NEXT = 200  # Number of most likely next tokens.


def inspect(context: Context, tokenizer: Tokenizer, ids: Sequence[int]) -> dict[str, Any]:
    """Inspects the last ids of a text, at most `MAX_TOKENS`.

    The answer has the tokens, the attention of the last token as base64 of float32 (layers, heads, tokens), the logit
    lens of the last token, the most likely next tokens, and the logarithm of the sum of the others' exponentials.
    """

    def describe(id: int, **values: float) -> dict[str, Any]:
        return {"id": id, "bytes": list(tokenizer.decode_bytes([id])), **values}

    activations = trace(context.model, ids[-min(MAX_TOKENS, context.size) :], queries=slice(-1, None))
    layers, heads = activations.patterns.shape[:2]
    opinions = lens(context.model, activations.residual[:, -1:])
    logits = activations.logits[-1, : context.vocab_size].cpu()
    total, best = logits.logsumexp(-1), logits.topk(min(MAX_NEXT, len(logits)))
    next_tokens = zip(best.indices.tolist(), best.values.tolist(), (best.values - total).tolist(), strict=True)
    others = logits.index_fill(0, best.indices, float("-inf")).logsumexp(-1).item()
    return {
        "tokens": [describe(id) for id in activations.ids.tolist()],
        "layers": layers,
        "heads": heads,
        "attention": base64.b64encode(activations.patterns.astype("<f4").tobytes()).decode(),
        "lens": [
            [describe(id, probability=share) for id, share in zip(row[0].tolist(), shares[0].tolist(), strict=True)]
            for row, shares in zip(opinions.ids, opinions.probabilities, strict=True)
        ],
        "next": [describe(id, logit=logit, logprob=logprob) for id, logit, logprob in next_tokens],
        "rest": others if len(logits) > MAX_NEXT else None,
    }

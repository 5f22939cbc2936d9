"""A logits processor of a user's: a request may name the one token that it wants."""

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class ForcedToken(AdapterLogitsProcessor):
    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        token = (params.extra_args or {}).get("only")
        if token is None:
            return None

        def force(output_ids, logits):
            forced = torch.full_like(logits, float("-inf"))
            forced[token] = 0.0
            return forced

        return force

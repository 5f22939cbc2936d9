"""Several steps of the model for one scheduling (``VLLM_FL_STEPS``), as an algorithm of SGLang's registry for drafts.

SGLang gives a request several slots of its cache and several tokens for one scheduling only if an algorithm drafts. The
algorithm here drafts nothing: its worker decodes several times, and every token counts as SGLang's own.
"""

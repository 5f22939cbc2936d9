"""An IO processor: it turns texts into prompts, and embeddings into how many there are and how long they are."""

from vllm.plugins.io_processors.interface import IOProcessor

from vllm import PoolingParams


def register() -> str:
    return "io_processor.ShapeProcessor"


class ShapeProcessor(IOProcessor):
    def parse_data(self, data):
        return data["texts"]

    def merge_pooling_params(self, params=None):
        return PoolingParams(task="embed")

    def pre_process(self, prompt, request_id=None, **kwargs):
        return prompt

    def post_process(self, model_output, request_id=None, **kwargs):
        return {"texts": len(model_output), "dimensions": [output.outputs.data.shape[-1] for output in model_output]}

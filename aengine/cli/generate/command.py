"""The command `aengine generate`."""

from __future__ import annotations

import argparse
import os

from aengine.cli.errors import UsageError, no_prompts
from aengine.cli.images import add_images, read_images
from aengine.cli.model import add_model_or_server
from aengine.cli.sampling import add_sampling, read_sampling

_EPILOG = """\
each line of the input is one of
  "a prompt"                                        [1, 2, 3]
  {"prompt": "a prompt or token ids", "max_tokens": 20, "temperature": 0, "id": "passed through"}
  {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
  {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "hi"}]}]}
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}   as in OpenAI's batch files

and gives one line of output: {"line": 1, "text": ..., "finish_reason": ..., "usage": ...}. A line that cannot be
answered gives {"line": 2, "error": {"message": ..., "param": ...}}; the others are answered, and the exit status is 1.
A line with custom_id gets the answer of the HTTP server: {"id": ..., "custom_id": "1", "response": {"status_code": 200,
"request_id": ..., "body": {...}}, "error": null}.

examples:
  aengine generate prompts.jsonl --max-tokens 50 > results.jsonl
  echo '"The capital of France is"' | aengine generate --temperature 0
  aengine generate in.jsonl --url http://localhost:8000 --output out.jsonl
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="run a file of prompts through a model",
        description="Run prompts, as lines of JSON, through a model; results are lines of JSON in the same order.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "input", nargs="?", default="-", metavar="INPUT", help="file of prompts (default: standard input)"
    )
    parser.add_argument("--output", default="-", metavar="FILE", help="file for the results (default: standard output)")
    parser.add_argument("--text", action="store_true", help="every line of the input is a prompt, not JSON")
    add_images(parser, "that goes with every prompt")
    parser.add_argument("--token-ids", action="store_true", help="add token_ids to the results")
    parser.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="prompts that run or wait at once (default: the engine's max_num_seqs; with --url: 64)",
    )
    # Results have no field for prompt_logprobs. The flag --speculation is a knob; a line may have the field.
    add_sampling(parser, without=("prompt_logprobs", "speculation"))
    add_model_or_server(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.input != "-" and (os.path.isdir(args.input) or not os.path.exists(args.input)):
        raise UsageError(no_prompts(args.input))
    sampling = read_sampling(args)
    images = read_images(args)
    if args.concurrency is not None and args.concurrency < 1:
        raise UsageError(f"--concurrency must be at least 1, got {args.concurrency}")
    from aengine.cli.generate.run import generate

    return generate(args, sampling, images)

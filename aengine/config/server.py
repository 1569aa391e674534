"""The knobs of the HTTP server."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

CallFormatName = Literal[  # how models write tool calls: `text/answer/formats/table.py`
    "apertus",
    "cohere",
    "command_r",
    "deepseek",
    "deepseek_v31",
    "gemma4",
    "glm",
    "glm4",
    "granite",
    "hermes",
    "hy3",
    "hy3_preview",
    "internlm",
    "kimi",
    "lfm2",
    "llama3",
    "minimax",
    "mistral",
    "mistral_list",
    "nemotron",
    "olmo",
    "phi4",
    "pythonic",
    "qwen3_coder",
    "seed",
]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The knobs of the HTTP layer."""

    served_model_name: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(
            description="names in /v1/models and requests; answers have the first; default: the id, or the name and "
            "path of the model's folder"
        ),
    ] = ()
    max_body_bytes: Annotated[int, Meta(ge=1, description="longest request body")] = 32 * 2**20
    body_timeout: Annotated[float, Meta(gt=0, description="seconds in which a request's body must arrive")] = 60.0
    allowed_origins: Annotated[
        tuple[str, ...], Meta(description="browser origins that may call the API; * for any")
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="names allowed in a request's Host header besides localhost and IP addresses; * for any; "
            "default: none over loopback, any over other addresses"
        ),
    ] = ()
    api_keys: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(
            description="API keys, of which each request needs one (Authorization: Bearer ..., or x-api-key); default: "
            "no key is needed"
        ),
    ] = ()
    image_url_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="hosts from which images are fetched by their http(s) URLs: names, *.name for all below it, "
            "addresses, each with an optional :port, or * for every public host; private addresses must be named "
            "themselves; default: no URL is fetched"
        ),
    ] = ()
    image_url_timeout: Annotated[
        float, Meta(gt=0, description="seconds in which all images of a request must be fetched")
    ] = 10.0
    salt_by_key: Annotated[
        bool | None,
        Meta(
            description="give each API key a prefix cache of its own, so that no key learns from cached_tokens or the "
            "time to the first token what others have sent; default: on with several keys"
        ),
    ] = None
    page: Annotated[bool, Meta(description="serve the chat page at /")] = True
    tokenizer_info: Annotated[
        bool, Meta(description="serve the tokenizer's settings, with its chat template, at /tokenizer_info")
    ] = False
    heartbeat: Annotated[
        float, Meta(gt=0, description="seconds without a token after which a stream gets a comment or a ping")
    ] = 15.0
    tool_format: Annotated[
        Literal["auto", CallFormatName, "off"],
        Meta(description="how the model writes tool calls; auto: as its chat template does"),
    ] = "auto"
    reasoning: Annotated[
        Literal["auto", "think", "off"],
        Meta(description="return <think> blocks as reasoning_content; auto: if the model knows them"),
    ] = "auto"
    lora_folders: Annotated[
        tuple[str, ...], Meta(description="folders below which adapters may be loaded over HTTP (with lora_loading)")
    ] = ()
    lora_hub: Annotated[
        bool,
        Meta(description="allow loading adapters over HTTP by Hugging Face id, which downloads them"),
    ] = False
    reload_folders: Annotated[
        tuple[str, ...], Meta(description="folders below which weights may be reloaded over HTTP")
    ] = ()
    vllm_metrics: Annotated[
        bool, Meta(description="/metrics also has vLLM's names, for routers and autoscalers that read these")
    ] = False
    max_stream_backlog: Annotated[
        int, Meta(ge=1, description="fragments that may wait for a slow reader; with more, the request is aborted")
    ] = 65536
    max_answer_candidates: Annotated[
        int,
        Meta(
            ge=1,
            description="most logprobs in one answer: tokens of prompts and outputs with their candidates, over all "
            "choices (about 200 bytes of memory each)",
        ),
    ] = 2**20
    kept_responses: Annotated[
        int,
        Meta(
            ge=0,
            le=2**20,
            description="responses of /v1/responses kept in memory, for previous_response_id and later reads; 0: none",
        ),
    ] = 0
    kept_response_bytes: Annotated[
        int, Meta(ge=1, description="most bytes of kept responses and their inputs; the oldest are dropped")
    ] = 64 * 2**20
    stalled_reader_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds without reading after which a client's connection is closed",
        ),
    ] = 60.0

    def __post_init__(self) -> None:
        names: object = self.served_model_name
        if isinstance(names, str):  # one name as text, from a program that makes this struct itself
            msgspec.structs.force_setattr(self, "served_model_name", (names,))


class ListenConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The knobs of `aengine serve` about listening."""

    host: Annotated[str, Meta(description="address to listen on; 0.0.0.0 for every network")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 for any free one")] = 8000
    ssl_certfile: Annotated[
        str | None, Meta(description="certificate chain in PEM; the server then speaks HTTPS only")
    ] = None
    ssl_keyfile: Annotated[str | None, Meta(description="the key, unless ssl_certfile contains it")] = None
    shutdown_timeout: Annotated[
        float, Meta(ge=0, description="seconds in which running answers may finish when the server is stopped")
    ] = 30.0
    backlog: Annotated[int, Meta(ge=1, le=65535, description="connections that may wait to be accepted")] = 2048
    keep_alive_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds after which a connection without requests is closed (a TLS handshake has at most 10)",
        ),
    ] = 30.0
    keep_alive_requests: Annotated[
        int, Meta(ge=1, description="requests after which an HTTP/1 connection is closed")
    ] = 10_000
    max_header_bytes: Annotated[int, Meta(ge=1024, description="longest request line and headers")] = 32 * 2**10
    access_log: Annotated[bool, Meta(description="write a line for each request to standard output")] = False
    workers: Annotated[int, Meta(description="only 1, because the engine is this process")] = 1

"""The knobs of the HTTP server."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

CallFormatName = Literal[  # how models write calls of tools: `text/answer/formats/table.py`
    "deepseek",
    "deepseek_v31",
    "gemma4",
    "glm",
    "granite",
    "hermes",
    "llama3",
    "mistral",
    "mistral_list",
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
            description="names in /v1/models and in requests, the first in answers; default: the id, or the name and "
            "the path of the model's folder"
        ),
    ] = ()
    max_body_bytes: Annotated[int, Meta(ge=1, description="longest request body")] = 32 * 2**20
    body_timeout: Annotated[float, Meta(gt=0, description="seconds that a request's body may take to arrive")] = 60.0
    allowed_origins: Annotated[
        tuple[str, ...], Meta(description="browser origins that may call the API; * for any")
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="names that a request's Host may have beside localhost and IP addresses; * for any; default: "
            "over loopback none, over other addresses any"
        ),
    ] = ()
    api_keys: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(
            description="keys of which a request must name one (Authorization: Bearer ..., or x-api-key); default: no "
            "key is asked"
        ),
    ] = ()
    salt_by_key: Annotated[
        bool | None,
        Meta(
            description="keep what the prefix cache holds apart for each API key, so that no key learns by "
            "cached_tokens or the time to the first token what others have sent; default: with several keys"
        ),
    ] = None
    page: Annotated[bool, Meta(description="serve the chat page at /")] = True
    tokenizer_info: Annotated[
        bool, Meta(description="give the tokenizer's settings, its chat template among them, at /tokenizer_info")
    ] = False
    heartbeat: Annotated[
        float, Meta(gt=0, description="seconds without a token after which a stream gets a comment, or a ping")
    ] = 15.0
    tool_format: Annotated[
        Literal["auto", CallFormatName, "off"],
        Meta(description="how the model writes calls of tools; auto: as its chat template does"),
    ] = "auto"
    reasoning: Annotated[
        Literal["auto", "think", "off"],
        Meta(description="give <think> blocks as reasoning_content; auto: where the model knows them"),
    ] = "auto"
    lora_folders: Annotated[
        tuple[str, ...], Meta(description="folders below which adapters may be loaded over HTTP (lora_loading)")
    ] = ()
    lora_hub: Annotated[
        bool,
        Meta(description="let adapters be loaded over HTTP by Hugging Face ids, which downloads what is asked for"),
    ] = False
    reload_folders: Annotated[
        tuple[str, ...], Meta(description="folders below which weights may be reloaded from over HTTP")
    ] = ()
    vllm_metrics: Annotated[
        bool, Meta(description="/metrics under vLLM's names as well, for routers and autoscalers that read those")
    ] = False
    max_stream_backlog: Annotated[
        int, Meta(ge=1, description="fragments a reader may be behind before its request is aborted")
    ] = 65536
    max_answer_candidates: Annotated[
        int,
        Meta(
            ge=1,
            description="logprobs that one answer may hold: tokens of prompts and outputs, with their candidates, over "
            "all choices (about 200 bytes of memory each)",
        ),
    ] = 2**20
    kept_responses: Annotated[
        int,
        Meta(
            ge=0,
            le=2**20,
            description="responses of /v1/responses kept in memory for previous_response_id and for being read again; "
            "0: none",
        ),
    ] = 0
    kept_response_bytes: Annotated[
        int, Meta(ge=1, description="most bytes of kept responses and their inputs; the oldest are forgotten")
    ] = 64 * 2**20
    stalled_reader_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds that a reader may take nothing of what is sent before its connection is cut",
        ),
    ] = 60.0

    def __post_init__(self) -> None:
        names: object = self.served_model_name
        if isinstance(names, str):  # one name, by a program that makes this struct itself
            msgspec.structs.force_setattr(self, "served_model_name", (names,))


class ListenConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The knobs of `aengine serve`: where and how it listens."""

    host: Annotated[str, Meta(description="address to listen on; 0.0.0.0 for every network")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 for any that is free")] = 8000
    ssl_certfile: Annotated[
        str | None, Meta(description="certificate chain in PEM; with it the server speaks HTTPS alone")
    ] = None
    ssl_keyfile: Annotated[str | None, Meta(description="its key, unless that stands in ssl_certfile as well")] = None
    shutdown_timeout: Annotated[
        float, Meta(ge=0, description="seconds that running answers may take to finish when the server is told to stop")
    ] = 30.0
    backlog: Annotated[int, Meta(ge=1, le=65535, description="connections that may wait to be accepted")] = 2048
    keep_alive_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds after which a connection without requests is closed (TLS has 10 at most to begin)",
        ),
    ] = 30.0
    keep_alive_requests: Annotated[
        int, Meta(ge=1, description="requests after which an HTTP/1 connection is closed")
    ] = 10_000
    max_header_bytes: Annotated[int, Meta(ge=1024, description="longest request line and headers")] = 32 * 2**10
    access_log: Annotated[bool, Meta(description="write a line for each request to standard output")] = False
    workers: Annotated[int, Meta(description="only 1: the engine is this process")] = 1

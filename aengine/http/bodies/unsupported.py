"""Known fields of requests of OpenAI's, Anthropic's, vLLM's, SGLang's and others' that no struct here has: refused by
name, or ignored where that changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from aengine.http.bodies.messages import CountTokensRequest, MessagesRequest
from aengine.http.bodies.pooling import POOLED
from aengine.http.bodies.refusal import Unsupported
from aengine.http.bodies.requests import ChatRequest, CompletionRequest, GenerateRequest
from aengine.http.bodies.responses_api.request import ResponsesRequest
from aengine.http.bodies.responses_api.unsupported import REFUSED_IN_RESPONSES
from aengine.http.bodies.structured import StructuredOutputs
from aengine.http.door.body import FIELDS, decode

_log = logging.getLogger("aengine")

_MOST_NAMES = 256  # that are remembered as logged
_LONGEST_NAME = 64  # characters that are logged


def _off(remedy: str) -> Unsupported:
    return Unsupported(remedy, (False,))


_NOT_BUILT = Unsupported("not supported")
_TEXT_ONLY = "only text is read and written here"
_NO_BEAMS = "there is no beam search; draw n answers and choose by logprobs"
_NO_ADAPTERS = Unsupported("send the adapter's name as model")
_NO_CODE = Unsupported("requests bring no code of their own; see logit_bias, allowed_token_ids and bad_words")
_CALLS_ARE_TEXT = Unsupported("calls are part of the text here; /v1/chat/completions takes it", ("auto", True))
_UNCUT = Unsupported("all tokens are given here; take the last ones of them")
_NO_WHITESPACE = "whitespace in JSON is the model's own choice here"
_OTHER_DRAWS = "not supported; see top_p, top_k and min_p"

REFUSED: Mapping[str, Unsupported] = {
    # OpenAI
    "functions": Unsupported("an older form of tools; send tools", ([],)),
    "function_call": Unsupported("an older form of tool_choice; send tool_choice", ("none", "auto")),
    "modalities": Unsupported(_TEXT_ONLY, (["text"], [])),
    "audio": Unsupported(_TEXT_ONLY),
    "web_search_options": Unsupported("the model searches nothing by itself; offer it tools"),
    "moderation": _NOT_BUILT,
    "reasoning": Unsupported("send reasoning_effort", ({},)),
    "thinking": Unsupported("send reasoning_effort, or chat_template_kwargs"),
    "enable_thinking": Unsupported("send chat_template_kwargs with enable_thinking in it, or reasoning_effort"),
    # vLLM
    "use_beam_search": _off(_NO_BEAMS),
    "length_penalty": Unsupported(_NO_BEAMS, (1,)),
    "early_stopping": _off(_NO_BEAMS),
    "truncation_side": Unsupported("the end of the prompt is kept, as with left", ("left",)),
    "documents": Unsupported("put them into messages, or into chat_template_kwargs", ([],)),
    "chat_template": Unsupported("templates are the checkpoint's own"),
    "mm_processor_kwargs": Unsupported(_TEXT_ONLY, ({},)),
    "media_io_kwargs": Unsupported(_TEXT_ONLY, ({},)),
    "prompt_embeds": Unsupported("prompts are text or token ids"),
    "logprob_token_ids": Unsupported("not supported; ask for logprobs"),
    "return_prompt_text": _off("not supported; /tokenize gives the prompt"),
    "include_reasoning": Unsupported("the thought is always told; reasoning_effort none keeps it away", (True,)),
    "thinking_token_budget": Unsupported("not supported; see max_tokens and reasoning_effort", (-1,)),
    "repetition_detection": Unsupported("not supported; see repetition_penalty and frequency_penalty"),
    "watermarking": _off("not supported"),
    "logits_processors": _NO_CODE,
    "vllm_xargs": Unsupported("not supported", ({},)),
    "kv_transfer_params": Unsupported("prompts are computed where they are continued", ({},)),
    "ec_transfer_params": Unsupported("prompts are computed where they are continued", ({},)),
    "guided_whitespace_pattern": Unsupported(_NO_WHITESPACE),
    "structured_outputs.whitespace_pattern": Unsupported(_NO_WHITESPACE),
    "structured_outputs.disable_any_whitespace": _off(_NO_WHITESPACE),
    "structured_outputs.disable_additional_properties": _off("say so in the schema, with additionalProperties"),
    "structured_outputs.structural_tag": Unsupported("not supported; a grammar can say the same"),
    # SGLang
    "regex": Unsupported("send structured_outputs with regex in it"),
    "ebnf": Unsupported("send structured_outputs with grammar in it, in Lark's notation"),
    "json_schema": Unsupported("send structured_outputs with json in it, or response_format"),
    "lora_path": _NO_ADAPTERS,
    "lora_request": _NO_ADAPTERS,
    "stop_regex": Unsupported("send stop, or structured_outputs with regex in it"),
    "no_stop_trim": _off("send include_stop"),
    "custom_logit_processor": _NO_CODE,
    "custom_params": Unsupported(_NO_CODE.remedy, ({},)),
    "session_params": Unsupported("there are no sessions; what was computed is found again by its tokens", ({},)),
    "separate_reasoning": Unsupported("thoughts are told apart; the server's knob reasoning says otherwise", (True,)),
    "stream_reasoning": Unsupported("thoughts are streamed as they come", (True,)),
    "return_hidden_states": _off("not supported"),
    "return_prompt_token_ids": _off("not supported; /tokenize gives them"),
    "return_meta_info": _off("not supported"),
    "return_logprob": _off("send logprobs"),
    "top_logprobs_num": Unsupported("send logprobs", (0,)),
    "token_ids_logprob": Unsupported("not supported; ask for logprobs"),
    "images_config": Unsupported(_TEXT_ONLY, ({},)),
    "image_data": Unsupported(_TEXT_ONLY, ([],)),
    "input_embeds": Unsupported("prompts are text or token ids"),
    "use_audio_in_video": _off(_TEXT_ONLY),
    "task": _NOT_BUILT,
    "sampling_params": Unsupported("its fields stand at the top here, beside the prompt", ({},)),
    "max_new_tokens": Unsupported("it is called max_tokens here"),
    "min_new_tokens": Unsupported("it is called min_tokens here", (0,)),
    "sampling_seed": Unsupported("it is called seed here"),
    # llama.cpp
    "grammar": Unsupported("send structured_outputs with grammar in it, in Lark's notation", ("",)),
    "n_predict": Unsupported("it is called max_tokens here", (-1,)),
    "n_probs": Unsupported("send logprobs", (0,)),
    "repeat_penalty": Unsupported("it is called repetition_penalty here", (1,)),
    # Ways to draw that transformers and llama.cpp have
    "typical_p": Unsupported(_OTHER_DRAWS, (1,)),
    "tfs_z": Unsupported(_OTHER_DRAWS, (1,)),
    "top_a": Unsupported(_OTHER_DRAWS, (0,)),
    "epsilon_cutoff": Unsupported(_OTHER_DRAWS, (0,)),
    "eta_cutoff": Unsupported(_OTHER_DRAWS, (0,)),
    "mirostat": Unsupported(_OTHER_DRAWS, (0,)),
    "xtc_probability": Unsupported(_OTHER_DRAWS, (0,)),
    "dynatemp_range": Unsupported("not supported; see temperature", (0,)),
    "dry_multiplier": Unsupported("not supported; see repetition_penalty and frequency_penalty", (0,)),
}

REFUSED_IN_MESSAGES: Mapping[str, Unsupported] = {
    "thread": Unsupported("there are no conversations kept here; send all of their messages", (False,)),
    "mcp_servers": Unsupported("this server calls no others; offer their tools as tools of your own", ([],)),
    "container": Unsupported("nothing is executed here", ({},)),
    "compaction": Unsupported("not supported; ask for a summary in a message"),
}

# What an answer does not depend on: accounts, routing, caches, and how chunks are cut.
_OF_NO_CONSEQUENCE = (
    # hints: how long an answer is, and what it may be like
    "verbosity prediction "
    "user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options "
    "request_id rid session_id extra_key custom_labels stream_interval spaces_between_special_tokens "
    "guided_decoding_backend structured_outputs.backend structured_outputs.disable_fallback "
    "return_token_offsets return_mm_kwargs routed_experts_prompt_start return_routed_experts routed_experts_start_len "
    "return_cached_tokens_details logprob_start_len bootstrap_host bootstrap_port bootstrap_room routed_dp_rank "
    "client_metadata disagg_prefill_dp_rank data_parallel_rank ngram_corpus_id max_dynamic_patch min_dynamic_patch "
    # of Anthropic's; what a server may do with a context, and whom to ask where it refuses, is the server's own choice
    "betas anthropic_beta anthropic_version cache_control context_management diagnostics inference_geo speed "
    "user_profile_id workspace_id billing_policy fallbacks fallback_credit_token"
)

# Of what draws nothing.
_REFUSED_OF_POOLED: Mapping[str, Unsupported] = {
    "messages": Unsupported("send the text as input"),
    "chat_template": REFUSED["chat_template"],
    "mm_processor_kwargs": REFUSED["mm_processor_kwargs"],
    "truncation_side": REFUSED["truncation_side"],
    "embed_dtype": Unsupported("numbers are float32", ("float32",)),
    "endianness": Unsupported("numbers are little-endian", ("native", "little")),
    "use_activation": Unsupported("scores and classes are probabilities", (True,)),
    "activation": Unsupported("scores and classes are probabilities", (True,)),
    "softmax": Unsupported("scores and classes are probabilities", (True,)),
    "max_tokens_per_doc": Unsupported("not supported; shorten the documents"),
    "max_tokens_per_query": Unsupported("not supported; shorten the query"),
    "max_chunks_per_doc": Unsupported("not supported; shorten the documents"),
    "rank_fields": Unsupported("documents have one field, text", (["text"],)),
    "task": _NOT_BUILT,
    "late_chunking": _off("not supported"),
    "prompt_name": Unsupported("not supported; write it in front of the text"),
}

_STRUCTS: tuple[type[msgspec.Struct], ...] = (GenerateRequest, CompletionRequest, ChatRequest, ResponsesRequest)
_EVERY_STRUCT: tuple[type[msgspec.Struct], ...] = (*_STRUCTS, *POOLED)
_OF_A_PROMPT = (  # what its tokens depend on
    "functions",
    "reasoning",
    "thinking",
    "enable_thinking",
    "documents",
    "chat_template",
    "mm_processor_kwargs",
    "media_io_kwargs",
)
_OF_MESSAGES: tuple[type[msgspec.Struct], ...] = (MessagesRequest, CountTokensRequest)
_WITHOUT_EFFECT = {"stream_options", "parallel_tool_calls", "tool_choice"}  # where they have no place
_NAMES = {struct: frozenset(struct.__struct_fields__) for struct in (*_EVERY_STRUCT, *_OF_MESSAGES)}
_NAMES[CountTokensRequest] = _NAMES[MessagesRequest]  # what an answer alone would take is passed over
_HARMLESS = _WITHOUT_EFFECT.union(_OF_NO_CONSEQUENCE.split())
_ELSEWHERE = frozenset().union(*(_NAMES[struct] for struct in _STRUCTS)) - _HARMLESS
_NOTHING: tuple[Any, ...] = (False, "", [], {})
_USUAL: Mapping[str, tuple[Any, ...]] = {"best_of": (1,), "truncation": ("auto", "disabled")}  # what is done anyway


class UnknownFields:
    """Refuses unsupported fields that would change an answer, and logs each other unknown name once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def check(self, fields: Mapping[str, msgspec.Raw], struct: type[msgspec.Struct], path: str) -> None:
        """Check the fields of a body that `struct` has been decoded from. Raises `InvalidRequestError`, naming one."""
        for name, value in _unknown(fields, struct).items():
            refused = _refused(name, struct, path)
            if refused is not None:
                refused.check(name, value)
            elif name not in _HARMLESS:
                self._log(name, path)

    def check_tokenized(self, body: bytes | bytearray) -> None:
        """Of `/tokenize`: only what changes a prompt matters, whichever request the prompt is then made for."""
        fields = decode(body, FIELDS)
        for name in _OF_A_PROMPT:
            if name in fields:
                REFUSED[name].check(name, fields[name])
        if "truncate_prompt_tokens" in fields:
            _UNCUT.check("truncate_prompt_tokens", fields["truncate_prompt_tokens"])

    def _log(self, name: str, path: str) -> None:
        name = name[:_LONGEST_NAME]
        if name in self._logged or len(self._logged) == _MOST_NAMES:
            return
        self._logged.add(name)
        last = "; further names are not logged" if len(self._logged) == _MOST_NAMES else ""
        _log.warning(
            "requests to %s have a field %s, which is not known here and is ignored%s", path, ascii(name), last
        )


def _refused(name: str, struct: type[msgspec.Struct], path: str) -> Unsupported | None:
    if struct in POOLED:
        return _REFUSED_OF_POOLED.get(name)
    if struct in _OF_MESSAGES and name in REFUSED_IN_MESSAGES:
        return REFUSED_IN_MESSAGES[name]
    if struct is CountTokensRequest or (struct in _OF_MESSAGES and name in _HARMLESS):  # a count needs a prompt alone
        return None
    if struct is ResponsesRequest and name in REFUSED_IN_RESPONSES:
        return REFUSED_IN_RESPONSES[name]
    if name == "add_special_tokens":
        usual = struct not in (ChatRequest, ResponsesRequest)
        return Unsupported("prompts get the tokenizer's special tokens, chats those of their template", (usual,))
    if name in ("tool_choice", "parallel_tool_calls") and struct is GenerateRequest:
        return _CALLS_ARE_TEXT
    if name == "max_completion_tokens":
        return Unsupported("it is called max_tokens here")
    if name == "return_token_ids" and struct is GenerateRequest:
        return Unsupported("they are always told here", (True, False))
    if name in _ELSEWHERE and name not in REFUSED:
        return Unsupported(f"{path} has no such field", (*_NOTHING, *_USUAL.get(name, ())))
    return REFUSED.get(name)


def _unknown(fields: Mapping[str, msgspec.Raw], struct: type[msgspec.Struct]) -> dict[str, msgspec.Raw]:
    """The fields that the struct does not have, and within `structured_outputs` by their path."""
    unknown = {name: value for name, value in fields.items() if name not in _NAMES[struct]}
    form = fields.get("structured_outputs")
    if form is not None and bytes(form).startswith(b"{"):
        for name, value in decode(bytes(form), FIELDS).items():
            if name not in StructuredOutputs.__struct_fields__:
                unknown[f"structured_outputs.{name}"] = value
    return unknown

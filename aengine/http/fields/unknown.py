"""Fields of other servers' APIs that are not supported: refused by name, or ignored if they change nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, NamedTuple

import msgspec

from aengine.errors import InvalidRequestError
from aengine.http.entry.body import FIELDS, decode
from aengine.http.fields.structured import ResponseFormat, StructuredOutputs

_log = logging.getLogger("aengine")
NESTED = frozenset(("structured_outputs", "response_format"))  # fields whose inner fields are checked as well
_FORM = msgspec.json.Decoder(dict[str, Any] | None)
_MOST_NAMES = 256  # unknown names that are logged, each once
_LONGEST_NAME = 64  # characters of a name that are logged


class Unsupported(NamedTuple):
    """An unsupported field: why it is refused or what to send instead.

    harmless: values without effect, which are accepted; so is null.
    """

    remedy: str
    harmless: tuple[Any, ...] = ()

    def check(self, name: str, value: msgspec.Raw) -> None:
        given = msgspec.json.decode(value)
        if given is not None and given not in self.harmless:
            raise InvalidRequestError(f"{name}: {self.remedy}", name)


def unless_false(remedy: str) -> Unsupported:
    """Return an unsupported field that accepts null and false."""
    return Unsupported(remedy, (False,))


NOT_SUPPORTED = Unsupported("not supported")
_TEXT_ONLY = "only text is read and written here"
_NO_BEAMS = "there is no beam search; send n and choose an answer by logprobs"
_NO_ADAPTERS = Unsupported("send the adapter's name as model")
_NO_CODE = Unsupported("code in requests is not executed; see logit_bias, allowed_token_ids and bad_words")
_NO_WHITESPACE = "not supported; the model chooses the whitespace in JSON"
_SPECIAL_TOKENS = "not supported; a prompt gets the tokenizer's special tokens, a chat those of its template"
_VERBOSITY = ("low", "medium", "high")  # a hint without effect
_OTHER_SAMPLERS = "not supported; see top_p, top_k and min_p"

REFUSED: Mapping[str, Unsupported] = {
    # OpenAI
    "functions": Unsupported("an older form of tools; send tools", ([],)),
    "function_call": Unsupported("an older form of tool_choice; send tool_choice", ("none", "auto")),
    "modalities": Unsupported(_TEXT_ONLY, (["text"], [])),
    "audio": Unsupported(_TEXT_ONLY),
    "web_search_options": Unsupported("the model cannot search by itself; send tools"),
    "moderation": NOT_SUPPORTED,
    "reasoning": Unsupported("send reasoning_effort", ({},)),
    "thinking": Unsupported("send reasoning_effort, or chat_template_kwargs"),
    "enable_thinking": Unsupported("send chat_template_kwargs with enable_thinking in it, or reasoning_effort"),
    "text": Unsupported("send response_format with its format", ({}, *({"verbosity": one} for one in _VERBOSITY))),
    # vLLM
    "use_beam_search": unless_false(_NO_BEAMS),
    "length_penalty": Unsupported(_NO_BEAMS, (1,)),
    "early_stopping": unless_false(_NO_BEAMS),
    "truncation_side": Unsupported("the end of the prompt is kept, as with left", ("left",)),
    "documents": Unsupported("put them into messages, or into chat_template_kwargs", ([],)),
    "chat_template": Unsupported("not supported; the checkpoint's chat template is used"),
    "mm_processor_kwargs": Unsupported(_TEXT_ONLY, ({},)),
    "media_io_kwargs": Unsupported(_TEXT_ONLY, ({},)),
    "prompt_embeds": Unsupported("prompts are text or token ids"),
    "logprob_token_ids": Unsupported("not supported; ask for logprobs"),
    "return_prompt_text": unless_false("not supported; /tokenize gives the prompt"),
    "include_reasoning": Unsupported(
        "the thought is always in the answer; reasoning_effort none switches it off", (True,)
    ),
    "thinking_token_budget": Unsupported("not supported; see max_tokens and reasoning_effort", (-1,)),
    "repetition_detection": Unsupported("not supported; see repetition_penalty and frequency_penalty"),
    "watermarking": unless_false("not supported"),
    "logits_processors": _NO_CODE,
    "vllm_xargs": Unsupported("not supported", ({},)),
    "kv_transfer_params": Unsupported("not supported; prefill and decode run on the same server", ({},)),
    "ec_transfer_params": Unsupported("not supported; prefill and decode run on the same server", ({},)),
    "guided_whitespace_pattern": Unsupported(_NO_WHITESPACE),
    "structured_outputs.whitespace_pattern": Unsupported(_NO_WHITESPACE),
    "structured_outputs.disable_any_whitespace": unless_false(_NO_WHITESPACE),
    "structured_outputs.disable_additional_properties": unless_false("send additionalProperties in the schema"),
    "structured_outputs.structural_tag": Unsupported("not supported; send a grammar"),
    # SGLang
    "regex": Unsupported("send structured_outputs with regex in it"),
    "ebnf": Unsupported("send structured_outputs with grammar in it, in Lark's notation"),
    "json_schema": Unsupported("send structured_outputs with json in it, or response_format"),
    "lora_path": _NO_ADAPTERS,
    "lora_request": _NO_ADAPTERS,
    "stop_regex": Unsupported("send stop, or structured_outputs with regex in it"),
    "no_stop_trim": unless_false("send include_stop"),
    "custom_logit_processor": _NO_CODE,
    "custom_params": Unsupported(_NO_CODE.remedy, ({},)),
    "session_params": Unsupported(
        "there are no sessions; the prefix cache finds earlier prompts by their tokens", ({},)
    ),
    "separate_reasoning": Unsupported(
        "thoughts are always separate, unless the server's knob reasoning is changed", (True,)
    ),
    "stream_reasoning": Unsupported("thoughts are always streamed", (True,)),
    "return_hidden_states": unless_false("not supported"),
    "return_prompt_token_ids": unless_false("not supported; /tokenize gives them"),
    "return_meta_info": unless_false("not supported"),
    "return_logprob": unless_false("send logprobs"),
    "top_logprobs_num": Unsupported("send logprobs", (0,)),
    "token_ids_logprob": Unsupported("not supported; ask for logprobs"),
    "images_config": Unsupported(_TEXT_ONLY, ({},)),
    "image_data": Unsupported(_TEXT_ONLY, ([],)),
    "input_embeds": Unsupported("prompts are text or token ids"),
    "use_audio_in_video": unless_false(_TEXT_ONLY),
    "task": NOT_SUPPORTED,
    "sampling_params": Unsupported("send its fields at the top level of the body", ({},)),
    "max_new_tokens": Unsupported("it is called max_tokens here"),
    "min_new_tokens": Unsupported("it is called min_tokens here", (0,)),
    "sampling_seed": Unsupported("it is called seed here"),
    # llama.cpp
    "grammar": Unsupported("send structured_outputs with grammar in it, in Lark's notation", ("",)),
    "n_predict": Unsupported("it is called max_tokens here", (-1,)),
    "n_probs": Unsupported("send logprobs", (0,)),
    "repeat_penalty": Unsupported("it is called repetition_penalty here", (1,)),
    # Sampling methods of transformers and llama.cpp
    "typical_p": Unsupported(_OTHER_SAMPLERS, (1,)),
    "tfs_z": Unsupported(_OTHER_SAMPLERS, (1,)),
    "top_a": Unsupported(_OTHER_SAMPLERS, (0,)),
    "epsilon_cutoff": Unsupported(_OTHER_SAMPLERS, (0,)),
    "eta_cutoff": Unsupported(_OTHER_SAMPLERS, (0,)),
    "mirostat": Unsupported(_OTHER_SAMPLERS, (0,)),
    "xtc_probability": Unsupported(_OTHER_SAMPLERS, (0,)),
    "dynatemp_range": Unsupported("not supported; see temperature", (0,)),
    "dry_multiplier": Unsupported("not supported; see repetition_penalty and frequency_penalty", (0,)),
}
REFUSED_WITH_PROMPTS: Mapping[str, Unsupported] = {
    **REFUSED,
    "max_completion_tokens": Unsupported("it is called max_tokens here"),
    "add_special_tokens": Unsupported(_SPECIAL_TOKENS, (True,)),
}
REFUSED_WITH_CHATS: Mapping[str, Unsupported] = {
    **REFUSED,
    "add_special_tokens": Unsupported(_SPECIAL_TOKENS, (False,)),
}

# Fields that do not change an answer and are ignored: accounts, routing, caches, chunk sizes.
_IGNORED_FIELDS = (
    # hints about length and content
    "verbosity prediction "
    "user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options "
    "request_id rid session_id extra_key custom_labels stream_interval spaces_between_special_tokens "
    "guided_decoding_backend structured_outputs.backend structured_outputs.disable_fallback "
    "return_token_offsets return_mm_kwargs routed_experts_prompt_start return_routed_experts routed_experts_start_len "
    "return_cached_tokens_details logprob_start_len bootstrap_host bootstrap_port bootstrap_room routed_dp_rank "
    "client_metadata disagg_prefill_dp_rank data_parallel_rank ngram_corpus_id max_dynamic_patch min_dynamic_patch "
    # fields of Anthropic's API without effect here
    "betas anthropic_beta anthropic_version cache_control context_management diagnostics inference_geo speed "
    "user_profile_id workspace_id billing_policy fallbacks fallback_credit_token"
)

_WITHOUT_EFFECT = {"stream_options", "parallel_tool_calls", "tool_choice"}  # ignored by endpoints that do not have them
_HARMLESS = _WITHOUT_EFFECT.union(_IGNORED_FIELDS.split())
_NOTHING: tuple[Any, ...] = (False, "", [], {})
_USUAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "truncation": ("auto", "disabled"),
}  # values that describe the default behaviour


class RequestBody(msgspec.Struct, kw_only=True):
    """The base of a request's body."""

    refused: ClassVar[Mapping[str, Unsupported]] = {}  # unsupported fields
    ignored: ClassVar[frozenset[str]] = frozenset()  # fields that are ignored without a log line
    refuses_other_fields: ClassVar[bool] = False  # whether fields are refused that only other endpoints have

    model: str | None = None


class UnknownFields:
    """Refuses unsupported fields that would change an answer, and logs every other unknown name once."""

    def __init__(self) -> None:
        self._generating_fields: frozenset[str] = frozenset()  # the fields of all requests that generate text
        self._logged: set[str] = set()

    def add(self, generating: Iterable[type[RequestBody]]) -> None:
        """Add requests that generate text. Their fields are refused by endpoints that do not have them."""
        self._generating_fields = (
            self._generating_fields.union(*(body.__struct_fields__ for body in generating)) - _HARMLESS
        )

    def check(self, fields: Mapping[str, msgspec.Raw], body: type[RequestBody], path: str) -> None:
        """Check the fields of a request with this body. Raises `InvalidRequestError`, naming a refused field."""
        if "response_format" in fields and "response_format" in body.__struct_fields__:
            _refuse_misspelled_schema(fields["response_format"])
        for name, value in _unknown(fields, body).items():
            refused = body.refused.get(name)
            if refused is None and body.refuses_other_fields and name in self._generating_fields:
                refused = Unsupported(f"{path} has no such field", (*_NOTHING, *_USUAL.get(name, ())))
            if refused is not None:
                refused.check(name, value)
            elif name not in _HARMLESS:
                self._log(name, path)

    def _log(self, name: str, path: str) -> None:
        name = name[:_LONGEST_NAME]
        if name in self._logged or len(self._logged) == _MOST_NAMES:
            return
        self._logged.add(name)
        last = "; further names are not logged" if len(self._logged) == _MOST_NAMES else ""
        _log.warning(
            "requests to %s have a field %s, which is not known here and is ignored%s", path, ascii(name), last
        )


def _refuse_misspelled_schema(form: msgspec.Raw) -> None:
    """Raise `InvalidRequestError` if `response_format` has type json_object, no schema, and an unknown key."""
    known = ResponseFormat.__struct_fields__
    given = {name: value for name, value in (decode(bytes(form), _FORM) or {}).items() if value is not None}
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None and given.keys() & set(known) == {"type"} and given["type"] == "json_object":
        nearest = next(iter(get_close_matches(unknown, known, n=1)), "schema")
        path = f"response_format.{unknown[:_LONGEST_NAME]}"
        raise InvalidRequestError(f"{path}: there is no such field; did you mean {nearest}?", path)


def _unknown(fields: Mapping[str, msgspec.Raw], body: type[RequestBody]) -> dict[str, msgspec.Raw]:
    """Return the fields that the body does not have, and those within `structured_outputs` by their path."""
    known = {*body.__struct_fields__, *body.ignored}
    unknown = {name: value for name, value in fields.items() if name not in known}
    form = fields.get("structured_outputs")
    if form is not None and bytes(form).startswith(b"{"):
        for name, value in decode(bytes(form), FIELDS).items():
            if name not in StructuredOutputs.__struct_fields__:
                unknown[f"structured_outputs.{name}"] = value
    return unknown

"""Grammars over single bytes and markers, tools to call, and their calls as text."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from aengine.config import CallFormatName
from aengine.text.answer.formats.base import CallableTool

SPECIAL = (
    "<end>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "[THINK]",
    "[/THINK]",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<function_calls>",
    "</function_calls>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<|channel>",
    "<channel|>",
    "<|assistant|>",
    "<|action_start|>",
    "<|plugin|>",
    "<|action_end|>",
)
MARKERS = {text: 256 + index for index, text in enumerate(SPECIAL) if index}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
SUM = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/number"}, "how": {"enum": ["fast", "slow"]}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "integer"}},
}
TOOLS = (CallableTool("get_weather", CITY), CallableTool("sum-2", SUM), CallableTool("stop"))
ARGUMENTS = {tool.name: tool.parameters for tool in TOOLS}


class Bytes:
    """A vocabulary of all bytes and the special tokens."""

    bos_token_id = None
    eos_token_id = 256
    tokens = [bytes([value]) for value in range(256)] + [text.encode() for text in SPECIAL]
    special_token_ids = tuple(range(256, 256 + len(SPECIAL)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def ids_of(text: str, special: bool) -> list[int]:
    ids: list[int] = []
    while text:
        token = next((token for token in SPECIAL if special and text.startswith(token)), "")
        ids += [256 + SPECIAL.index(token)] if token else list(text[0].encode())
        text = text[len(token) or 1 :]
    return ids


def text_of(ids: list[int]) -> str:
    return b"".join(Bytes.tokens[token] for token in ids).decode(errors="replace")


@functools.lru_cache(64)
def compiled(source: str, tokenizer: LLTokenizer = TOKENIZER) -> LLMatcher:
    """Return a matcher to copy: many texts are tested with the same grammar."""
    assert LLMatcher.validate_grammar(source, tokenizer) == ""
    return LLMatcher(tokenizer, source)


def accepts(grammar: str, text: str, special: bool = False) -> bool:
    matcher = compiled(LLMatcher.grammar_from_lark(grammar)).deep_copy()
    ids = ids_of(text, special)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def call(name: str, arguments: str, form: CallFormatName = "hermes") -> str:
    """Return a call as a chat template of the format writes it. arguments: JSON."""
    return calls([(name, arguments)], form)


def calls(written: Sequence[tuple[str, str]], form: CallFormatName) -> str:
    """Return several calls in a row."""
    match form:
        case "hermes":
            objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in written]
            return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
        case "llama3":
            return "; ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in written)
        case "mistral":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in written)
        case "mistral_list":
            objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in written]
            return f"[TOOL_CALLS][{', '.join(objects)}]"
        case "qwen3_coder":
            return "\n".join(
                f"<tool_call>\n<function={name}>\n{_elements(json.loads(arguments))}</function>\n</tool_call>"
                for name, arguments in written
            )
        case "seed":
            elements = [(name, _elements(json.loads(arguments), "")) for name, arguments in written]
            return "\n".join(
                f"<seed:tool_call>\n<function={name}>\n{each}</function>\n</seed:tool_call>" for name, each in elements
            )
        case "minimax":
            elements = [(name, _elements(json.loads(arguments), "")) for name, arguments in written]
            each = "\n".join(f'<invoke name="{name}">\n{one}</invoke>' for name, one in elements)
            each = re.sub(r"<parameter=([^>]*)>", r'<parameter name="\1">', each)
            return f"<minimax:tool_call>\n{each}\n</minimax:tool_call>"
        case "glm":
            pairs = [(name, _texts(json.loads(arguments))) for name, arguments in written]
            return "\n".join(
                f"<tool_call>{name}\n"
                + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items())
                + "</tool_call>"
                for name, texts in pairs
            )
        case "hy3" | "hy3_preview":
            end = ":opensource>" if form == "hy3" else ">"
            pairs = [(name, _texts(json.loads(arguments))) for name, arguments in written]
            elements = [
                (
                    name,
                    "".join(
                        f"<arg_key{end}{key}</arg_key{end}\n<arg_value{end}{text}</arg_value{end}\n"
                        for key, text in texts.items()
                    ),
                )
                for name, texts in pairs
            ]
            each = "".join(f"<tool_call{end}{name}<tool_sep{end}\n{one}</tool_call{end}\n" for name, one in elements)
            return f"<tool_calls{end}\n{each}</tool_calls{end}"
        case "deepseek":
            each = "\n".join(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
                for name, arguments in written
            )
            return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"
        case "deepseek_v31":
            each = "".join(
                f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
                for name, arguments in written
            )
            return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"
        case "kimi":
            each = "".join(
                f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
                for index, (name, arguments) in enumerate(written)
            )
            return f"<|tool_calls_section_begin|>{each}<|tool_calls_section_end|>"
        case "phi4" | "granite":
            objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in written]
            return f"<|tool_call|>[{', '.join(objects)}]{'<|/tool_call|>' if form == 'phi4' else ''}"
        case "nemotron":
            objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in written]
            return f"<TOOLCALL>[{', '.join(objects)}]</TOOLCALL>"
        case "apertus":
            objects = [f'{{"{name}": {arguments}}}' for name, arguments in written]
            return f"<|tools_prefix|>[{', '.join(objects)}]<|tools_suffix|>"
        case "gemma4":
            objects = [f"{name}{_gemma(json.loads(arguments))}" for name, arguments in written]
            return "".join(f"<|tool_call>call:{each}<tool_call|>" for each in objects)
        case "olmo":
            lines = [f"{name}({_keywords(json.loads(arguments))})" for name, arguments in written]
            return "<function_calls>" + "\n".join(lines) + "</function_calls>"
        case "cohere":
            objects = [
                f'{{"tool_call_id": "0", "tool_name": "{name}", "parameters": {arguments}}}'
                for name, arguments in written
            ]
            return f"<|START_ACTION|>[{', '.join(objects)}]<|END_ACTION|>"
        case "command_r":
            objects = [f'{{"tool_name": "{name}", "parameters": {arguments}}}' for name, arguments in written]
            return f"Action: ```json\n[{', '.join(objects)}]```"
        case "glm4":
            return "<|assistant|>".join(f"{name}\n{arguments}" for name, arguments in written)
        case "internlm":
            objects = [f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in written]
            return "".join(f"<|action_start|><|plugin|>\n{each}<|action_end|>" for each in objects)
        case "lfm2":
            each = ", ".join(f"{name}({_keywords(json.loads(arguments))})" for name, arguments in written)
            return f"<|tool_call_start|>[{each}]<|tool_call_end|>"
        case "pythonic":
            return f"[{', '.join(f'{name}({_keywords(json.loads(arguments))})' for name, arguments in written)}]"


def _gemma(value: object) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(_gemma, value))}]"
        case dict():
            members = sorted(value.items(), key=lambda item: item[0].lower())
            return f"{{{','.join(f'{key}:{_gemma(each)}' for key, each in members)}}}"
    return json.dumps(value)


def _texts(arguments: dict[str, object]) -> dict[str, str]:
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in arguments.items()
    }


def _elements(arguments: dict[str, object], around: str = "\n") -> str:
    texts = _texts(arguments).items()
    return "".join(f"<parameter={key}>{around}{text}{around}</parameter>\n" for key, text in texts)


def _keywords(arguments: dict[str, object]) -> str:
    texts = {
        key: repr(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)
        for key, value in arguments.items()
    }
    return ", ".join(f"{key}={text}" for key, text in texts.items())

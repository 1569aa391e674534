"""The table of call formats. Detects the format of a checkpoint's chat template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping

from aengine.config import CallFormatName
from aengine.text.answer.formats.base import CallFormat
from aengine.text.answer.formats.deepseek import DeepSeek, Kimi
from aengine.text.answer.formats.gemma import Gemma4
from aengine.text.answer.formats.glm import Glm, Hy3
from aengine.text.answer.formats.glm4 import Glm4
from aengine.text.answer.formats.json_formats import (
    ApertusList,
    CohereActions,
    CommandR,
    Hermes,
    InternLm,
    JsonList,
    Llama3,
    NemotronList,
)
from aengine.text.answer.formats.mistral import Mistral, MistralList
from aengine.text.answer.formats.pythonic import Pythonic, PythonicLines, PythonicList
from aengine.text.answer.formats.qwen3_coder import MINIMAX, Qwen3Coder

# The formats with the most specific markers come first.
FORMATS: Mapping[CallFormatName, CallFormat] = {
    "seed": Qwen3Coder("<seed:tool_call>", "</seed:tool_call>", line_break=""),
    "minimax": Qwen3Coder("<minimax:tool_call>", "</minimax:tool_call>", "", MINIMAX, grouped=True),
    "qwen3_coder": Qwen3Coder(),
    "hy3": Hy3(":opensource"),
    "hy3_preview": Hy3(""),
    "glm": Glm(),
    "glm4": Glm4(),
    "deepseek": DeepSeek(fenced=True),
    "deepseek_v31": DeepSeek(fenced=False),
    "kimi": Kimi(),
    "gemma4": Gemma4(),
    "phi4": JsonList(ended=True),
    "granite": JsonList(ended=False),
    "olmo": PythonicLines(),
    "lfm2": PythonicList(),
    "cohere": CohereActions(),
    "command_r": CommandR(),
    "nemotron": NemotronList(),
    "apertus": ApertusList(),
    "internlm": InternLm(),
    "hermes": Hermes(),
    "mistral": Mistral(),
    "mistral_list": MistralList(),
    "pythonic": Pythonic(),
    "llama3": Llama3(),
}


def call_format_of(templates: Iterable[str]) -> CallFormatName | None:
    """Return the format that chat templates use; None if they have no tools or an unknown format."""
    text = "\n".join(templates)
    return next((name for name, form in FORMATS.items() if form.detect(text)), None)


def call_format_in(vocabulary: Container[str], templates: Iterable[str]) -> CallFormatName | None:
    """Return the format whose own markers are tokens of the vocabulary; None if there is not exactly one.

    For templates with tools that show no call, such as LFM2.5's. Markers that several formats share do not count, nor
    do those in a template: the model writes calls of another format between them.
    """
    text = "\n".join(templates)
    syntaxes = {name: form.syntax for name, form in FORMATS.items()}
    begins = Counter(syntax.begin for syntax in syntaxes.values())
    found = [
        name
        for name, syntax in syntaxes.items()
        if begins[syntax.begin] == 1
        and syntax.begin in vocabulary
        and syntax.end in vocabulary
        and syntax.begin not in text
    ]
    return found[0] if len(found) == 1 else None

"""Reads the `tokenizers` library's own tokenizer and applies tokenizer_config.json to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tokenizers import AddedToken, normalizers, processors
from tokenizers import Tokenizer as Backend

from aengine.errors import AengineError, CheckpointError
from aengine.text.template.control_tokens import ControlTokens
from aengine.text.tokens.bounds import refuse_growth
from aengine.text.tokens.settings import TokenizerSettings, read_bytes

_MAX_FILE_BYTES = 64 * 2**20  # twice the largest file in use
# Markers around the text of an answer, by a token that only their family has: Command R7B and A, GLM-4.1V, ERNIE 4.5.
_AROUND_ANSWERS = {
    "<|START_OF_TURN_TOKEN|>": ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    "[gMASK]": ("<answer>", "</answer>"),
    "<|begin_of_sentence|>": ("<response>", "</response>"),
}


@contextmanager
def library_errors(convert: Callable[[BaseException], AengineError]) -> Iterator[None]:
    """Turn exceptions and Rust panics of the tokenizers library into errors of aengine, made by `convert`."""
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        # A panic's class is not a subclass of Exception and cannot be imported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise convert(error) from error
        raise


def decoder_of(backend: Backend) -> object:
    """Return the decoder as tokenizer.json writes it."""
    return json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None


def read_backend(path: Path) -> Backend:
    """Read tokenizer.json. Raises `CheckpointError`."""
    data = read_bytes(path, _MAX_FILE_BYTES)  # as text it would be decoded and encoded again, which takes 0.06 s
    refuse_growth(path, data)
    with library_errors(lambda error: CheckpointError(f"{path} is not a tokenizer: {_reason(error):.300}")):
        backend = Backend.from_buffer(data)
    # Training scripts save these settings. A server neither cuts nor pads prompts.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _reason(error: BaseException) -> str:
    return str(error).removeprefix("Cannot instantiate Tokenizer from buffer: ")


def apply_settings(backend: Backend, settings: TokenizerSettings) -> None:
    """Apply tokenizer_config.json to the tokenizer of tokenizer.json, as transformers does.

    The markers around an answer's text become special tokens, whatever their flag: they are no part of the answer.
    """
    for entry in settings.added_tokens:
        # A new token is added only if it gets the id that the entry states. Else the entry belongs to another
        # vocabulary.
        known = backend.token_to_id(entry.content)
        if known == entry.token_id or (known is None and backend.get_vocab_size() == entry.token_id):
            backend.add_tokens([AddedToken(entry.content, **_with_defaults(entry.flags))])
    decoder = backend.get_added_tokens_decoder()
    special = {token.content for token in decoder.values() if token.special}
    named = [*settings.named_tokens.values(), *settings.extra_special]
    named += (
        one for token, around in _AROUND_ANSWERS.items() if backend.token_to_id(token) is not None for one in around
    )
    for content in named:
        if content not in special and backend.token_to_id(content) is not None:
            backend.add_special_tokens([AddedToken(content, special=True, normalized=False)])
    if settings.add_bos or settings.add_eos:
        _add_boundaries(backend, settings)


def _add_boundaries(backend: Backend, settings: TokenizerSettings) -> None:
    """Add BOS and EOS if tokenizer_config.json asks for them and tokenizer.json does not add them."""
    plain, around = backend.encode("a", add_special_tokens=False).tokens, backend.encode("a").tokens
    start = next((at for at in range(len(around)) if around[at : at + len(plain)] == plain), 0)
    before, after = around[:start], around[start + len(plain) :]
    bos, eos = settings.named_tokens.get("bos_token", ""), settings.named_tokens.get("eos_token", "")
    if settings.add_bos and bos not in before and backend.token_to_id(bos) is not None:
        before = [bos, *before]
    if settings.add_eos and eos not in after and backend.token_to_id(eos) is not None:
        after = [*after, eos]
    ids = {token: backend.token_to_id(token) for token in (*before, *after)}
    single = [*(f"{token}:0" for token in before), "$A:0", *(f"{token}:0" for token in after)]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B:1"], special_tokens=[(t, i) for t, i in ids.items() if i is not None]
    )


def _with_defaults(flags: Mapping[str, bool]) -> dict[str, bool]:
    special = flags.get("special", False)
    return {"special": special, "normalized": not special, **flags}


def quoting_backend(backend: Backend, control: ControlTokens) -> Backend:
    """Return a tokenizer that reads the stand-ins of `control` as the characters they stand for.

    The stand-ins are replaced after special tokens have been recognised, so that no stand-in begins a special token.
    Both tokenizers share the model with its vocabulary.
    """
    quoting = Backend(backend.model)
    steps = [normalizers.Replace(stand_in, first) for first, stand_in in control.stand_ins.items()]
    quoting.normalizer = normalizers.Sequence([*steps, *([backend.normalizer] if backend.normalizer else [])])
    if backend.pre_tokenizer is not None:
        quoting.pre_tokenizer = backend.pre_tokenizer
    if backend.post_processor is not None:
        quoting.post_processor = backend.post_processor
    added = sorted(backend.get_added_tokens_decoder().items())
    # This tokenizer must recognise special tokens before normalization, whatever their flag.
    quoting.add_tokens([_unnormalized(token) if token.special else token for _, token in added])
    return quoting


def _unnormalized(token: AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=True,
    )

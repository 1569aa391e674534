"""The grammar library, or a sentence on why there is none."""

from aengine.errors import AengineError

try:
    from llguidance import LLExecutor as LLExecutor
    from llguidance import LLMatcher as LLMatcher
    from llguidance import LLParserLimits as LLParserLimits
    from llguidance import LLTokenizer as LLTokenizer
    from llguidance import TokenizerWrapper as TokenizerWrapper
except ImportError as error:  # of another machine or Python, or without what it links
    raise AengineError(f"the grammar library, llguidance, does not work here: {error}") from error
